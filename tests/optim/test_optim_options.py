"""The optimizer as a Python object: arguments, live options, groups, names."""

import gc
import inspect
import weakref

import pytest
import torch

import torchkv
from helpers import assert_same, full, script, stored
from torchkv import optim
from torchkv.optim import mxnet

OWN = [optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop]
ALL = [*OWN, optim.Lion, optim.LAMB]


# --- Arguments


@pytest.mark.parametrize("cls", OWN)
def test_arguments_are_those_of_torch(cls):
    ours = dict(inspect.signature(cls.__init__).parameters)
    theirs = dict(inspect.signature(getattr(torch.optim, cls.__name__)).parameters)
    del theirs["params"], ours["self"], ours["gradient"]
    assert list(ours) == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default, name
        assert ours[name].kind == parameter.kind, name


BAD = [
    ("lr", -1.0, " lr "),
    ("lr", float("nan"), " lr "),
    ("lr", float("inf"), " lr "),
    ("weight_decay", -0.1, "weight_decay"),
    ("eps", -1e-8, "eps"),
    ("momentum", -0.5, "momentum"),
    ("alpha", -0.5, "alpha"),
    ("lr_decay", -1, "lr_decay"),
    ("initial_accumulator_value", -1, "initial_accumulator_value"),
    ("betas", (1.0, 0.9), "beta1"),
    ("betas", (0.9, -0.1), "beta2"),
    ("betas", (0.9,), "betas"),
    ("nesterov", True, "nesterov"),
    ("rescale_grad", float("inf"), "rescale_grad"),
    ("clip_value", 0, "clip_value"),
    ("clip_value", -1.0, "clip_value"),
    ("max_norm", 0.0, "max_norm"),
    ("accumulate", 0, "accumulate"),
    ("accumulate", 1.5, "accumulate"),
    ("foreach", True, "foreach"),
    ("fused", True, "fused"),
    ("capturable", True, "capturable"),
    ("differentiable", True, "differentiable"),
]


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize(("option", "value", "text"), BAD)
def test_invalid_values_are_rejected(cls, option, value, text):
    names = [*inspect.signature(cls.__init__).parameters]
    if option not in [*names, *optim.GradientOptions.__annotations__]:
        with pytest.raises((TypeError, ValueError), match=option):
            cls(**{option: value})
        return
    with pytest.raises(ValueError, match=rf"^{cls.__name__}: expected .*{text}.*"):
        cls(**{option: value})


@pytest.mark.parametrize("cls", ALL)
def test_arguments_of_wrong_types(cls):
    name = cls.__name__
    for value in (torch.tensor(0.1), "fast", None, [torch.ones(1)]):
        with pytest.raises(TypeError, match=f"^{name}: expected a number as lr"):
            cls(value)
    with pytest.raises(TypeError, match="'max_nrom'; .*did you mean 'max_norm'"):
        cls(max_nrom=1.0)
    cls(lr=0)
    if name not in ("Lion", "LAMB"):
        cls(foreach=False, differentiable=False)
        cls(foreach=None)


# --- Live options

_REJECTIONS = (
    "expected .+, but|un(expected|known) option|option .* cannot be removed|clear\\(\\)"
    "|in more than one group|missing 'keys'"
)


def test_writing_a_learning_rate_takes_effect_at_the_next_push(kv):
    kv.init(3, full(8))
    optimizer = optim.SGD(lr=0.5)
    kv.set_optimizer(optimizer)
    assert kv.optimizer is optimizer
    kv.push(3, full(1))
    kv.optimizer.lr = 0.25
    kv.push(3, full(1))
    optimizer.param_groups[0]["lr"] = 1
    kv.push(3, full(1))
    optimizer.param_groups[0].update(lr=2.0, weight_decay=0.0)
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(8 - 0.5 - 0.25 - 1 - 2))
    assert optimizer.lr == 2.0
    optimizer.rescale_grad = 0.5
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(4.25 - 1))


@pytest.mark.parametrize("on_store", [True, False])
def test_an_invalid_write_changes_nothing(kv, on_store):
    kv.init(3, full(8))
    optimizer = optim.Adam(lr=0.5, max_norm=1.0)
    if on_store:
        kv.set_optimizer(optimizer)
    before = repr(optimizer.state_dict())
    group = optimizer.param_groups[0]
    for write in (
        lambda: setattr(optimizer, "lr", -1),
        lambda: group.update(weight_decay=0.5, lr=float("nan")),
        lambda: group.update(betas=(0.9, 2.0)),
        lambda: group.__setitem__("eps", -1),
        lambda: group.__setitem__("keys", [3]),
        lambda: group.pop("lr"),
        lambda: group.__delitem__("betas"),
        lambda: group.clear(),
        lambda: setattr(optimizer, "max_norm", -1.0),
        lambda: optimizer.set_lr_mult({3: -1}),
        lambda: optimizer.set_param_groups([{"keys": [3], "lr": -1}]),
        lambda: optimizer.set_param_groups([{"keys": [3], "lrr": 1}]),
        lambda: optimizer.set_param_groups([{"keys": [3, 3]}]),
        lambda: optimizer.set_param_groups([{"lr": 1}]),
        lambda: optimizer.add_param_group({"keys": []}),
    ):
        with pytest.raises(ValueError, match=_REJECTIONS):
            write()
    for write in (
        lambda: setattr(optimizer, "lr", torch.tensor(0.1)),
        lambda: optimizer.set_param_groups([{"keys": [3.5]}]),
        lambda: optimizer.set_wd_mult([3]),
    ):
        with pytest.raises(TypeError, match="expected .+, but"):
            write()
    assert repr(optimizer.state_dict()) == before


