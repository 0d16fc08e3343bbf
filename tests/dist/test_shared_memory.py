"""Values between ranks of one host lie in shared memory, where that is possible."""

import gc
import os
import resource
import time

import pytest
import torch

import ranks
import torchkv
import usage

SIZE = 300_000  # more than a page; split between servers


def mappings():
    """The modes of this process's mappings of shared memory: its own, and others'."""
    with open("/proc/self/maps") as maps:
        return sorted(line.split()[1] for line in maps if "memfd:torchkv" in line)


def train(rank, steps=5):
    kv = torchkv.create("dist_sync", timeout=30)
    kv.init(["w", "small"], [torch.zeros(SIZE), torch.zeros(3)])
    kv.set_optimizer("sgd", learning_rate=1.0)
    outs = [torch.empty(SIZE), torch.empty(3)]
    for _ in range(steps):
        kv.pushpull(
            ["w", "small"],
            [torch.full((SIZE,), rank + 1.0), torch.full((3,), rank + 1.0)],
            out=outs,
        )
    kv.barrier()
    result = [out.unique().tolist() for out in outs], mappings()
    kv.close()
    return result


def test_ranks_of_a_host_share_memory():
    for values, modes in ranks.run(train, 2):
        assert values == [[-15.0], [-15.0]]
        # Values and words, which this rank writes and the other reads, and its.
        assert modes == ["r--s", "r--s", "rw-s", "rw-s"]


def test_it_may_be_switched_off():
    off = {"TORCHKV_SHARED_MEMORY": "0"}
    for values, modes in ranks.run(train, 2, environment=off):
        assert values == [[-15.0], [-15.0]]
        assert modes == []


def test_ranks_with_and_without_it_mix():
    results = ranks.run(train, 3, environments={1: {"TORCHKV_SHARED_MEMORY": "0"}})
    for rank, (values, modes) in enumerate(results):
        assert values == [[-30.0], [-30.0]]
        assert ("r--s" in modes) == (rank != 1)


def train_and_log(rank, folder, has_memory):
    """What the process writes to stderr about sockets, and the result."""
    if not has_memory:  # which consists of large files
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, most))
    path = folder / str(rank)
    before = os.dup(2)
    with open(path, "w") as file:
        os.dup2(file.fileno(), 2)
    try:
        values, modes = train(rank)
    finally:
        os.dup2(before, 2)
    lines = [line for line in path.read_text().splitlines() if "over socket" in line]
    return values, modes, lines


def test_a_line_says_why_values_go_over_sockets(tmp_path):
    for values, modes, lines in ranks.run(train_and_log, 2, tmp_path, False):
        assert values == [[-15.0], [-15.0]]
        assert modes == []
        (line,) = lines
        assert "as the system has no memory to share" in line
        assert "ftruncate" in line
    # Not if all is well.
    for _, modes, lines in ranks.run(train_and_log, 2, tmp_path, True):
        assert modes and not lines


def many_short_values(rank):
    kv = torchkv.create("dist_sync", timeout=30)
    keys = list(range(9000))  # of 4000 bytes, which share messages
    kv.init(keys, [torch.zeros(1000)] * len(keys))
    outs = [torch.empty(1000) for _ in keys]
    kv.pushpull(keys, [torch.full((1000,), rank + 1.0)] * len(keys), out=outs)
    kv.barrier()
    kv.close()
    return all(out.eq(3).all() for out in outs)


@pytest.mark.parametrize("shared", ["0", "1"])
def test_many_short_values_in_one_call(shared):
    environment = {"TORCHKV_SHARED_MEMORY": shared}
    assert ranks.run(many_short_values, 2, environment=environment) == [True] * 2


def many_named_values(rank):
    kv = torchkv.create("dist_sync", timeout=30)
    keys = list(range(4000))  # just long enough to be named, in few messages
    kv.init(keys, [torch.zeros(1100)] * len(keys))
    outs = [torch.empty(1100) for _ in keys]
    for _ in range(3):
        values = [torch.full((1100,), float(key + rank)) for key in keys]
        kv.pushpull(keys, values, out=outs)
    kv.barrier()
    kv.close()
    return all(out.eq(2 * key + 1).all() for key, out in zip(keys, outs, strict=True))


