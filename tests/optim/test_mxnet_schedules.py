"""Optimizers with MXNet's formulas that have a schedule, or count from a number."""

import copy
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchkv
from helpers import assert_same, bits, full, script, stored
from torchkv.lr_scheduler import (
    CosineScheduler,
    FactorScheduler,
    MultiFactorScheduler,
    PolyScheduler,
)
from torchkv.optim import mxnet

HALVES = FactorScheduler(1, 0.5, base_lr=1.0)  # update 1: 1, update 2: 0.5, ...


def change(kv, key=3):
    """How much a push of 1 changes a value: the rate of SGD."""
    before = stored(kv, key)
    kv.push(key, torch.ones_like(before))
    return (before - stored(kv, key)).flatten()[0].item()


def with_sgd(kv, **options):
    kv.init(3, full(0))
    kv.set_optimizer("sgd", **options)
    return kv


def test_the_rate_of_each_update(kv):
    with_sgd(kv, lr_scheduler=HALVES)
    assert kv.optimizer.num_update == 0
    assert [change(kv) for _ in range(4)] == [1, 0.5, 0.25, 0.125]
    assert kv.optimizer.num_update == 4
    assert kv.optimizer.learning_rate == 0.125 and kv.optimizer.lr == 1


def test_each_key_counts_its_own_updates(kv):
    kv.init([3, 4], [full(0)] * 2)
    kv.set_optimizer("sgd", lr_scheduler=HALVES)
    assert [change(kv), change(kv)] == [1, 0.5]
    assert change(kv, 4) == 1
    assert kv.optimizer.num_update == 2


def test_updates_that_are_summed_count_once(kv):
    with_sgd(kv, lr_scheduler=HALVES, accumulate=2)
    assert [change(kv) for _ in range(4)] == [0, 2, 0, 1]
    assert kv.optimizer.num_update == 2


def test_updates_are_counted_from_a_number(kv):
    with_sgd(kv, lr_scheduler=HALVES, begin_num_update=2)
    assert kv.optimizer.begin_num_update == kv.optimizer.num_update == 2
    assert change(kv) == 0.25
    assert kv.optimizer.num_update == 3


def test_formulas_count_from_it_too():
    moved = []
    for begin in (0, 5):
        with torchkv.create() as kv:
            kv.init(3, torch.zeros(1))
            kv.set_optimizer("adam", learning_rate=1.0, begin_num_update=begin)
            kv.push(3, torch.ones(1))
            moved.append(stored(kv, 3).item())
    correction = ((1 - 0.999**6) ** 0.5 / (1 - 0.9**6)) * 0.1 / 0.001**0.5
    assert moved == pytest.approx([-1, -correction], rel=1e-5)


def test_a_learning_rate_replaces_the_base_of_factors(kv):
    scheduler = FactorScheduler(1, 0.5, base_lr=1.0, warmup_steps=2)
    with_sgd(kv, learning_rate=0.25, lr_scheduler=scheduler)
    # The warm-up ends at the scheduler's own rate, as in MXNet.
    assert [change(kv) for _ in range(3)] == [0.5, 0.125, 0.0625]
    assert scheduler.base_lr == 1
    assert mxnet.Adam(lr_scheduler=HALVES).lr == 0.001  # a default of the class
    assert mxnet.Adam(learning_rate=None, lr_scheduler=HALVES).lr == 1
    poly = PolyScheduler(4, 0.5)
    assert mxnet.SGD(learning_rate=0.25, lr_scheduler=poly).learning_rate == 0.5


def test_multipliers_of_keys(kv):
    kv.init([3, 4], [full(0)] * 2)
    kv.set_optimizer("sgd", lr_scheduler=HALVES)
    kv.set_lr_mult({4: 0.5})
    assert [change(kv, 3), change(kv, 4), change(kv, 4)] == [1, 0.5, 0.25]


def test_a_schedule_and_a_rate_are_either_or(kv):
    with_sgd(kv, lr_scheduler=HALVES)
    with pytest.raises(UserWarning, match="lr_scheduler"):
        kv.optimizer.set_learning_rate(0.1)
    with pytest.raises(ValueError, match="set_lr_mult"):
        kv.optimizer.lr = 0.1
    with pytest.raises(ValueError, match="lr_scheduler"):
        kv.set_param_groups([{"keys": [3], "lr": 0.1}])
    kv.set_param_groups([{"keys": [3], "weight_decay": 0.0}])
    assert [change(kv), change(kv)] == [1, 0.5]
    kv.optimizer.lr_scheduler = None
    kv.optimizer.set_learning_rate(0.125)
    assert change(kv) == 0.125
    kv.optimizer.lr_scheduler = MultiFactorScheduler([4], 0.5, base_lr=1.0)
    assert [change(kv), change(kv)] == [1, 0.5]


