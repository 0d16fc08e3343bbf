"""MXNet's options and attributes of optimizers, and where their rules run."""

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import torchkv
from helpers import assert_same, bits, full, script, stored
from mxnet_cases import rate, start
from mxnet_formulas import Formula
from row_values import sparse
from torchkv.optim import mxnet

NAMES = {0: "fc_weight", 1: "fc_bias", 2: "bn_gamma", 3: "bn_beta"}


def steps(kv):
    """How much the weights of all keys change in a step with gradients of 1."""
    before = {key: stored(kv, key) for key in kv.keys()}
    kv.push(list(kv.keys()), [torch.ones_like(value) for value in before.values()])
    return {key: (before[key] - stored(kv, key))[0, 0].item() for key in kv.keys()}


def with_four_keys(kv, optimizer, **options):
    kv.init([0, 1, 2, 3], [full(1)] * 4)
    kv.set_optimizer(optimizer, **options)
    return kv


def test_learning_rate_and_weight_decay(kv):
    kv.set_optimizer("sgd", learning_rate=0.5, wd=0.25)
    assert kv.optimizer.learning_rate == kv.optimizer.lr == 0.5
    assert kv.optimizer.wd == 0.25
    kv.optimizer.set_learning_rate(0.125)
    kv.optimizer.wd = 0.5
    kv.init(3, full(1))
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(1 - 0.125 * 1.5))
    with pytest.raises(ValueError, match="lr"):
        kv.optimizer.set_learning_rate(-1)
    assert kv.optimizer.learning_rate == 0.125


def test_set_learning_rate_keeps_what_groups_have_of_their_own(kv):
    with_four_keys(kv, "sgd", learning_rate=0.5)
    kv.set_param_groups([{"keys": [1]}, {"keys": [2], "lr": 0.25}])
    kv.optimizer.set_learning_rate(1.0)
    assert [group["lr"] for group in kv.optimizer.param_groups] == [1.0, 1.0, 0.25]


def test_a_learning_rate_of_none_is_that_of_all_classes(kv):
    kv.set_optimizer("adam", learning_rate=None)
    assert kv.optimizer.learning_rate == 0.01
    kv.set_optimizer("sgd", learning_rate=None)
    assert kv.optimizer.learning_rate == 0.01


def test_only_weights_and_gammas_of_named_keys_decay(kv):
    with_four_keys(kv, "sgd", learning_rate=0.5, wd=0.5, param_idx2name=NAMES)
    assert steps(kv) == {0: 0.75, 1: 0.5, 2: 0.75, 3: 0.5}


def test_multipliers_by_name_and_by_key(kv):
    with_four_keys(kv, "sgd", learning_rate=0.5, param_idx2name=NAMES)
    kv.optimizer.set_lr_mult({"fc_bias": 2.0, 3: 0.0})
    assert steps(kv) == {0: 0.5, 1: 1.0, 2: 0.5, 3: 0.0}
    kv.optimizer.wd = 0.5
    kv.optimizer.set_lr_mult({})
    kv.optimizer.set_wd_mult({"fc_bias": 1.0, "fc_weight": 0.0})
    changes = steps(kv)
    assert changes[0] == changes[3] == 0.5
    assert changes[1] == 0.5 * (1 + 0.5 * 0.0)  # its weight is 0
    assert changes[2] == 0.5 * (1 + 0.5 * 0.5)


def test_multipliers_of_parameters(kv):
    parameters = {
        0: SimpleNamespace(lr_mult=2.0, wd_mult=1.0),
        1: SimpleNamespace(lr_mult=1.0, wd_mult=0.0),
    }
    with_four_keys(kv, "sgd", learning_rate=0.5, wd=0.5, param_dict=parameters)
    assert steps(kv) == {0: 1.5, 1: 0.5, 2: 0.75, 3: 0.75}


def test_lars_scales_weights_only(kv):
    with_four_keys(kv, "lars", learning_rate=0.5, eta=0.5, param_idx2name=NAMES)
    changes = steps(kv)
    assert changes[0] == pytest.approx(0.25)  # equal norms: eta
    assert changes[1] == changes[2] == changes[3] == 0.5


# mxnet.optimizer.Optimizer.opt_registry of MXNet 1.9.1.
REGISTRY = (
    "adadelta adagrad adam adamax ccsgd dcasgd ftml ftrl groupadagrad lamb lars lbsgd "
    "nadam nag rmsprop sgd sgld signum test"
).split()


def test_all_names_of_mxnet_make_its_optimizers(kv):
    for name in REGISTRY:
        kv.set_optimizer(name)
        assert isinstance(kv.optimizer, mxnet.MXNetOptimizer), name
    names = {cls.__name__.lower() for cls in mxnet.ALL}
    assert names | {"ccsgd"} == {*REGISTRY}


