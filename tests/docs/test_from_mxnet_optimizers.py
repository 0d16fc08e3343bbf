"""What the tables of optimizers and schedules of from_mxnet.md say, row by row."""

import re
from types import SimpleNamespace

import pytest
import torch

import torchkv
from tables import RowTests, rows_below
from torchkv.lr_scheduler import (
    CosineScheduler,
    FactorScheduler,
    MultiFactorScheduler,
    PolyScheduler,
)
from torchkv.optim import mxnet

ATTRIBUTES, SCHEDULES = "Attributes of an optimizer", "Schedules of the learning rate"
row = RowTests("Optimizers", ATTRIBUTES, SCHEDULES)
TABLE = rows_below("from_mxnet.md", "Optimizers")


def make(optimizer, value=1.0, size=1, **options):
    kv = torchkv.create("local")
    kv.init("w", torch.full((size,), float(value)))
    kv.set_optimizer(optimizer, **options)
    return kv


def push(kv, *gradient):
    """How much the elements of the value change."""
    before = kv.pull("w")
    kv.push("w", torch.tensor(gradient).view_as(before))
    return (kv.pull("w") - before).flatten().tolist()


def near(*expected):
    return pytest.approx(list(expected), rel=1e-4)


# --- All optimizers -------------------------------------------------------------


def class_of(table_row):
    return table_row["class of `torchkv.optim.mxnet`"].strip("`")


def differences_of(table_row):
    return [*table_row.values()][2].split("; ")


@pytest.mark.parametrize("table_row", TABLE, ids=class_of)
def test_names_make_the_classes_of_the_table(table_row):
    for name in re.findall(r'"(\w+)"', table_row["name"]):
        kv = make(name)
        assert type(kv.optimizer) is getattr(mxnet, class_of(table_row))


def test_the_table_has_all_of_mxnets_optimizers():
    assert sorted(map(class_of, TABLE)) == sorted(cls.__name__ for cls in mxnet.ALL)


@pytest.mark.parametrize("table_row", TABLE, ids=class_of)
def test_which_are_not_in_torch_and_which_need_whole_values(table_row):
    cls, differences = class_of(table_row), differences_of(table_row)
    of_torch = {name.lower() for name in dir(torch.optim)}
    beside = {"NAG", "Signum", "Test"}  # of which the table says what they are
    assert (cls.lower() not in of_torch) == (
        "not in `torch.optim`" in differences or cls in beside
    )
    with torchkv.create("local") as kv:
        kv.init_rows("w", (2,), num_rows=3)
        kv.set_optimizer(getattr(mxnet, cls)())
        if "whole values" in differences:
            with pytest.raises(NotImplementedError, match="needs the whole value"):
                kv.push("w", torch.ones(3, 2))
        else:
            kv.push("w", torch.ones(3, 2))


def steps_alone_and_together(name, **options):
    """What a key becomes by itself, and beside a key that began before it."""
    made = []
    for others in ([], ["other"]):
        kv = torchkv.create("local")
        kv.init(["w", *others], [torch.tensor([3.0, 4.0])] * (1 + len(others)))
        kv.set_optimizer(name, learning_rate=1.0, **options)
        for rate in (1.0, 0.25):
            kv.optimizer.set_learning_rate(rate)
            for key in [*others, "w"]:
                kv.push(key, torch.tensor([0.6, 0.8]))
        made.append(kv.pull("w").tolist())
    return made


# --- Single optimizers ----------------------------------------------------------


@row('`"sgd"`, `"ccsgd"`', '`"nag"`')
@pytest.mark.parametrize("name", ["sgd", "ccsgd", "nag"])
def test_the_momentum_contains_the_learning_rate(name):
    kv = make(name, learning_rate=1.0, momentum=0.5)
    push(kv, 1.0)
    kv.optimizer.lr = 0.0
    assert push(kv, 1.0)[0] < 0
    kv = make(torch.optim.SGD, lr=1.0, momentum=0.5)
    push(kv, 1.0)
    kv.optimizer.lr = 0.0
    assert push(kv, 1.0) == [0]


