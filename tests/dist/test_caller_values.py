"""Values that a rank's own server reads, and outs that it writes, where the caller of
pushpull has them."""

import os
import signal
import threading
import time

import pytest
import torch

import ranks
import torchkv

SIZE = 200_000  # split over the servers; two fp32 outs are more than 1 MiB


def wait_for(path):
    while not path.exists():
        time.sleep(0.01)


def values_of(rank):
    return [torch.full((SIZE,), float(rank + 1)), torch.full((5_000,), rank + 2.0)]


def early_return(rank, folder, how):
    """Rank 0 gives up its pushpull and overwrites the values; rank 1 comes later."""
    is_first = rank == 0
    kv = torchkv.create("dist_sync", timeout=1.5 if is_first and how == "time" else 50)
    kv.init(["a", "b"], [torch.zeros(SIZE), torch.zeros(5_000)])
    kv.set_optimizer("sgd", learning_rate=1.0)
    values = values_of(rank)
    out = [torch.zeros(SIZE), torch.zeros(5_000)]
    if is_first:
        if how == "signal":
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        expected = torchkv.StoreTimeoutError if how == "time" else KeyboardInterrupt
        with pytest.raises(expected):
            kv.pushpull(["a", "b"], values, out=out)
        assert not any(each.any() for each in out)
        for value in values:
            value.fill_(1e6)
        del values
        (folder / "returned").touch()
        wait_for(folder / "merged")
        given, out = out, [torch.zeros(SIZE), torch.zeros(5_000)]
        kv.pull(["a", "b"], out=out)
        assert not any(each.any() for each in given)  # the update has not written them
    else:
        wait_for(folder / "returned")
        kv.pushpull(["a", "b"], values, out=out)
        (folder / "merged").touch()
    result = [each.unique().tolist() for each in out]
    kv.close()
    return result


@pytest.mark.parametrize("how", ["time", "signal"])
def test_a_caller_that_returns_early_may_overwrite_its_values(tmp_path, how):
    for result in ranks.run(early_return, 2, tmp_path, how):
        assert result == [[-3.0], [-5.0]]


def failing(rank):
    """Of rank 0's pushpull, a is merged; then rank 1 closes, and b fails."""
    kv = torchkv.create("dist_sync", timeout=50)
    kv.init(["a", "b"], [torch.zeros(SIZE), torch.zeros(SIZE)])
    kv.set_optimizer("sgd", learning_rate=1.0)
    values = [torch.full((SIZE,), float(rank + 1)) for _ in "ab"]
    out = [torch.zeros(SIZE) for _ in "ab"]
    if rank == 1:
        kv.pushpull("a", values[0], out=out[0])
        assert out[0].eq(-3.0).all()
        kv.close()
        return
    with pytest.raises(torchkv.RemoteError, match="key 'b'"):
        kv.pushpull(["a", "b"], values, out=out)
    for value in values:
        assert value.eq(1.0).all()
    assert set(out[0].unique().tolist()) <= {0.0, -3.0}
    assert not out[1].any()


def test_a_call_that_fails_leaves_its_values_alone():
    ranks.run(failing, 2)


def merge(rank, optimizer):
    kv = torchkv.create("dist_sync")
    torch.manual_seed(rank)
    start = torch.arange(SIZE, dtype=torch.float32)
    kv.init(["a", "half"], [start, start.half()])
    if optimizer:
        kv.set_optimizer(**optimizer)
    rows = torch.randn(SIZE, 2)
    results = []
    for way in ("pushpull", "two calls"):
        for value in (
            rows[:, 0].contiguous(),
            rows[:, 1],  # with gaps: it is copied
            rows[:, 0].half(),
            [rows[:, 0], rows[:, 1]],  # summed
        ):
            kv.assign(["a", "half"], [start, start.half()])
            before = value.clone() if isinstance(value, torch.Tensor) else None
            both = [value, value]
            if way == "pushpull":
                out = [torch.empty(SIZE), torch.empty(SIZE, dtype=torch.half)]
                kv.pushpull(["a", "half"], both, out=out)
            else:
                kv.push(["a", "half"], both)
                out = kv.pull(["a", "half"])
            assert before is None or before.equal(value)
            results.append(out)
    kv.barrier()
    kv.close()
    return results


