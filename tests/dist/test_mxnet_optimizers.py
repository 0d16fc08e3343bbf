"""MXNet's optimizers on the servers: the bits of one machine."""

import torch

import ranks
import torchkv
from helpers import bits
from torchkv.lr_scheduler import FactorScheduler

# Elementwise, with momentum of its own, and on whole values.
OPTIMIZERS = {
    "sgd": {"momentum": 0.9, "wd": 0.1},
    "ftml": {},
    "rmsprop": {"centered": True, "clip_gradient": 1.0},
    "dcasgd": {},
    "lamb": {},
    "lars": {"momentum": 0.9, "eta": 0.1},
    "nag": {
        "momentum": 0.5,
        "lr_scheduler": FactorScheduler(1, 0.5),
        "begin_num_update": 1,
    },
}
SIZES = {"w": (3, 4), "sharded": (300, 301)}
STEPS = 3


def gradients(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(size, generator=generator) for size in SIZES.values()]


def train(kv, name, pushed_at):
    keys = list(SIZES)
    whole = name in ("lamb", "lars")
    kv.init(keys, [torch.ones(size) for size in SIZES.values()], whole=whole)
    kv.set_optimizer(name, learning_rate=0.1, **OPTIMIZERS[name])
    if kv.num_workers > 1:
        kv.barrier()
    for step in range(STEPS):
        if kv.optimizer.lr_scheduler is None:
            kv.optimizer.set_learning_rate(0.1 / (1 + step))
        kv.push(keys, pushed_at(step))
    values = kv.pull(keys)
    if kv.optimizer.lr_scheduler is not None:
        # Each server has a part of "sharded".
        assert kv.optimizer.num_update == 1 + STEPS
        assert kv.optimizer.learning_rate == 0.1 * 0.5**STEPS
    return [bits(value) for value in values]


def train_on_servers(rank):
    results = {}
    for name in OPTIMIZERS:
        with torchkv.create("dist_sync", name=name) as kv:
            results[name] = train(kv, name, lambda step: gradients(rank, step))
            kv.barrier()
    return results


def test_the_bits_of_one_machine_with_two_replicas():
    expected = {}
    for name in OPTIMIZERS:
        with torchkv.create() as kv:
            expected[name] = train(
                kv,
                name,
                lambda step: [
                    list(pair)
                    for pair in zip(gradients(0, step), gradients(1, step), strict=True)
                ],
            )
    for results in ranks.run(train_on_servers, 2):
        for name, values in expected.items():
            assert results[name] == values, name