@row('`"signum"`')
def test_signum():
    kv = make("signum", 4.0, momentum=0.0, learning_rate=0.5)
    assert push(kv, 9.0) == [-0.5] and push(kv, -9.0) == [0.5]
    for momentum, decay in ((0.0, 0), (0.5, 0.5 * 0.25 * 4)):
        kv = make("signum", 4.0, momentum=momentum, learning_rate=0.5, wd_lh=0.25)
        assert push(kv, 9.0) == [-0.5 - decay]
    kv = make("signum", 4.0, momentum=0.5, learning_rate=0.5)
    assert [push(kv, 8.0), push(kv, -2.0)] == [[-0.5], [-0.5]]


@row('`"adam"`')
def test_adam():
    root = 0.001**0.5  # of the second moment, not yet corrected
    kv = make("adam", learning_rate=0.5, epsilon=1.0)
    assert push(kv, 1.0) == near(-0.5 * root / (root + 1))
    kv = make(torch.optim.Adam, lr=0.5, eps=1.0)
    assert push(kv, 1.0) == near(-0.5 / 2)


@row('`"adamax"`')
def test_adamax():
    kv = make("adamax", size=2, learning_rate=0.5)
    assert push(kv, 1.0, 0.0) == near(-0.5, 0)  # in MXNet the second is NaN
    tiny = -0.5 * 0.1 / (1 - 0.9**2)  # of any gradient
    assert push(kv, 1.0, 1e-20) == near(-0.5, tiny)
    assert "epsilon" not in kv.optimizer.param_groups[0]


@row('`"nadam"`')
def test_nadam():
    alone, together = steps_alone_and_together("nadam", schedule_decay=1.0)
    assert alone == together


@row('`"adagrad"`')
def test_adagrad():
    kv = make("adagrad", 2.0, learning_rate=0.5, eps=3.0)
    assert push(kv, 1.0) == near(-0.5 / (1 + 3) ** 0.5)
    kv = make("adagrad", 2.0, learning_rate=0.5, eps=3.0, wd=0.25)
    assert push(kv, 1.0) == near(-0.5 * (0.5 + 0.25 * 2))


@row('`"adadelta"`')
def test_adadelta():
    moved = {
        tuple(push(make("adadelta", 2.0, learning_rate=rate, wd=0.25), 1.0))
        for rate in (0.0, 0.5, 1.0)
    }
    assert len(moved) == 1 and moved.pop()[0] < -0.25 * 2
    assert push(make("adadelta", 2.0, learning_rate=0.0, wd=0.25), 0.0) == [-0.5]


@row('`"rmsprop"`')
def test_rmsprop():
    options = {"learning_rate": 0.5, "gamma1": 0.0, "gamma2": 0.5, "epsilon": 3.0}
    kv = make("rmsprop", **options)
    assert push(kv, 1.0) == near(-0.5 / (1 + 3) ** 0.5)
    kv.optimizer.lr = 0.0
    assert push(kv, 1.0) == [0]
    kv = make("rmsprop", centered=True, **options)
    first = push(kv, 1.0)[0]
    kv.optimizer.lr = 0.0
    assert push(kv, 1.0) == near(0.5 * first) and first < 0


@row('`"ftrl"`', '`"ftml"`')
@pytest.mark.parametrize("name", ["ftrl", "ftml"])
def test_others_that_step(name):
    """That they are not in torch.optim is tested above, for all rows."""
    assert push(make(name), 1.0)[0] < 0


@row('`"dcasgd"`')
def test_a_momentum_works():
    kv = make("dcasgd", learning_rate=1.0, momentum=0.5, lamda=0.0)
    assert [push(kv, 1.0), push(kv, 1.0)] == [near(-1), near(-1.5)]


@row('`"lamb"`', '`"lbsgd"`')
def test_steps_by_norms_of_whole_values():
    first = push(make("lamb", 2.0, size=2, learning_rate=0.5), 1.0, 0.0)
    assert first == near(-0.5 * 8**0.5, 0)  # the norm of the value
    kv = make("lbsgd", 2.0, size=2, learning_rate=0.5, warmup_strategy="lars")
    assert push(kv, 1.0, 0.0)[0] < 0


