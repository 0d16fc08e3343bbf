"""stats() and str(): what a store shows of itself."""

import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import torchkv
from helpers import AddStr, full, run_threads, script
from torchkv import optim

SECONDS = ("sum_seconds", "update_seconds", "copy_seconds")


def counts(kv):
    """The numbers of a store's stats that are exact."""
    return {
        key: tuple(value for name, value in row.items() if name not in SECONDS)
        for key, row in kv.stats().items()
    }


def test_a_new_key_has_zeros(kv):
    assert kv.stats() == {}
    kv.init(["a", "b"], [full(0), full(0)])
    zeros = dict.fromkeys(("pushes", "pulls", "bytes_pushed", "bytes_pulled"), 0)
    zeros |= dict.fromkeys(SECONDS, 0.0)
    assert kv.stats() == {"a": zeros, "b": zeros}


def test_counts_calls_and_bytes(kv):
    kv.init([3, 5], [full(0), torch.zeros(10, dtype=torch.float16)])
    kv.push(3, full(1))
    kv.push([3, 5], [[full(1), full(1)], torch.ones(10)])
    assert counts(kv) == {3: (2, 0, 72, 0), 5: (1, 0, 40, 0)}
    kv.pull(3)
    kv.pull([3, 5], [[full(0), full(0)], torch.zeros(10, dtype=torch.float64)])
    assert counts(kv) == {3: (2, 2, 72, 72), 5: (1, 1, 40, 80)}
    kv.pushpull(5, torch.ones(10))
    kv.push([3, 3], [full(1), full(1)])  # one update
    assert counts(kv) == {3: (3, 2, 120, 72), 5: (2, 2, 80, 120)}
    kv.broadcast(7, full(1), [full(0)] * 3)
    assert counts(kv)[7] == (0, 1, 0, 72)
    kv.delete(3)
    kv.init(3, full(0))
    assert counts(kv)[3] == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("set_on", "member"),
    [
        (lambda kv: kv.set_updater(None), "sum_seconds"),
        (lambda kv: kv.set_optimizer(optim.SGD(lr=1.0)), "update_seconds"),
        (lambda kv: kv.set_optimizer(optim.SGD(max_norm=1.0)), "update_seconds"),
        (lambda kv: kv.set_optimizer(optim.SGD(accumulate=2)), "update_seconds"),
        (lambda kv: kv.set_updater(script(AddStr())), "both"),
        (lambda kv: kv.set_optimizer(torch.optim.SGD, lr=1.0), "both"),
    ],
)
def test_counts_pushes_with_every_updater(kv, set_on, member):
    kv.init(["a", "b"], [torch.zeros(20_000), torch.zeros(0)])
    set_on(kv)
    begin = time.perf_counter()
    for _ in range(3):
        kv.push(["a", "b"], [[torch.ones(20_000)] * 2, torch.ones(0)])
        kv.pull("a")
    taken = time.perf_counter() - begin
    assert counts(kv) == {"a": (3, 3, 480_000, 240_000), "b": (3, 0, 0, 0)}
    row = kv.stats()["a"]
    for name in ("sum_seconds", "update_seconds"):
        assert (row[name] > 0) == (member in (name, "both"))
    assert row["copy_seconds"] > 0
    assert sum(row[name] for name in SECONDS) <= taken


def test_the_time_of_an_updater_is_not_that_of_the_sum(kv):
    def slow(key, input, stored):
        time.sleep(0.05)

    kv.init("a", full(0))
    kv.set_updater(slow)
    kv.push("a", full(1))
    row = kv.stats()["a"]
    assert row["update_seconds"] >= 0.05
    assert row["sum_seconds"] < 0.05


def test_a_time_is_divided_by_bytes(kv):
    kv.init(["a", "b"], [torch.zeros(30_000), torch.zeros(10_000)])
    kv.push(["a", "b"], [torch.ones(30_000), torch.ones(10_000)])
    rows = kv.stats()
    ratio = rows["a"]["sum_seconds"] / rows["b"]["sum_seconds"]
    assert ratio == pytest.approx(3) or kv.type == "local" and ratio > 0


def test_threads_lose_no_count(kv):
    kv.init(list(range(4)), [full(0)] * 4)

    def calls():
        for i in range(200):
            kv.push([i % 4, (i + 1) % 4], [full(1)] * 2)
            kv.pull(i % 4)

    run_threads([calls] * 4)
    assert counts(kv) == dict.fromkeys(range(4), (400, 200, 400 * 24, 200 * 24))


def test_a_shared_value_that_is_pulled_into_itself_moves_no_bytes(kv):
    weight = full(0)
    kv.init("a", weight, share=True)
    kv.pushpull("a", full(1), [weight, full(0)])
    assert counts(kv) == {"a": (1, 1, 24, 24)}


def test_calls_are_ranges_of_the_profiler(kv):
    kv.init("a", full(0))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        kv.init("b", full(0))
        kv.push("a", full(1))
        kv.pull("a")
        kv.pull("a", full(0))
        kv.pushpull("a", full(1))
        kv.assign("a", full(1))
        kv.broadcast("c", full(0), full(0))
    ranges = {
        event.key: event.count
        for event in profiler.key_averages()
        if event.key.startswith("torchkv::")
    }
    assert ranges == {
        "torchkv::init": 1,
        "torchkv::push": 1,
        "torchkv::pull": 2,
        "torchkv::pushpull": 1,
        "torchkv::assign": 1,
        "torchkv::broadcast": 1,
    }


# --- str -------------------------------------------------------------------------


def test_print_shows_the_largest_keys(kv):
    assert str(kv) == repr(kv) == f"KVStore(type='{kv.type}', keys=0, bytes=0)"
    kv.init(["bias", "weight"], [torch.zeros(()), torch.zeros(1000, 3)])
    kv.push("weight", torch.zeros(1000, 3))
    assert str(kv).splitlines() == [
        f"KVStore(type='{kv.type}', keys=2, bytes=12004)",
        "  key       shape     dtype        size  updates",
        "  'weight'  1000 x 3  float32  11.7 KiB        1",
        "  'bias'    scalar    float32       4 B        0",
    ]


def test_print_of_many_keys_is_short(kv):
    kv.init(list(range(100)), [torch.zeros(1 + i) for i in range(100)])
    lines = str(kv).splitlines()
    assert len(lines) == 13
    assert lines[2].split() == ["99", "100", "float32", "400", "B", "0"]
    assert lines[-1] == "  and 90 smaller ones"


def test_print_of_a_closed_store():
    kv = torchkv.create()
    kv.close()
    assert str(kv) == repr(kv)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1 << 40, "1.0 TiB")],
)
def test_sizes_are_readable(num_bytes, text):
    assert torchkv.stats.readable(num_bytes) == text