def test_step_and_zero_grad(kv):
    optimizer = optim.SGD()
    with pytest.raises(RuntimeError, match=r"store\.push"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"call model\.zero_grad"):
        optimizer.zero_grad()


def test_one_store_at_a_time(kv):
    optimizer = optim.SGD(lr=0.5)
    with torchkv.create() as other:
        other.init(3, full(8))
        other.set_optimizer(optimizer)
        with pytest.raises(ValueError, match="on another"):
            kv.set_optimizer(optimizer)
        assert kv.optimizer is None
        other.set_updater(None)
        assert other.optimizer is None
        kv.set_optimizer(optimizer)
        optimizer.lr = 0.25
        other.set_optimizer("sgd", learning_rate=1.0)
        other.push(3, full(1))
        assert_same(stored(other, 3), full(7))
    third = torchkv.create()
    third.set_optimizer(mine := optim.SGD())
    third.close()
    kv.set_optimizer(mine)
    assert kv.optimizer is mine
    kv.set_optimizer(optimizer)


def test_the_store_is_freed_with_its_last_owner():
    gc.disable()
    try:
        store = torchkv.create()
        store.init(3, full(1))
        store.set_optimizer(optim.SGD())
        gone = weakref.ref(store), weakref.ref(store.optimizer)
        del store
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


def test_two_objects_of_one_store_have_one_optimizer(kv):
    kv.init(3, full(8))
    kv.set_optimizer(optim.SGD(lr=0.5))
    other = torchkv.KVStore.from_script_object(kv.script_object)
    assert other.optimizer is kv.optimizer
    other.optimizer.lr = 1.0
    assert kv.optimizer.lr == 1.0


# --- Groups and multipliers


def test_groups_and_multipliers_match_torch(kv):
    values = [torch.randn(4, 5) for _ in range(5)]
    parameters = [torch.nn.Parameter(v.clone()) for v in values]
    theirs = torch.optim.AdamW(
        [
            {"params": [parameters[0]]},
            {"params": [parameters[1]], "lr": 0.05, "betas": (0.5, 0.6)},
            {"params": [parameters[2]], "weight_decay": 0.5, "amsgrad": True},
            {"params": [parameters[3]], "lr": 0.03},
            {"params": [parameters[4]], "weight_decay": 0.2},
        ],
        lr=0.01,
        weight_decay=0.1,
        foreach=False,
    )
    kv.init([0, 1, 2, 3, 4], values)
    kv.set_optimizer(optim.AdamW(lr=0.01, weight_decay=0.1))
    kv.set_param_groups([{"keys": [1], "lr": 0.05, "betas": (0.5, 0.6)}])
    kv.optimizer.add_param_group({"keys": 2, "weight_decay": 0.5, "amsgrad": True})
    kv.set_lr_mult({3: 3.0})
    kv.set_wd_mult({4: 2.0})
    for step in range(50):
        if step == 25:
            theirs.param_groups[1]["lr"] = kv.optimizer.param_groups[1]["lr"] = 0.1
        gradients = [torch.randn_like(v) for v in values]
        kv.push([0, 1, 2, 3, 4], gradients)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        theirs.step()
    for key, parameter in enumerate(parameters):
        torch.testing.assert_close(
            stored(kv, key), parameter.detach(), rtol=1e-6, atol=1e-6
        )
    assert [g["keys"] for g in kv.optimizer.param_groups] == [None, [1], [2]]
    kv.set_param_groups([])
    assert len(kv.optimizer.param_groups) == 1


def test_groups_with_keys_of_the_wrong_kind(kv):
    kv.init("w", full(1))
    kv.set_optimizer("sgd")
    for call in (
        lambda: kv.set_param_groups([{"keys": [3]}]),
        lambda: kv.set_lr_mult({3: 1.0}),
        lambda: kv.set_wd_mult({3: 1.0}),
    ):
        with pytest.raises(TypeError, match="key"):
            call()
    optimizer = optim.SGD()
    optimizer.set_lr_mult({3: 2.0})
    with pytest.raises(TypeError, match="key"):
        kv.set_optimizer(optimizer)