def test_a_refused_schedule_changes_nothing(kv):
    with_sgd(kv, lr_scheduler=HALVES)
    for wrong in (0.1, lambda n: 0.1):
        with pytest.raises(TypeError, match="LambdaLR"):
            kv.optimizer.lr_scheduler = wrong
    assert kv.optimizer.lr_scheduler is HALVES
    assert change(kv) == 1


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"lr_scheduler": "factor"}, TypeError, "lr_scheduler, but got str"),
        ({"begin_num_update": -1}, ValueError, "begin_num_update .*at least 0"),
        ({"begin_num_update": 0.5}, ValueError, "begin_num_update .*whole number"),
        ({"begin_num_update": "1"}, TypeError, "begin_num_update"),
        ({"lr_scheduler": HALVES, "learning_rate": -1}, ValueError, "lr of at least 0"),
        ({"lr_schedule": HALVES}, ValueError, "did you mean 'lr_scheduler'"),
    ],
    ids=range(6),
)
def test_invalid_options(kv, options, error, text):
    kv.init(3, full(0))
    with pytest.raises(error, match=text):
        kv.set_optimizer("sgd", **options)
    assert kv.optimizer is None


def test_lbsgd_counts_pushes(kv):
    kv.init(3, full(0))
    options = {"batch_scale": 2, "warmup_epochs": 0, "begin_num_update": 4}
    kv.set_optimizer(
        "lbsgd", lr_scheduler=MultiFactorScheduler([5], 0.5, base_lr=1.0), **options
    )
    # It looks its rate up before it counts, as in MXNet: those of updates 5 and 7.
    assert [change(kv) for _ in range(4)] == [0, 2, 0, 1]
    assert kv.optimizer.num_update == 8


SCHEDULERS = [
    HALVES,
    MultiFactorScheduler([1, 2], 0.5, base_lr=1.0),
    PolyScheduler(9, 1.0, warmup_steps=2, warmup_mode="constant"),
    CosineScheduler(9, 1.0, 0.1, warmup_steps=1, warmup_begin_lr=0.5),
]


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda s: type(s).__name__)
def test_copies_and_files_continue(tmp_path, scheduler):
    options = {"lr_scheduler": scheduler, "begin_num_update": 1, "momentum": 0.5}
    with torchkv.create() as kv:
        kv.init(3, torch.zeros(4))
        kv.set_optimizer("sgd", **options)
        kv.push(3, torch.ones(4))
        kv.save(tmp_path / "store")
        loaded = torchkv.create()
        loaded.init(3, stored(kv, 3))
        loaded.set_optimizer("sgd", learning_rate=0.5)
        loaded.optimizer.load_state_dict(kv.optimizer.state_dict())
        torch.save(kv.optimizer.state_dict(), tmp_path / "state")
        again = torchkv.create()
        again.init(3, stored(kv, 3))
        again.set_optimizer(pickle.loads(pickle.dumps(kv.optimizer)))
        again.optimizer.load_state_dict(torch.load(tmp_path / "state"))
        others = [
            copy.deepcopy(kv),
            pickle.loads(pickle.dumps(kv)),
            torchkv.load(tmp_path / "store"),
            loaded,
            again,
        ]
        for store in [kv, *others]:
            assert store.optimizer.lr_scheduler == scheduler
            assert store.optimizer.num_update == 2
            for _ in range(3):
                store.push(3, torch.ones(4))
        assert {bits(store.pull(3)) for store in others} == {bits(kv.pull(3))}


def test_a_state_that_does_not_fit_keeps_the_schedule(kv):
    with_sgd(kv, lr_scheduler=HALVES, begin_num_update=1)
    state = kv.optimizer.state_dict()
    damaged = {**state["gradient"], "lr_scheduler": 7.0}
    with pytest.raises(ValueError, match="lr_scheduler to be 1"):
        kv.optimizer.load_state_dict({**state, "gradient": damaged})
    assert kv.optimizer.lr_scheduler == HALVES
    assert change(kv) == 0.5


def test_a_state_that_is_refused_late_keeps_the_schedule(kv):
    with_sgd(kv, lr_scheduler=HALVES, momentum=0.5)
    assert change(kv) == 1
    other = optimizer_state_of("sgd", lr_scheduler=FactorScheduler(9), momentum=0.5)
    with pytest.raises(ValueError, match="expected shape"):
        kv.optimizer.load_state_dict(other)
    assert kv.optimizer.lr_scheduler == HALVES
    assert kv.optimizer.num_update == 1
    assert change(kv) == 0.5 * 1 + 0.5  # the momentum contains the rate