@row('`"lars"`')
def test_lars():
    alone, together = steps_alone_and_together("lars", momentum=0.5)
    assert alone == together
    kv = make("lars", 2.0, size=2, learning_rate=0.5, eta=0.25)
    rate = 0.5 * 0.25 * 8**0.5 / 5  # of the norms of value and gradient
    assert push(kv, 3.0, 4.0) == near(-rate * 3, -rate * 4)


@row('`"sgld"`')
def test_the_noise_is_a_function_of_the_seed():
    def moved(**options):
        return tuple(push(make("sgld", size=4, **options), 1.0, 1.0, 1.0, 1.0))

    assert moved(seed=1) == moved(seed=1) != moved(seed=2)
    by_default = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        by_default.append(moved())
    assert by_default[0] == by_default[1] != by_default[2]


@row('`"groupadagrad"`')
def test_one_history_for_each_row():
    kv = torchkv.create("local")
    kv.init("w", torch.zeros(2, 2))
    kv.set_optimizer("groupadagrad", learning_rate=1.0, eps=0.0)
    steps = push(kv, 3.0, 4.0, 5.0, 0.0)
    mean, other = (12.5**0.5, 12.5**0.5)  # root of the mean of squares of each row
    assert steps == near(-3 / mean, -4 / mean, -5 / other, 0)


@row('`"test"`')
def test_test_adds_the_gradient():
    assert push(make("test"), 3.0) == [3]


def test_decay_by_names():
    """The paragraph below the table."""
    names = {0: "a_weight", 1: "a_bias", 2: "b_gamma", 3: "b_beta"}
    for param_idx2name, decayed in ((names, [0, 2]), (None, [0, 1, 2, 3])):
        kv = torchkv.create("local")
        kv.init([*range(5)], [torch.ones(1)] * 5)
        options = {"learning_rate": 0.5, "wd": 0.5, "param_idx2name": param_idx2name}
        kv.set_optimizer("sgd", **options)
        kv.push([*range(4)], [torch.zeros(1)] * 4)
        assert [k for k in range(4) if kv.pull(k) == 0.75] == decayed
    multipliers = {0: SimpleNamespace(lr_mult=0.5, wd_mult=0.0)}
    kv = torchkv.create("local")
    kv.init(0, torch.ones(1))
    kv.set_optimizer("sgd", learning_rate=1.0, wd=1.0, param_dict=multipliers)
    kv.push(0, torch.ones(1))
    assert kv.pull(0) == 0.5


# --- Attributes -----------------------------------------------------------------


@row(
    "`opt.learning_rate`, `opt.lr`, `opt.set_learning_rate(lr)`",
    "`opt.wd`",
    "`opt.rescale_grad`",
)
def test_rates_take_effect_at_the_next_push():
    kv = make("sgd", 4.0, learning_rate=1.0, wd=0.25)
    assert kv.optimizer.learning_rate == kv.optimizer.lr == 1 == kv.optimizer.wd * 4
    kv.init("own", torch.ones(1))
    kv.set_param_groups([{"keys": ["own"], "lr": 0.125}])
    kv.optimizer.set_learning_rate(0.5)
    assert [group["lr"] for group in kv.optimizer.param_groups] == [0.5, 0.125]
    kv.optimizer.wd = 0.0
    kv.optimizer.rescale_grad = 0.5
    assert push(kv, 2.0) == [-0.5]