def test_without_an_optimizer(kv, tmp_path):
    assert kv.optimizer is None
    for call in (
        lambda: kv.set_param_groups([]),
        lambda: kv.set_lr_mult({}),
        lambda: kv.set_wd_mult({}),
        lambda: kv.save_optimizer_states(tmp_path / "x"),
        lambda: kv.load_optimizer_states(tmp_path / "x"),
    ):
        with pytest.raises(ValueError, match="the store has no optimizer"):
            call()


# --- By name


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("sgd", {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}, mxnet.SGD(
            0.9, learning_rate=0.1, wd=1e-4)),
        ("sgd", {"lr": 0.1, "rescale_grad": 1 / 64, "clip_gradient": 2}, mxnet.SGD(
            learning_rate=0.1, rescale_grad=1 / 64, clip_gradient=2)),
        ("sgd", {"clip_gradient": -1, "multi_precision": True}, mxnet.SGD()),
        ("nag", {}, mxnet.NAG(learning_rate=0.01)),
        ("RMSProp", {}, mxnet.RMSProp(1e-3, 0.9)),
        ("adam", {"beta1": 0.8, "eps": 1e-6}, mxnet.Adam(beta1=0.8, epsilon=1e-6)),
        ("adam", {"betas": (0.8, 0.9)}, mxnet.Adam(beta1=0.8, beta2=0.9)),
        ("adamw", {"wd": 0.1, "beta2": 0.9}, optim.AdamW(
            betas=(0.9, 0.9), weight_decay=0.1)),
        ("adagrad", {"eps": 0.5}, mxnet.AdaGrad(0.5)),
        ("rmsprop", {"gamma1": 0.8, "gamma2": 0.7, "centered": True}, mxnet.RMSProp(
            gamma1=0.8, gamma2=0.7, centered=True)),
        ("lion", {"wd": 0.1, "beta1": 0.5}, optim.Lion(
            betas=(0.5, 0.99), weight_decay=0.1)),
        ("lamb", {"max_norm": 1.0}, mxnet.LAMB(max_norm=1.0)),
    ],
)  # fmt: skip
def test_by_name(kv, name, options, expected):
    kv.set_optimizer(name, **options)
    assert repr(kv.optimizer) == repr(expected)
    assert kv.optimizer.state_dict() == expected.state_dict()


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        (
            ["Adma"],
            {},
            ValueError,
            "'Adma'; expected .*'rmsprop'.*; did you mean 'adam'",
        ),
        (["sdg"], {}, ValueError, "unknown optimizer 'sdg'; .*did you mean 'sgd'"),
        (["sgd"], {"beta1": 0.9}, ValueError, "'beta1'"),
        (["sgd"], {"learning_rte": 0.9}, ValueError, "did you mean 'learning_rate'"),
        (["sgd"], {"learning_rate": 0.9, "lr": 0.9}, ValueError, "both"),
        (["adam"], {"beta1": 0.9, "betas": (0.9, 0.9)}, ValueError, "not both"),
        ([None], {}, TypeError, "NoneType"),
        ([optim.SGD()], {"lr": 1}, TypeError, "'lr'"),
        ([torch.optim.SGD([torch.ones(1)])], {}, TypeError, r"torch\.optim\.SGD, lr"),
        ([torch.optim.LBFGS], {}, ValueError, "closure"),
        ([torch.optim.NAdam], {"rl": 1}, TypeError, "'rl'"),
        ([torch.optim.NAdam], {"lr": -1}, ValueError, "-1"),
        ([optim.SGD], {"rl": 1}, TypeError, "'rl'"),
    ],
)
def test_invalid_optimizers(kv, arguments, options, error, text):
    kv.init(3, full(1))
    with pytest.raises(error, match=text):
        kv.set_optimizer(*arguments, **options)
    assert kv.optimizer is None
    kv.push(3, full(7))
    assert_same(stored(kv, 3), full(7))


# --- TorchScript


def set_adam(kv: torch.classes.torchkv.KVStore) -> None:
    kv.set_optimizer("adam", {"lr": 0.5})


def test_torchscript_sets_an_optimizer_with_torchs_defaults(kv):
    kv.init(3, full(8))
    kv.set_optimizer(mine := optim.SGD())
    script(set_adam)(kv.script_object)
    assert kv.optimizer.state_dict()["param_groups"] == (
        {"keys": None, **optim.Adam(lr=0.5).defaults},
    )
    mine.lr = 0.1  # on no store any more
    assert kv.optimizer.lr == 0.5
    with pytest.raises(ValueError, match="unknown optimizer 'assign'"):
        kv.script_object.set_optimizer("assign", {})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("momentun", "did you mean 'momentum'"),
        ("max_nrom", "did you mean 'max_norm'"),
        ("acummulate", "did you mean 'accumulate'"),
        ("learning", "unknown option 'learning'; expected one of"),
    ],
)
def test_a_misspelled_option(name, text):
    with pytest.raises(TypeError, match=text):
        optim.SGD(0.5, **{name: 1})


def test_a_clip_gradient_that_is_not_a_number(kv):
    with pytest.raises(TypeError, match="expected a number as clip_gradient"):
        kv.set_optimizer("sgd", clip_gradient="x")