@pytest.mark.parametrize(
    "optimizer",
    [
        None,
        {"optimizer": "sgd", "learning_rate": 0.1},
        {"optimizer": "sgd", "learning_rate": 0.1, "max_norm": 1.0},
    ],
    ids=["sum", "sgd", "clipped"],
)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_bits_are_those_of_two_calls(optimizer, num_ranks):
    for results in ranks.run(merge, num_ranks, optimizer):
        half = len(results) // 2
        for one, two in zip(results[:half], results[half:], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def into_values(rank):
    """The outs are the values, and each other's values."""
    kv = torchkv.create("dist_sync")
    kv.init(["a", "b"], [torch.zeros(SIZE), torch.zeros(SIZE)])
    results = []
    for swapped in (False, True):
        a, b = torch.full((SIZE,), 1.0 + rank), torch.full((SIZE,), 3.0 + rank)
        kv.pushpull(["a", "b"], [a, b], out=[b, a] if swapped else [a, b])
        results.append((a.unique().tolist(), b.unique().tolist()))
        a.fill_(7)
        b.fill_(7)
        results.append(tuple(x.unique().tolist() for x in kv.pull(["a", "b"])))
    kv.barrier()
    kv.close()
    return results


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_outs_may_be_the_values(num_ranks):
    a, b = ([1.0], [3.0]) if num_ranks == 1 else ([3.0], [7.0])
    for results in ranks.run(into_values, num_ranks):
        assert results == [(a, b), (a, b), (b, a), (a, b)]


def count_in_outs(rank, num_steps):
    """The outs' values after each step; the ranks' updates come in any order."""
    kv = torchkv.create("dist_async")
    kv.init("a", torch.zeros(SIZE))
    kv.set_optimizer("sgd", learning_rate=1.0)
    kv.barrier()
    seen = []
    for _ in range(num_steps):
        out = torch.zeros(SIZE)
        kv.pushpull("a", torch.ones(SIZE), out=out)
        # Each server has one half.
        seen.append([half.unique().tolist() for half in out.chunk(2)])
    kv.barrier()
    last = kv.pull("a").unique().tolist()
    kv.close()
    return seen, last


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_outs_of_dist_async_are_values_of_one_time(num_ranks):
    num_steps = 30
    for seen, last in ranks.run(count_in_outs, num_ranks, num_steps):
        assert last == [-float(num_ranks * num_steps)]
        before = [0.0, 0.0]
        for step, halves in enumerate(seen, 1):
            for i, values in enumerate(halves):
                (value,) = values  # no part of another update's
                others = -value - step
                assert 0 <= others <= (num_ranks - 1) * num_steps
                assert others % 1 == 0 and value < before[i]
                before[i] = value


@torch.jit.script
def add_twice(key: str, value: torch.Tensor, stored: torch.Tensor) -> None:
    stored.add_(value * 2)


def script_of_another_rank(rank):
    """Rank 1, whose server runs the script for some keys, does not know of it."""
    kv = torchkv.create("dist_sync")
    keys = list("abcdef")
    kv.init(keys, [torch.zeros(SIZE)] * 6, whole=True)
    kv.barrier()
    if rank == 0:
        kv.set_updater(add_twice)
    results = []
    for _ in range(2):
        outs = [torch.zeros(SIZE) for _ in keys]
        kv.pushpull(keys, [torch.ones(SIZE) for _ in keys], out=outs)
        results.append(torch.cat(outs).unique().tolist())
    kv.close()
    return results


def test_no_outs_are_written_by_a_script():
    assert ranks.run(script_of_another_rank, 2) == [[[4.0], [8.0]]] * 2
