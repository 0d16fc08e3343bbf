"""Updaters and hyperparameters that the ranks set: rank 0's count."""

import os
import time

import pytest
import torch

import ranks
import torchkv

SAME = None
SET_OTHERS = "but rank 1 has set others"
SET_MORE = "but rank 1 has set some that rank 0 has not"


def as_a_scheduler(kv, rank):
    kv.set_optimizer("sgd", learning_rate=0.5, momentum=0.9)
    for _ in range(3):
        kv.optimizer.lr *= 0.5


def rank_0_alone(kv, rank):
    if rank == 0:
        as_a_scheduler(kv, rank)


def rank_0_more_often(kv, rank):
    kv.set_optimizer("sgd", learning_rate=0.5)
    if rank == 0:
        kv.optimizer.lr = 0.25


def multipliers_in_another_order(kv, rank):
    keys = [f"k{i}" for i in range(40)]
    kv.init(keys, [torch.zeros(2)] * 40)
    kv.set_optimizer("sgd", learning_rate=0.5)
    kv.set_lr_mult({key: 2.0 for key in (keys if rank == 0 else reversed(keys))})


def another_rate(kv, rank):
    kv.set_optimizer("sgd", learning_rate=0.5 + rank)


def a_rate_of_its_own_loss(kv, rank):
    kv.set_optimizer("sgd", learning_rate=0.5)
    kv.optimizer.lr = 0.25 if rank == 0 else 0.125
    kv.optimizer.lr = 0.0625  # the same again: the past differs


def another_optimizer(kv, rank):
    kv.set_optimizer("sgd" if rank == 0 else "adam", learning_rate=0.5)


def rank_1_more_often(kv, rank):
    kv.set_optimizer("sgd", learning_rate=0.5)
    if rank == 1:
        kv.optimizer.lr = 0.25


def rank_1_alone(kv, rank):
    if rank == 1:
        kv.set_optimizer("sgd", learning_rate=0.5)


def barrier_after(rank, change):
    kv = torchkv.create("dist_sync")
    kv.init("w", torch.zeros(2))
    change(kv, rank)
    message = SAME
    try:
        kv.barrier()
    except ValueError as error:
        message = str(error)
    kv.barrier()  # it is an error once
    assert bool(kv.state_dict()["keys"]) is (rank == 0)
    kv.close()
    return message


def changes_before_barriers(rank, environment):
    """Of options whose message is long, while the other rank waits already."""
    os.environ.update(environment)
    kv = torchkv.create("dist_sync")
    keys = [f"k{i}" for i in range(500)]
    kv.init(keys, [torch.zeros(2)] * 500)
    kv.set_optimizer("sgd", learning_rate=0.5)
    for i in range(20):
        time.sleep(0.02 * (rank == 0))
        kv.set_lr_mult(dict.fromkeys(keys, i + 2.0))
        kv.barrier()
    kv.close()


@pytest.mark.parametrize("shared_memory", ["0", "1"])
def test_a_barrier_waits_for_rank_0s_options(shared_memory):
    ranks.run(changes_before_barriers, 2, {"TORCHKV_SHARED_MEMORY": shared_memory})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (as_a_scheduler, SAME),
        (rank_0_alone, SAME),
        (rank_0_more_often, SAME),
        (multipliers_in_another_order, SAME),
        (another_rate, SET_OTHERS),
        (a_rate_of_its_own_loss, SET_OTHERS),
        (another_optimizer, SET_OTHERS),
        (rank_1_more_often, SET_MORE),
        (rank_1_alone, SET_MORE),
    ],
)
def test_a_barrier_compares_them_with_rank_0s(change, expected):
    first, second = ranks.run(barrier_after, 2, change)
    assert first is None
    assert second is expected is None or expected in second