def optimizer_state_of(name, **options):
    """After one step of a value of another shape."""
    with torchkv.create() as other:
        other.init(3, torch.zeros(7))
        other.set_optimizer(name, **options)
        other.push(3, torch.ones(7))
        return other.optimizer.state_dict()


def test_the_largest_rate_is_finite_for_all_keys(kv):
    kv.init([3, 4], [full(0)] * 2)
    grows = CosineScheduler(9, base_lr=0.1, final_lr=1e30)
    kv.set_optimizer("sgd", lr_scheduler=grows)
    with pytest.raises(ValueError, match="finite in fp32"):
        kv.set_lr_mult({4: 1e20})
    assert change(kv, 4) == pytest.approx(grows(1))


def test_the_trainer_has_the_rate():
    model = torch.nn.Linear(2, 1, bias=False)
    options = {"lr_scheduler": HALVES}
    trainer = torchkv.Trainer(model, "sgd", options, kvstore="local")
    rates = []
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        trainer.step()
        rates.append(trainer.learning_rate)
    assert rates == [1, 0.5, 0.25]
    with pytest.raises(UserWarning, match="lr_scheduler"):
        trainer.set_learning_rate(0.1)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("how", ["trainer", "store", "dcp"])
def test_state_dicts_continue_the_schedule(how, tmp_path):
    def make():
        model = torch.nn.Linear(2, 1, bias=False)
        options = {"lr_scheduler": HALVES}
        return model, torchkv.Trainer(model, "sgd", options, kvstore="local")

    def steps(model, trainer, count):
        for _ in range(count):
            model(torch.ones(1, 2)).sum().backward()
            trainer.step()

    model, trainer = make()
    steps(model, trainer, 2)
    other, resumed = make()
    if how == "trainer":
        resumed.load_state_dict(trainer.state_dict())
    elif how == "store":
        resumed.kvstore.load_state_dict(trainer.kvstore.state_dict())
        resumed.kvstore.pull("weight", out=other.weight.detach())
    else:
        dcp.save({"trainer": trainer}, checkpoint_id=tmp_path, no_dist=True)
        dcp.load({"trainer": resumed}, checkpoint_id=tmp_path, no_dist=True)
    assert resumed.optimizer.num_update == 2
    assert resumed.learning_rate == trainer.learning_rate == 0.5
    steps(model, trainer, 2)
    steps(other, resumed, 2)
    assert resumed.learning_rate == trainer.learning_rate == 0.125
    assert torch.equal(other.weight, model.weight)


def test_rows_of_sparse_gradients(kv):
    kv.init(3, torch.zeros(4, 2))
    kv.set_optimizer("sgd", lr_scheduler=HALVES)
    rows = torch.sparse_coo_tensor(
        [[1, 2]], torch.ones(2, 2), (4, 2), check_invariants=True
    )
    kv.push(3, rows)
    kv.push(3, rows)
    expected = torch.zeros(4, 2)
    expected[1:3] = -1.5
    assert_same(stored(kv, 3), expected)


def test_a_schedule_from_torchscript(kv):
    def set_it(kv: torchkv.KVStore):
        kv.set_optimizer(
            "mxnet_sgd",
            {
                "lr": 1.0,
                "lr_scheduler": 2.0,
                "lr_scheduler.base_lr": 1.0,
                "lr_scheduler.factor": 0.5,
                "lr_scheduler.step.0": 1.0,
                "lr_scheduler.step.1": 2.0,
            },
        )

    kv.init(3, full(0))
    script(set_it)(kv.script_object)
    assert [change(kv) for _ in range(4)] == [1, 0.5, 0.25, 0.25]
    expected = MultiFactorScheduler([1, 2], 0.5, base_lr=1.0)
    assert kv.optimizer.lr_scheduler == expected


def test_a_scheduler_of_torch_takes_an_optimizer_without_one(kv):
    with_sgd(kv, learning_rate=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(kv.optimizer, 1, 0.5)
    rates = []
    for _ in range(3):
        rates.append(change(kv))
        scheduler.step()
    assert rates == [1, 0.5, 0.25]


def test_ftrl_has_the_schedulers_base_lr(kv):
    """MXNet's does not pass its learning_rate on."""
    kv.init(3, torch.zeros(2))
    for options in ({}, {"learning_rate": 0.05}):
        halves = FactorScheduler(step=2, factor=0.5, base_lr=0.5)
        kv.set_optimizer("ftrl", lr_scheduler=halves, **options)
        assert kv.optimizer.learning_rate == 0.5
