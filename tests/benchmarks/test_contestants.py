"""Every way to push and pull leaves the same sums, and a wrong one is detected."""

import pytest
import torch

import contestants as ways
from contestants import Arrays
from peers.pattern import PERIOD, replica_pattern, sum_pattern

SHAPES = [(3, 5), (40_000,), (2, 7, 2), (7,)]
PUSH_PULL = [
    ways.torchkv_push_pull,
    ways.torchkv_pushpull,
    ways.torch_add,
    ways.torch_stack,
    ways.torch_foreach,
    lambda arrays: ways.torch_foreach(arrays, group_elements=20),
    ways.torch_foreach_grouped,
    ways.torch_add_foreach,
]
NAMES = [getattr(way, "__name__", "") for way in PUSH_PULL]
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)


@dtypes
@pytest.mark.parametrize("shapes", [SHAPES, [(40_000,)]], ids=["list", "one key"])
@pytest.mark.parametrize("way", PUSH_PULL, ids=NAMES)
def test_pulls_the_sum_of_four(way, shapes, dtype):
    arrays = Arrays(shapes, dtype, 4, 3)
    sums = ways.sums_of(shapes, dtype, 4)
    contestant = ways.on(arrays, way(arrays), sums)
    for _ in range(2):
        assert not contestant.agrees()  # no sums yet, or reset
        assert contestant.run(1) > 0
        for values, outs, total in zip(arrays.values, arrays.outs, sums, strict=True):
            exact = sum(value.double() for value in values)
            assert len(outs) == 3
            assert all(torch.equal(out, total) for out in outs)
            assert torch.equal(total.double(), exact)
        assert contestant.agrees()


@dtypes
@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_push_stores_the_sum(replicas, dtype):
    shapes = [(40_000,)]
    sums = ways.sums_of(shapes, dtype, replicas)
    arrays = Arrays(shapes, dtype, replicas, 0)
    contestants = [
        ways.torchkv_push(arrays, sums),
        *(
            ways.on(arrays, way(arrays), sums)
            for way in [ways.torch_add, ways.torch_stack, ways.torch_foreach]
        ),
    ]
    for contestant in contestants:  # each has to do its own work, in shared arrays
        assert not contestant.agrees()
        contestant.run(1)
        assert contestant.agrees()


def test_bound_adds():
    contestant = ways.bound(1000)
    assert not contestant.agrees()
    contestant.run(1)
    assert contestant.agrees()


def test_patterns_differ_between_replicas_and_between_keys():
    of_a_key = {tuple(replica_pattern(0, replica)) for replica in range(8)}
    of_a_replica = {tuple(replica_pattern(key, 0)) for key in range(PERIOD)}
    assert len(of_a_key) == 8
    assert len(of_a_replica) == PERIOD
    for pattern in of_a_key | of_a_replica:
        assert sorted(pattern) == list(range(-8, 9))
    assert len({tuple(sum_pattern(key, 8)) for key in range(PERIOD)}) == PERIOD
    assert max(map(abs, sum_pattern(0, 8))) <= 64


def test_available_memory_is_some():
    assert 2**20 < ways.available_bytes() < 2**60