@row(
    "`opt.set_lr_mult(args_lr_mult)`, `opt.set_wd_mult(args_wd_mult)`",
    "`opt.lr_mult`, `opt.wd_mult`",
    "`opt.set_lr_scale(args_lrscale)`",
)
def test_multipliers():
    kv = make("sgd", learning_rate=0.5, wd=1.0)
    kv.optimizer.set_lr_mult({"w": 0.5})
    kv.optimizer.set_wd_mult({"w": 2.0})
    assert push(kv, 1.0) == [-0.25 * 3]
    state = kv.optimizer.state_dict()
    assert (dict(state["lr_mult"]), dict(state["wd_mult"])) == ({"w": 0.5}, {"w": 2.0})
    assert not hasattr(kv.optimizer, "lr_mult")
    with pytest.raises(KeyError, match="other"):  # which MXNet ignores
        kv.optimizer.set_lr_mult({"other": 0.5})


@row("`opt.num_update`, `opt.begin_num_update`")
def test_counts():
    kv = make("sgd", begin_num_update=5)
    kv.init("other", torch.ones(1))
    assert kv.optimizer.begin_num_update == kv.optimizer.num_update == 5
    kv.push("w", torch.ones(1))
    kv.push(["w", "other"], [torch.ones(1)] * 2)
    assert kv.optimizer.num_update == 7
    states = kv.optimizer.state_dict()["state"]
    assert (states["w"]["step"], states["other"]["step"]) == (2, 1)


@row("`opt.lr_scheduler`")
def test_schedulers_of_an_optimizer():
    halves = FactorScheduler(1, 0.5, base_lr=1.0)
    kv = make("sgd")
    kv.optimizer.lr_scheduler = halves
    assert kv.optimizer.lr_scheduler == halves
    with pytest.raises(TypeError, match="torchkv.lr_scheduler"):
        kv.optimizer.lr_scheduler = lambda num_update: 0.5


@row("`opt.clip_gradient`, `opt.momentum`", "`opt.lazy_update`")
def test_options_are_items_of_groups():
    options = {"momentum": 0.5, "clip_gradient": 2.0, "learning_rate": 1.0}
    kv = make("sgd", lazy_update=False, **options)
    (group,) = kv.optimizer.param_groups
    assert group["momentum"] == 0.5 and group["clip_gradient"] == 2
    assert kv.optimizer.lazy is False
    group["clip_gradient"] = 0.25
    assert push(kv, 8.0) == [-0.25]


@row(
    "`opt.idx2name`, `opt.param_dict`",
    "`opt.sym_info`",
    "`opt.multi_precision`",
    "`opt.aggregate_num`, `opt.allow_np_array`",
)
def test_what_has_no_attribute():
    kv = make("sgd", param_idx2name={"w": "a_weight"}, param_dict={}, sym=None)
    for name in ("idx2name", "param_dict", "sym_info", "aggregate_num"):
        assert not hasattr(kv.optimizer, name)
    with pytest.raises(ValueError, match="sym"):
        make("sgd", sym="a symbol")
    kv = torchkv.create("local")
    kv.init("w", torch.ones(1, dtype=torch.bfloat16))
    kv.set_optimizer("sgd", learning_rate=2.0**-10, multi_precision=False)
    for _ in range(4):  # whose sum bf16 can express, but not a single one
        kv.push("w", torch.ones(1, dtype=torch.bfloat16))
    assert kv.pull("w").item() == 1 - 2.0**-8
    assert kv.optimizer.state_dict()["state"]["w"]["master"].dtype == torch.float32


@row("`opt.aggregate_num`, `opt.allow_np_array`")
def test_the_keys_of_a_push_are_stepped_together():
    kv = make("sgd", 0.0, learning_rate=1.0, max_norm=5.0)
    kv.init("v", torch.zeros(1))
    kv.push(["w", "v"], [torch.tensor([6.0]), torch.tensor([8.0])])
    assert kv.optimizer.grad_norm == 10
    assert [kv.pull("w").item(), kv.pull("v").item()] == near(-3, -4)


@row(
    "`opt.update(index, weight, grad, state)`, "
    "`opt.update_multi_precision(index, weight, grad, state)`",
    "`opt.create_state(index, weight)`, "
    "`opt.create_state_multi_precision(index, weight)`",
)
def test_the_store_has_weight_and_state():
    kv = make("sgd", momentum=0.5, learning_rate=1.0)
    kv.init("unused", torch.ones(1))
    push(kv, 1.0)
    states = kv.optimizer.state_dict()["state"]
    assert [states[key]["mom"].item() for key in ("w", "unused")] == [-1, 0]


