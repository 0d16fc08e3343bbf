"""How many bytes a push and a pull move: the table in docs/architecture.md."""

import os

import pytest
import torch

import ranks
import torchkv
from torchkv import _C

SIZE = 400_000  # half on each server, in one piece
NUM_BYTES = 4 * SIZE
STEPS = 10

PUSHPULL = "pushpull"
TWO_CALLS = "push, pull"
# What is copied for servers: the own one reads a waiting caller's memory.
SUMMED = {PUSHPULL: 0.5, TWO_CALLS: 1.0}


def moved(rank, way, environment):
    """By kind, how many times the bytes of the value a step has moved."""
    os.environ.update(environment)
    kv = torchkv.create("dist_sync")
    kv.init("w", torch.zeros(SIZE))
    kv.set_optimizer("sgd", learning_rate=1.0)
    value, out = torch.ones(SIZE), torch.empty(SIZE)

    def steps():
        for _ in range(STEPS):
            if way == PUSHPULL:
                kv.pushpull("w", value, out=out)
            else:
                kv.push("w", value)
                kv.pull("w", out=out)
        kv.barrier()

    steps()
    before = _C.byte_counts()
    steps()
    after = _C.byte_counts()
    kv.barrier()
    kv.close()
    assert out.eq(-2 * STEPS * ranks_of_job()).all()
    return {name: (after[name] - before[name]) / NUM_BYTES / STEPS for name in after}


def ranks_of_job():
    return int(os.environ["WORLD_SIZE"])


@pytest.mark.parametrize("way", [PUSHPULL, TWO_CALLS])
def test_on_one_host_values_are_copied_in_and_out_once(way):
    for counts in ranks.run(moved, 2, way, {}):
        assert counts == {
            "summed": SUMMED[way],
            "listed": 0.0,
            "named": 1.0,  # a half to the other server, a half to the other worker
            "sent": 0.0,
            "joined": 0.0,
            "allocated": 0.0,
            "written": 1.0,
        }


@pytest.mark.parametrize("way", [PUSHPULL, TWO_CALLS])
def test_through_sockets(way):
    for counts in ranks.run(moved, 2, way, {"TORCHKV_SHARED_MEMORY": "0"}):
        # Where the last value is still in a socket.
        assert counts.pop("allocated") <= 1.0
        assert counts == {
            "summed": SUMMED[way],
            "listed": 0.0,
            "named": 0.0,
            "sent": 1.0,
            "joined": 0.0,
            "written": 1.0,
        }
