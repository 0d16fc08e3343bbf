"""How long the servers keep Python updaters, and which pushes an assignment changes."""

import ctypes
import gc
import threading
import time
import weakref

import pytest
import torch

import ranks
import torchkv
from ranks import outcome


class Add:
    """An updater that holds its store."""

    def __init__(self, kv):
        self.kv = kv

    def __call__(self, key, input, stored):
        stored += input


def is_freed(reference, seconds=5):
    end = time.monotonic() + seconds
    while reference() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    return reference() is None


def replace_updaters(rank, type):
    kv = torchkv.create(type)
    keys = [f"k{i}" for i in range(8)]
    kv.init(keys, [torch.zeros(2)] * 8)
    freed = []
    for after in (Add(kv), None, "sgd"):
        updater = Add(kv)
        reference = weakref.ref(updater)
        kv.set_updater(updater)
        kv.barrier()
        kv.push(keys, [torch.ones(2)] * 8)
        kv.barrier()
        del updater
        if after == "sgd":
            kv.set_optimizer("sgd", learning_rate=1.0)
        else:
            kv.set_updater(after)
        kv.barrier()
        kv.barrier()
        freed.append(is_freed(reference))
    return freed


@pytest.mark.parametrize("type", ["dist_sync", "dist_async"])
def test_a_replaced_updater_is_freed(type):
    assert ranks.run(replace_updaters, 2, type) == [[True] * 3] * 2


def close_with_updater(rank, folder):
    kv = torchkv.create("dist_sync")
    kv.init("w", torch.zeros(2))
    updater = Add(kv)
    references = weakref.ref(updater), weakref.ref(kv)
    kv.set_updater(updater)
    del updater
    kv.push("w", torch.ones(2))
    value = kv.pull("w")[0].item()
    # While another rank may push, its server needs it.
    ranks.meet(folder, "pulled", rank, 2)
    if rank == 1:
        kv.push("w", torch.ones(2))
        time.sleep(0.5)
    else:
        kv.push("w", torch.ones(2))
    kv.close()
    del kv
    return value, [is_freed(reference) for reference in references]


def test_a_closed_store_frees_its_updater(tmp_path):
    results = ranks.run(close_with_updater, 2, str(tmp_path))
    assert results == [(2.0, [True, True])] * 2


def hold_the_gil(rank, folder):
    """Frees a store with a Python updater while the GIL is held for long."""
    kv = torchkv.create("dist_sync", heartbeat=0.25, name="trains")
    other = torchkv.create("dist_sync", heartbeat=0.25, name="ends")
    for store in (kv, other):
        store.init("w", torch.zeros(2))
    other.set_updater(lambda key, input, stored: stored.add_(input))
    other.push("w", torch.ones(2))
    other.barrier()
    other.close()
    del other
    gc.collect()
    ranks.meet(folder, "closed", rank, 2)
    if rank == 0:
        ctypes.PyDLL(None).usleep(3_000_000)
    kv.push("w", torch.ones(2))
    return kv.pull("w")[0].item(), kv.num_dead_node()


def test_heartbeats_do_not_wait_for_the_gil(tmp_path):
    assert ranks.run(hold_the_gil, 2, str(tmp_path)) == [(2.0, 0)] * 2


def assign_beside_pushes(rank, type):
    kv = torchkv.create(type)
    pushed = [f"p{i}" for i in range(4)]
    kv.init(["a", *pushed], [torch.zeros(3)] * 5)
    kv.set_optimizer("sgd", learning_rate=1.0)
    kv.barrier()
    counts = []

    def push():
        count = 0
        while not stop.is_set() or count < 50:
            kv.push(pushed[count % 4], -torch.ones(3))
            count += 1
            time.sleep(0.0005)
        counts.append(count)

    stop = threading.Event()
    thread = threading.Thread(target=push)
    if type == "dist_async":  # in dist_sync, all ranks would have to push equally often
        thread.start()
    values = []
    for i in range(20):
        if type == "dist_sync":
            kv.push(pushed, [-torch.ones(3)] * 4)
        kv.assign("a", torch.full((3,), float(i + 10 * rank)))
        values.append(kv.pull("a")[0].item())
        kv.barrier()  # before the next rank assigns
    stop.set()
    if type == "dist_async":
        thread.join()
    kv.barrier()
    total = sum(kv.pull(key)[0].item() for key in pushed)
    kv.barrier()
    return values, total, sum(counts)


@pytest.mark.parametrize("type", ["dist_sync", "dist_async"])
def test_assign_replaces_no_other_keys(type):
    results = ranks.run(assign_beside_pushes, 2, type)
    pushes = 160 if type == "dist_sync" else sum(count for *_, count in results)
    for values, total, _ in results:
        assert values == [float(i) for i in range(20)]
        assert total == pushes


def fail_for_each_key(rank):
    kv = torchkv.create("dist_sync")
    keys = list(range(161))
    kv.init(keys, [torch.zeros(2)] * 161)

    def fail(key, input, stored):
        raise ValueError(f"no {key}")

    kv.set_updater(fail)
    for key in keys:
        kv.push(key, torch.ones(2))
    errors = []
    for key in reversed(keys):
        try:
            kv.pull(key)
        except torchkv.RemoteError as error:
            errors.append(f"ValueError: no {key}" in str(error))
    kv.barrier()  # each error is raised once
    return errors


def test_each_key_has_its_own_error():
    assert ranks.run(fail_for_each_key, 2) == [[True] * 161] * 2


def first_pushes(rank, script, is_set_first):
    wrong = []
    for number in range(20):
        kv = torchkv.create("dist_async", name=f"store {number}")
        calls = [lambda kv=kv: kv.init("w", torch.full((3,), 5.0))]
        if script:
            calls.append(lambda kv=kv: kv.set_updater(subtract))
        else:
            calls.append(lambda kv=kv: kv.set_optimizer(torchkv.optim.SGD(lr=1.0)))
        for call in reversed(calls) if is_set_first else calls:
            call()
        kv.push("w", torch.full((3,), 0.5))
        kv.barrier()
        wrong += [value for value in kv.pull("w").tolist() if value != 4.0]
        kv.barrier()
        kv.close()
    return wrong


@torch.jit.script
def subtract(key: str, grad: torch.Tensor, weight: torch.Tensor) -> None:
    weight.sub_(grad)


@pytest.mark.parametrize("is_set_first", [False, True])
@pytest.mark.parametrize("script", [False, True])
def test_pushes_of_dist_async_have_the_updater_that_was_set_before(
    script, is_set_first
):
    """Also those of other ranks than the one whose word counts."""
    assert ranks.run(first_pushes, 2, script, is_set_first) == [[], []]


class Large(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("numbers", torch.zeros(3_000_000))

    def forward(self, key: str, grad: torch.Tensor, weight: torch.Tensor) -> None:
        weight.sub_(grad)


def set_large(rank):
    with torchkv.create("dist_sync", timeout=20) as kv:
        kv.init("w", torch.ones(3))
        error = outcome(lambda: kv.set_updater(torch.jit.script(Large())))
        return error, outcome(kv.barrier)


def test_an_updater_that_does_not_fit_a_message_is_refused():
    """By rank 0, which sends it; the others learn of it at the barrier."""
    (refused, _), (accepted, at_barrier) = ranks.run(set_large, 2)
    assert refused[0] == "ValueError"
    assert "expected an updater of at most" in refused[1]
    assert accepted is None
    assert at_barrier[0] == "ValueError"
    assert "rank 1 has set some that rank 0 has not" in at_barrier[1]