def test_many_named_values_in_one_call():
    assert ranks.run(many_named_values, 2) == [True] * 2


def many_steps(rank):
    kv = torchkv.create("dist_async")
    kv.init("w", torch.zeros(SIZE))
    kv.set_optimizer("sgd", learning_rate=1.0)
    kv.barrier()
    out = torch.empty(SIZE)
    used = []
    for _ in range(6):
        for _ in range(30):
            kv.pushpull("w", torch.ones(SIZE), out=out)
            kv.barrier()  # or it depends on the timing how many are in flight
        used.append(usage.allocated_bytes() + usage.resident_bytes("RssShmem"))
    kv.barrier()
    value = kv.pull("w").unique().tolist()
    kv.barrier()
    kv.close()
    return value, used


def test_memory_is_used_again():
    for value, used in ranks.run(many_steps, 2):
        assert value == [-360.0]
        assert max(used[2:]) < used[1] + 16 * SIZE  # four values


def pull_late(rank, folder):
    kv = torchkv.create("dist_sync")
    kv.init("w", torch.zeros(SIZE))
    kv.push("w", torch.ones(SIZE))
    out = torch.empty(SIZE)
    work = kv.pull("w", out=out, async_op=True)
    while not work.is_completed() and rank == 0:
        time.sleep(0.001)  # which also writes the out
    kv.close()
    if rank == 0:
        del kv
        gc.collect()
        return None
    while not os.path.exists(f"{folder}/ended"):
        time.sleep(0.01)
    time.sleep(0.2)
    work.wait()
    return out.unique().tolist()


def test_a_value_outlives_the_rank_that_it_came_from(tmp_path):
    with ranks.Ranks(pull_late, 2, str(tmp_path)) as job:
        job.collect(ranks=[0])
        (tmp_path / "ended").touch()
        assert job.join()[1] == [2.0]


def fork_with_a_work(rank):
    kv = torchkv.create("dist_sync")
    kv.init("w", torch.zeros(SIZE))
    kv.push("w", torch.ones(SIZE))
    out = torch.empty(SIZE)
    work = kv.pull("w", out=out, async_op=True)
    time.sleep(0.5)  # it has come
    child = os.fork()
    if child == 0:
        del work, kv
        gc.collect()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    for _ in range(5):
        kv.push("w", torch.ones(SIZE))
    kv.barrier()
    work.wait()
    kv.barrier()
    kv.close()
    return status, out.unique().tolist()


def test_a_forked_child_does_not_release_what_its_parent_reads():
    assert ranks.run(fork_with_a_work, 2) == [(0, [2.0])] * 2


def keep_stored(rank):
    kept = []

    def update(key, input, stored):
        stored += input
        kept.append(stored)

    kv = torchkv.create("dist_sync")
    kv.set_updater(update)
    kv.init("w", torch.zeros(SIZE))
    for _ in range(3):
        kv.push("w", torch.ones(SIZE))
    value = kv.pull("w").unique().tolist()
    kv.barrier()
    kv.close()
    del kv
    gc.collect()
    return value, [tensor.unique().numel() for tensor in kept]


def test_an_updater_may_keep_a_stored_tensor():
    results = ranks.run(keep_stored, 2)
    assert [value for value, _ in results] == [[6.0]] * 2
    assert sorted(kept for _, kept in results) == [[], [1, 1, 1]]


def one_rank(rank, type):
    kv = torchkv.create(type)
    kv.init("w", torch.zeros(SIZE))
    kv.push("w", torch.ones(SIZE))
    kv.close()
    return mappings()


@pytest.mark.parametrize("type", ["dist_sync", "dist_async"])
def test_a_job_of_one_rank_shares_nothing(type):
    assert ranks.run(one_rank, 1, type) == [[]]
