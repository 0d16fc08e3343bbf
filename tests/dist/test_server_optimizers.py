"""Optimizers on the servers: the bits of one machine with as many replicas."""

import functools

import pytest
import torch

import ranks
import torchkv
from helpers import bits
from torchkv.lr_scheduler import FactorScheduler
from torchkv.state.content import Content

SIZES = {"w": (3, 4), "b": (5,), "sharded": (300, 301)}
STEPS = 3

# MXNet's: elementwise, with momentum of its own, and on whole values.
MXNET = {
    "sgd": {"momentum": 0.9, "wd": 0.1},
    "ftml": {},
    "rmsprop": {"centered": True, "clip_gradient": 1.0},
    "dcasgd": {},
    "lamb": {},
    "lars": {"momentum": 0.9, "eta": 0.1},
    "lbsgd": {"momentum": 0.5, "batch_scale": 2, "updates_per_epoch": 1},
    "sgld": {"seed": 3},
    "nag": {
        "momentum": 0.5,
        "lr_scheduler": FactorScheduler(1, 0.5),
        "begin_num_update": 1,
    },
}
NEED_WHOLE = ("lamb", "lars", "Adafactor")
PYTORCH = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "NAdam": {},
    "Adafactor": {},
}
GROUPS = [
    {"keys": ["b"], "weight_decay": 0.0},
    {"keys": ["sharded"], "lr": 0.5, "momentum": 0.5},
]


def gradients(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(size, generator=generator) for size in SIZES.values()]


def start(kv, whole=False):
    kv.init(list(SIZES), [torch.ones(size) for size in SIZES.values()], whole=whole)


def train(kv, push, change=None):
    """The values after some steps, which `change(step)` precedes."""
    if kv.num_workers > 1:
        kv.barrier()
    for step in range(STEPS):
        if change is not None:
            change(step)
        push(kv, step)
    return [bits(value) for value in kv.pull(list(SIZES))]


def mxnet(kv, push, name):
    start(kv, name in NEED_WHOLE)
    kv.set_optimizer(name, learning_rate=0.1, **MXNET[name])
    if kv.optimizer.lr_scheduler is None:
        return train(
            kv,
            push,
            lambda step: kv.optimizer.set_learning_rate(0.1 / (1 + step)),
        )
    values = train(kv, push)
    # Each server has a part of "sharded".
    updates = STEPS * (2 if push in (both_in_turn, push_in_turn) else 1)
    assert kv.optimizer.num_update == 1 + updates
    assert kv.optimizer.learning_rate == 0.1 * 0.5**updates
    return values


def groups_and_multipliers(kv, push):
    start(kv)
    kv.set_optimizer(torchkv.optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.1))
    kv.set_param_groups(GROUPS)

    def change(step):
        if step == 1:
            kv.set_lr_mult({"w": 2.0, "sharded": 0.25})
            kv.set_wd_mult({"w": 0.5})
        kv.optimizer.param_groups[2]["lr"] = 0.5 / (1 + step)

    return train(kv, push, change)


def pytorch(kv, push, name):
    """A class of torch.optim: in Python, on whole values."""
    kv.set_optimizer(getattr(torch.optim, name), lr=0.1, **PYTORCH[name])
    start(kv)
    kv.set_lr_mult({"w": 2.0})

    def change(step):
        kv.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)

    return train(kv, push, change)


CASES = {
    **{f"mxnet {name}": functools.partial(mxnet, name=name) for name in MXNET},
    "groups": groups_and_multipliers,
    **{f"torch {name}": functools.partial(pytorch, name=name) for name in PYTORCH},
}


# How a step's gradients are pushed: all of a round together, or rank after rank.


def push_own(kv, step):
    kv.push(list(SIZES), gradients(kv.rank, step))


def both_together(kv, step):
    pairs = zip(gradients(0, step), gradients(1, step), strict=True)
    kv.push(list(SIZES), [list(pair) for pair in pairs])


def push_in_turn(kv, step):
    kv.barrier()  # both have changed the options: Python's optimizers have their own
    for rank in range(2):
        if kv.rank == rank:
            push_own(kv, step)
        kv.barrier()


def both_in_turn(kv, step):
    for rank in range(2):
        kv.push(list(SIZES), gradients(rank, step))


def train_on_servers(rank, type, push):
    results = {}
    for name, case in CASES.items():
        with torchkv.create(type, name=name) as kv:
            results[name] = case(kv, push)
            kv.barrier()
    return results


@pytest.mark.parametrize(
    ("type", "push", "on_one_machine"),
    [
        ("dist_sync", push_own, both_together),
        ("dist_async", push_in_turn, both_in_turn),
    ],
    ids=["dist_sync", "dist_async"],
)
def test_the_bits_of_one_machine_with_two_replicas(type, push, on_one_machine):
    expected = {}
    for name, case in CASES.items():
        with torchkv.create() as kv:
            expected[name] = case(kv, on_one_machine)
    for results in ranks.run(train_on_servers, 2, type, push):
        assert results.keys() == expected.keys()
        for name, values in expected.items():
            assert results[name] == values, name


def set_what_needs_whole_values(rank):
    kv = torchkv.create("dist_sync")
    start(kv)
    kv.set_optimizer("sgd", learning_rate=1.0)
    kv.barrier()
    errors = []
    for change in (
        lambda: kv.set_updater(lambda key, input, stored: stored.add_(input)),
        lambda: kv.set_optimizer("lamb"),
        lambda: kv.set_optimizer(torchkv.optim.LAMB(lr=0.1)),
        lambda: kv.set_optimizer(torch.optim.SGD, lr=0.1),
    ):
        try:
            change()
        except ValueError as error:
            errors.append(str(error))
    kv.push("b", torch.ones(5))
    value = kv.pull("b").unique().tolist()  # the updater is the one of before
    kv.barrier()
    return errors, value


def test_what_needs_whole_values_is_refused_if_keys_are_sharded():
    for errors, value in ranks.run(set_what_needs_whole_values, 2):
        assert len(errors) == 4
        for error in errors:
            assert "expected keys that are not sharded over the servers" in error
            assert "init(..., whole=True)" in error
            assert "(key 'sharded')" in error
        assert value == [-1.0]


def what_a_server_holds(rank):
    kv = torchkv.create("dist_sync")
    start(kv)
    kv.set_optimizer("adam", learning_rate=0.1)
    kv.push(list(SIZES), gradients(rank, 0))
    kv.barrier()
    content, _, _ = Content.of_process(kv._impl)
    return {
        key: (
            item.value.numel(),
            {name: state.numel() for name, state in item.state.items()},
        )
        for key, item in content.keys.items()
    }


def test_values_and_optimizer_state_are_in_one_place():
    """The servers together have each element once, and its state beside it."""
    totals = dict.fromkeys(SIZES, 0)
    held = ranks.run(what_a_server_holds, 2)
    for server in held:
        for key, (count, state) in server.items():
            totals[key] += count
            assert state == {"mean": count, "var": count}
    assert totals == {key: torch.Size(size).numel() for key, size in SIZES.items()}
    shares = [server["sharded"][0] for server in held]
    assert min(shares) > 0.4 * sum(shares)