@row(
    "`mx.optimizer.create(name)`, `opt.create_optimizer(name)`",
    "a subclass of `mx.optimizer.Optimizer`, `mx.optimizer.register(klass)`, "
    "`opt.register(klass)`, `opt.opt_registry`",
    "`mx.optimizer.get_updater(optimizer)`, `mx.optimizer.Updater`",
)
def test_names_objects_and_classes():
    class Own(torch.optim.SGD):
        pass

    for optimizer, options in (
        ("sgd", {"learning_rate": 0.5}),
        (mxnet.SGD(learning_rate=0.5), {}),
        (Own, {"lr": 0.5}),
    ):
        assert push(make(optimizer, **options), 1.0) == [-0.5]
    with pytest.raises(ValueError, match="unknown optimizer"):
        make("own")


@row(
    "`updater.get_states(dump_optimizer)`, `updater.set_states(states)`, "
    "`updater.sync_state_context(state, context)`"
)
def test_states_are_dicts():
    kv = make("sgd", momentum=0.5, learning_rate=1.0)
    push(kv, 1.0)
    state = kv.optimizer.state_dict()
    assert isinstance(state, dict)
    other = make("sgd", kv.pull("w").item())
    other.optimizer.load_state_dict(state)
    assert other.optimizer.lr == 1
    assert push(other, 1.0) == push(kv, 1.0) == [-1.5]


# --- Schedules ------------------------------------------------------------------


@row("`FactorScheduler`, `MultiFactorScheduler`", "`PolyScheduler`, `CosineScheduler`")
@pytest.mark.parametrize(
    ("scheduler", "last"),
    [
        (FactorScheduler(2, 0.5, base_lr=1.0), 0.0625),
        (MultiFactorScheduler([2, 4], 0.5, base_lr=1.0), 0.25),
        (PolyScheduler(4, base_lr=1.0, final_lr=0.125), 0.125),
        (CosineScheduler(4, base_lr=1.0, final_lr=0.125), 0.125),
    ],
    ids=lambda value: type(value).__name__,
)
def test_rates_do_not_depend_on_what_was_asked_before(scheduler, last):
    """MXNet's first answer to 9 of the last two is `base_lr`."""
    assert scheduler(9) == last
    assert scheduler(0) == 1 and scheduler(1) <= 1
    assert scheduler(9) == last


@row("`PolyScheduler`, `CosineScheduler`")
@pytest.mark.parametrize("cls", [PolyScheduler, CosineScheduler])
def test_the_warm_up_is_shorter(cls):
    assert cls(3, warmup_steps=2)(2) == 0.01
    with pytest.raises(ValueError, match="less than max_update"):
        cls(3, warmup_steps=3)


@row("a subclass of `LRScheduler`, a function")
def test_functions_are_schedulers_of_torch():
    kv = make("sgd", learning_rate=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(kv.optimizer, lambda n: 0.5**n)
    rates = []
    for _ in range(3):
        rates += push(kv, 1.0)
        schedule.step()
    assert rates == [-1, -0.5, -0.25]


@row(
    "`scheduler.base_lr`",
    "`scheduler.get_warmup_lr(num_update)`, `scheduler.warmup_steps`, "
    "`scheduler.warmup_begin_lr`, `scheduler.warmup_final_lr`, "
    "`scheduler.warmup_mode`",
)
def test_attributes_of_a_scheduler():
    scheduler = FactorScheduler(9, base_lr=1.0, warmup_steps=4)
    assert [scheduler(n) for n in range(5)] == [0, 0.25, 0.5, 0.75, 1]
    assert scheduler.base_lr == 1
    with pytest.raises(AttributeError):
        scheduler.base_lr = 0.5
    assert not hasattr(scheduler, "warmup_steps")
    assert not hasattr(scheduler, "get_warmup_lr")


def test_every_row_has_a_test():
    row.check()
