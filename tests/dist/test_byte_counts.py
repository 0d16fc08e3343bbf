"""How many bytes a push and a pull move: the table in docs/architecture.md."""

import os

import pytest
import torch

import ranks
import torchkv
from torchkv import _C

# Elements of the value, half of it on each server: in one piece, in several.
SHORT, LONG = 400_000, 2_500_000
STEPS = 10

PUSHPULL, PUSH, PULL = "pushpull", "push", "pull"
# What is copied for servers: the own one reads a waiting caller's memory.
SUMMED = {PUSHPULL: 0.5, PUSH: 1.0, PULL: 0.0}
# A half to the other server, a half to the other worker.
TO_OTHERS = {PUSHPULL: 1.0, PUSH: 0.5, PULL: 0.5}
WRITTEN = {PUSHPULL: 1.0, PUSH: 0.0, PULL: 1.0}
# Of these: the own server's half, by its update.
IN_PASS = {PUSHPULL: 0.5, PUSH: 0.0, PULL: 0.0}


def moved(rank, way, size, environment, num_replicas=1, type="dist_sync"):
    """By kind, how many times the bytes of the value a step has moved."""
    os.environ.update(environment)
    kv = torchkv.create(type)
    kv.init("w", torch.zeros(size))
    kv.set_optimizer("sgd", learning_rate=1.0)
    value, out = torch.ones(size), torch.empty(size)
    values = [value] + [value.clone() for _ in range(num_replicas - 1)]

    def steps():
        for _ in range(STEPS):
            if way == PUSHPULL:
                kv.pushpull("w", values, out=out)
            elif way == PUSH:
                kv.push("w", values)
                kv.barrier()  # or several pushes are on their way
            else:
                kv.pull("w", out=out)
        kv.barrier()

    kv.pushpull("w", values, out=out)  # what init has made goes through sockets
    steps()
    before = _C.byte_counts()
    kv.barrier()
    steps()
    after = _C.byte_counts()
    kv.barrier()
    kv.pull("w", out=out)
    kv.barrier()
    kv.close()
    num_pushes = 1 + (0 if way == PULL else 2 * STEPS)
    assert out.eq(-num_pushes * num_replicas * ranks_of_job()).all()
    num_bytes = value.nbytes * STEPS
    return {name: (after[name] - before[name]) / num_bytes for name in after}


def ranks_of_job():
    return int(os.environ["WORLD_SIZE"])


@pytest.mark.parametrize("type", ["dist_sync", "dist_async"])
@pytest.mark.parametrize("size", [SHORT, LONG])
@pytest.mark.parametrize("way", [PUSHPULL, PUSH, PULL])
def test_on_one_host_values_are_copied_in_and_out_once(way, size, type):
    # In dist_async, where each rank's push is an update of its own, the other rank may
    # still read the last value.
    is_read = type == "dist_async" and way == PUSHPULL
    for counts in ranks.run(moved, 2, way, size, {}, 1, type):
        assert counts.pop("allocated") <= (1.0 if is_read else 0.0)
        assert counts == {
            "summed": SUMMED[way],
            "listed": 0.0,
            "named": TO_OTHERS[way],
            "sent": 0.0,
            "joined": 0.0,
            "written": WRITTEN[way],
            "in_pass": IN_PASS[way],
        }


@pytest.mark.parametrize("way", [PUSHPULL, PUSH])
def test_replicas_are_summed_into_shared_memory(way):
    for counts in ranks.run(moved, 2, way, LONG, {}, 3):
        assert counts["summed"] == 1.0
        assert counts["named"] == TO_OTHERS[way]
        assert counts["sent"] == counts["joined"] == counts["allocated"] == 0.0
        assert counts["written"] == WRITTEN[way]


def check_sockets(way, size, results):
    for counts in results:
        # Where the last value is still in a socket.
        assert counts.pop("allocated") <= 1.0
        # Of a push: the pieces that came from the other rank.
        is_joined = size == LONG and way != PULL
        assert counts == {
            "summed": SUMMED[way],
            "listed": 0.0,
            "named": 0.0,
            "sent": TO_OTHERS[way],
            "joined": 0.5 if is_joined else 0.0,
            "written": WRITTEN[way],
            "in_pass": IN_PASS[way],
        }


@pytest.mark.parametrize("size", [SHORT, LONG])
@pytest.mark.parametrize("way", [PUSHPULL, PUSH, PULL])
def test_through_sockets(way, size):
    off = {"TORCHKV_SHARED_MEMORY": "0"}
    check_sockets(way, size, ranks.run(moved, 2, way, size, off))


@pytest.mark.parametrize("size", [SHORT, LONG])
@pytest.mark.parametrize("way", [PUSHPULL, PUSH, PULL])
def test_between_hosts(hosts, way, size):
    secret = {"TORCHKV_JOB_SECRET": "0123456789abcdef0123456789abcdef"}
    results = ranks.run(moved, 2, way, size, secret, hosts=hosts)
    check_sockets(way, size, results)