@pytest.mark.parametrize("cls", mxnet.ALL, ids=lambda cls: cls.__name__)
def test_options_and_state_are_copied_pickled_and_loaded(cls):
    torch.manual_seed(1)
    gradients = torch.randn(3, 4, 5)
    with torchkv.create() as kv:
        kv.init(3, torch.ones(4, 5))
        kv.set_optimizer(cls(learning_rate=0.01, rescale_grad=0.5))
        kv.push(3, gradients[0])
        again = pickle.loads(pickle.dumps(kv.optimizer))
        assert repr(again) == repr(kv.optimizer) and type(again) is cls
        loaded = torchkv.create()
        loaded.init(3, stored(kv, 3))
        loaded.set_optimizer(again)
        loaded.optimizer.load_state_dict(kv.optimizer.state_dict())
        stores = [kv, copy.deepcopy(kv), loaded]
        for gradient in gradients[1:]:
            for store in stores:
                store.push(3, gradient)
        assert type(stores[1].optimizer) is cls
        assert len({bits(store.pull(3)) for store in stores}) == 1


def test_a_saved_store_has_the_optimizer(tmp_path):
    with torchkv.create() as kv:
        kv.init(3, torch.ones(4, 5))
        kv.set_optimizer("rmsprop", learning_rate=0.1, centered=True, wd=0.1)
        kv.push(3, torch.ones(4, 5))
        kv.save(tmp_path / "x")
        other = torchkv.load(tmp_path / "x")
        for store in (kv, other):
            store.push(3, torch.full((4, 5), 2.0))
        assert_same(stored(other, 3), stored(kv, 3))
        assert repr(other.optimizer) == repr(kv.optimizer)


def test_names_of_scripts_and_cpp_have_a_prefix(kv):
    """There, "sgd" alone is torch's."""

    def train(kv: torchkv.KVStore, name: str, gradient: torch.Tensor):
        kv.set_optimizer(name, {"lr": 0.5, "momentum": 0.5})
        kv.push(3, gradient)
        kv.set_optimizer(name, {"lr": 0.25, "momentum": 0.5})
        kv.push(3, gradient)

    kv.init(3, full(0))
    script(train)(kv.script_object, "mxnet_sgd", full(1))
    assert_same(stored(kv, 3), full(-0.5 - (0.25 + 0.25)))
    kv.assign(3, full(0))
    script(train)(kv.script_object, "sgd", full(1))
    assert_same(stored(kv, 3), full(-0.5 - 0.25 * 1.5))


@pytest.mark.parametrize("name", ["sgd", "ftml", "lamb"])
def test_half_precision_has_a_master(kv, name):
    weight, gradients = start()
    options = {"momentum": 0.9} if name == "sgd" else {}
    kv.init(3, torch.tensor(weight, dtype=torch.bfloat16))
    kv.set_optimizer(name, **options)
    formula = Formula(name, stored(kv, 3).float().numpy(), options)
    for step, gradient in enumerate(gradients):
        pushed = torch.tensor(gradient, dtype=torch.bfloat16)
        kv.optimizer.set_learning_rate(rate(name, step))
        kv.push(3, pushed)
        formula.step(pushed.float().numpy(), rate(name, step))
    master = kv.optimizer.state_dict()["state"][3]["master"]
    np.testing.assert_allclose(master.numpy(), formula.w, rtol=1e-5, atol=1e-5)


def test_lbsgd_clips_the_sum_of_its_pushes(kv):
    kv.init(3, torch.zeros(2))
    options = {"batch_scale": 2, "warmup_epochs": 0, "max_norm": 1.0}
    kv.set_optimizer("lbsgd", learning_rate=0.5, **options)
    for _ in range(2):  # of norm 10 together
        kv.push(3, torch.tensor([3.0, 4.0]))
    # The mean of two pushes, at twice the learning rate.
    torch.testing.assert_close(stored(kv, 3), torch.tensor([-0.3, -0.4]))


def test_lbsgd_skips_pushes_that_are_not_finite(kv):
    kv.init(3, torch.zeros(2))
    kv.set_optimizer("lbsgd", learning_rate=1.0, batch_scale=1, skip_nonfinite=True)
    kv.push(3, torch.tensor([1.0, float("inf")]))
    kv.push(3, torch.tensor([1.0, 2.0]))
    assert stored(kv, 3).tolist() == [-1, -2]


def test_groups_with_and_without_norms_in_one_push(kv):
    kv.init([3, 5], [torch.full((2,), 4.0)] * 2)
    names = {3: "layer_weight", 5: "layer_bias"}
    lars = mxnet.LARS(learning_rate=0.5, eta=0.25, param_idx2name=names)
    kv.set_optimizer(lars)
    kv.push([3, 5], [torch.tensor([3.0, 4.0])] * 2)
    rate = 0.5 * 0.25 * 32**0.5 / 5
    expected = 4 - rate * torch.tensor([3.0, 4.0])
    torch.testing.assert_close(stored(kv, 3), expected)
    assert stored(kv, 5).tolist() == [2.5, 2]


