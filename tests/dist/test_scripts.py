"""The scripts of one machine run on several line by line, the updater on the servers.

All ranks push the same values. `dist_sync` sums them before the updater sees them;
`dist_async` hands over each, so that the default updater, assignment, keeps one.
"""

import pytest
import torch

import ranks
import torchkv

TYPES = ["dist_sync", "dist_async"]


def full(value):
    return torch.full((2, 3), float(value))


def element(value):
    (number,) = value.unique().tolist()
    return number


class Recorder:
    """Adds a multiple of what is pushed; keeps the keys it was called with."""

    def __init__(self, factor):
        self.factor = factor
        self.keys = []

    def __call__(self, key, input, stored):
        self.keys.append(key)
        stored += input * self.factor


def pulled(kv, key, like=None):
    """After all ranks' pushes."""
    kv.barrier()
    out = full(0) if like is None else like
    kv.pull(key, out=out)
    kv.barrier()
    return out


def one_key(kv):
    kv.init(3, full(2))
    yield element(pulled(kv, 3))
    kv.push(3, full(8))
    yield element(pulled(kv, 3))
    kv.push(3, [full(1)] * 4)
    yield element(pulled(kv, 3))
    recorder = Recorder(2)
    kv._set_updater(recorder)
    yield element(pulled(kv, 3))
    kv.push(3, full(1))
    yield element(pulled(kv, 3))
    outs = pulled(kv, 3, [full(1) for _ in range(4)])
    yield [element(out) for out in outs]
    yield recorder.keys


def list_of_keys(kv):
    recorder = Recorder(2)
    kv._set_updater(recorder)
    keys = [5, 7, 9]
    kv.init(keys, [full(1)] * 3)
    kv.push(keys, [full(1)] * 3)
    yield element(pulled(kv, keys, [full(0)] * 3)[1])
    outs = [[full(1) for _ in range(4)]] * 3
    kv.push(keys, outs)
    yield element(pulled(kv, keys, outs)[1][1])
    yield recorder.keys


def negative_values(kv):
    kv.init(3, full(-2))
    yield element(pulled(kv, 3))
    kv.push(3, full(-7))
    yield element(pulled(kv, 3))
    kv.push(3, [full(1)] * 3)
    yield element(pulled(kv, 3))
    keys = [7, 11, 13, 17]
    kv.init(keys, [full(-3)] * 4)
    yield element(pulled(kv, keys, [full(0)] * 4)[2])
    kv.push(keys, [[full(-0.1)] * 3] * 4)
    yield element(pulled(kv, keys, [full(0)] * 4)[2])
    recorder = Recorder(0.01)
    kv.set_updater(recorder)
    yield element(pulled(kv, 3))
    kv.push(3, full(5))
    yield element(pulled(kv, 3))
    yield recorder.keys


def run_script(rank, script, type):
    with torchkv.create(type) as kv:
        seen = list(script(kv))
        kv.barrier()
        return seen


def run_on(num_ranks, script, type):
    """What each rank saw, and the keys of all calls of the updater, server by server.

    The updater runs once a round in dist_sync, and once for each push in dist_async.
    """
    results = ranks.run(run_script, num_ranks, script, type)
    values = results[0][:-1]
    for result in results:
        assert result[:-1] == values
    calls = num_ranks if type == "dist_async" else 1
    return values, [result[-1] for result in results], calls


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("type", ["dist", *TYPES])
def test_one_key(type, num_ranks):
    values, keys, calls = run_on(num_ranks, one_key, type)
    n = num_ranks
    summed = 1 if type == "dist_async" else n
    after = 4 * summed + 2 * n
    assert values == [2, 8 * summed, 4 * summed, 4 * summed, after, [after] * 4]
    assert sorted(sum(keys, [])) == [3] * calls


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("type", TYPES)
def test_list_of_keys(type, num_ranks):
    values, keys, calls = run_on(num_ranks, list_of_keys, type)
    n = num_ranks
    assert values == [1 + 2 * n, 1 + 2 * n + 8 * n]
    assert sorted(sum(keys, [])) == sorted([5, 7, 9] * 2 * calls)
    if type == "dist_sync":
        for called in keys:  # each server's, in the order of the call
            half = called[: len(called) // 2]
            assert half == sorted(half)
            assert called == half * 2


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("type", TYPES)
def test_negative_values(type, num_ranks):
    values, keys, calls = run_on(num_ranks, negative_values, type)
    n = num_ranks
    summed = 1 if type == "dist_async" else n
    assert values[:4] == [-2, -7 * summed, 3 * summed, -3]
    assert values[4] == pytest.approx(-0.3 * summed)
    assert values[5] == 3 * summed
    assert values[6] == pytest.approx(3 * summed + 0.05 * n)
    assert sorted(sum(keys, [])) == [3] * calls