def test_lbsgd_without_a_gradient_scale_changes_nothing(kv):
    kv.init(3, torch.ones(2))
    kv.set_optimizer("lbsgd", warmup_strategy="lars", rescale_grad=0.0)
    kv.push(3, torch.ones(2))
    assert stored(kv, 3).tolist() == [1, 1]


def test_sgld_by_its_moments(kv):
    torch.manual_seed(3)
    size, lr = 200_000, 0.04
    kv.init(3, torch.full((size,), 2.0))
    kv.set_optimizer("sgld", learning_rate=lr, wd=0.5)
    kv.push(3, torch.full((size,), 3.0))
    change = stored(kv, 3) - 2.0
    # The means of so many numbers are within 5 standard errors.
    assert abs(change.mean().item() + lr / 2 * (3 + 0.5 * 2)) < 5 * (lr / size) ** 0.5
    assert change.var().item() == pytest.approx(lr, rel=5 * (2 / size) ** 0.5)


INVALID = [
    ("groupadagrad", {"wd": 0.1}, ValueError, "weight_decay"),
    ("lbsgd", {"batch_scale": 0}, ValueError, "batch_scale|accumulate"),
    ("lbsgd", {"warmup_strategy": "cosine"}, ValueError, "'linear'.*'cosine'"),
    ("lbsgd", {"begin_epoch": 1, "batch_scale": 3}, ValueError, "multiple"),
    ("adam", {"beta1": 1.5}, ValueError, "beta1"),
    ("sgd", {"sym": "a symbol"}, ValueError, "sym"),
    ("sgd", {"param_idx2name": 3}, TypeError, "param_idx2name"),
    ("sgd", {"momentum": "x"}, TypeError, "momentum"),
    ("rmsprop", {"gamma3": 1}, ValueError, "did you mean 'gamma"),
]


@pytest.mark.parametrize(("name", "options", "error", "text"), INVALID, ids=str)
def test_invalid_options(kv, name, options, error, text):
    kv.init(3, full(1))
    with pytest.raises(error, match=text):
        kv.set_optimizer(name, **options)
    assert kv.optimizer is None


# MXNet has rules for sparse gradients of these only; others step all rows.
LAZY = {"SGD", "Adam", "AdaGrad", "Ftrl", "LARS", "LBSGD", "GroupAdaGrad"}


@pytest.mark.parametrize("cls", mxnet.ALL, ids=lambda cls: cls.__name__)
def test_classes_are_lazy_where_mxnet_is(cls):
    assert cls().lazy == (cls.__name__ in LAZY)
    assert cls(lazy=True).lazy
    assert not cls(lazy=False).lazy


def test_rows_of_sparse_gradients_are_all_stepped_without_a_rule_of_mxnet(kv):
    kv.init(3, torch.ones(2, 1))
    kv.set_optimizer("nag", learning_rate=0.1, momentum=0.5, wd=0.5)
    kv.push(3, sparse([1], torch.zeros(1, 1), (2, 1)))
    assert (kv.pull(3) < 1).all()


def test_writing_lr_and_wd_reaches_the_group_that_lars_makes(kv):
    kv.init([0, 1], [torch.ones(1), torch.ones(1)])
    names = {0: "fc_weight", 1: "fc_bias"}
    kv.set_optimizer("lars", learning_rate=0.1, param_idx2name=names)
    kv.optimizer.lr = 0.5
    assert [group["lr"] for group in kv.optimizer.param_groups] == [0.5, 0.5]
    kv.optimizer.wd = 0.25
    assert [group["weight_decay"] for group in kv.optimizer.param_groups] == [0.25] * 2
    kv.optimizer.param_groups[1]["lr"] = 0.125
    kv.optimizer.lr = 1.0
    assert [group["lr"] for group in kv.optimizer.param_groups] == [1.0, 0.125]


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("momentum", r"param_groups\[0\]\['momentum'\]"),
        ("clip_gradient", r"param_groups\[0\]\['clip_gradient'\]"),
        ("lr_mult", "call set_lr_mult"),
        ("wd_mult", "call set_wd_mult"),
        ("lazy_update", "write lazy"),
    ],
)
def test_attributes_that_would_change_nothing_are_refused(name, instead):
    optimizer = mxnet.SGD(momentum=0.5)
    with pytest.raises(
        AttributeError, match=f"mxnet.SGD: '{name}' cannot be .*{instead}"
    ):
        setattr(optimizer, name, 0.1)
    optimizer.mine = 3
    assert optimizer.mine == 3


def test_limits_of_zero_are_none():
    assert mxnet.RMSProp(clip_weights=0.0).param_groups[0]["clip_weights"] is None
    group = mxnet.LAMB(lower_bound=0.0, upper_bound=0).param_groups[0]
    assert group["lower_bound"] is None
    assert group["upper_bound"] is None


def test_a_key_of_another_kind_is_named_with_the_call(kv):
    kv.init("fc_weight", torch.ones(1))
    with pytest.raises(TypeError, match="^set_optimizer: expected str keys"):
        kv.set_optimizer("sgd", param_idx2name={0: "fc_bias"})
