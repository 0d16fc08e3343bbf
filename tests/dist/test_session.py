"""Stores of several processes are created, matched, closed, copied and forked."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import ranks
import torchkv
from ranks import outcome


def full(value):
    return torch.full((2, 3), float(value))


def create(type="dist_sync", **options):
    return torchkv.create(type, **options)


def several_stores(rank):
    first, second = create(name="a"), create("dist_async", name="b")
    if rank == 1:
        pair = [create(name="d"), create(name="c")][::-1]
    else:
        pair = [create(name="c"), create(name="d")]
    values = []
    for i, kv in enumerate([first, second, *pair]):
        kv.init("w", full(i))
        values.append(kv.pull("w")[0, 0].item())
    for kv in [first, second, *pair]:
        kv.close()
    return values


def test_stores_match_by_type_and_name():
    assert ranks.run(several_stores, 2) == [[0.0, 1.0, 2.0, 3.0]] * 2


def again_and_again(rank):
    values = []
    for i in range(8):
        kv = create()
        kv.init("w", full(i))
        kv.push("w", full(i))
        values.append(kv.pull("w")[0, 0].item())
        if i % 2:
            kv.close()
    return values


def test_stores_are_created_and_closed_repeatedly():
    assert ranks.run(again_and_again, 2) == [[2.0 * i for i in range(8)]] * 2


def without_close(rank):
    kv = create()
    kv.init("w", torch.zeros(100_000))
    kv.push("w", torch.ones(100_000))
    return kv.pull("w")[0].item()


def forked_child(rank):
    kv = create()
    kv.init("w", full(1))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        text = " ".join(
            str(outcome(call))
            for call in (
                lambda: kv.pull("w"),
                lambda: kv.barrier(),
                lambda: torchkv.create("dist_sync"),
            )
        )
        os.write(write, text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    kv.barrier()
    text = os.read(read, 10_000).decode()
    kv.close()
    return text


def test_a_forked_child_cannot_use_the_store():
    for text in ranks.run(forked_child, 2):
        assert text.count("RuntimeError") == 3
        assert "forked" in text


def refused_copies(rank):
    import copy
    import pickle

    kv = create()
    kv.init("w", full(1))
    results = [outcome(lambda: copy.deepcopy(kv)), outcome(lambda: pickle.dumps(kv))]
    kv.close()
    return results


def test_copies_are_refused_with_a_hint():
    for results in ranks.run(refused_copies, 2):
        for kind, text in results:
            assert kind == "NotImplementedError"
            assert "save" in text


def test_a_store_need_not_be_closed():
    assert ranks.run(without_close, 2) == [2.0, 2.0]


STUCK = """
import gc, signal, time
import torch, torchkv
signal.signal(signal.SIGINT, signal.default_int_handler)
store = torch.distributed.HashStore()
kv = torchkv.create("dist_sync", rank=0, world_size=1, store=store)
kv.init("w", torch.zeros(2))
def update(key, input, stored):
    print("updating", flush=True)
    time.sleep(1000)
kv.set_updater(update)
kv.push("w", torch.ones(2))
if FREES:
    del kv, update
    gc.collect()
"""


@pytest.mark.parametrize("frees", [False, True])
def test_ctrl_c_ends_a_process_whose_updater_does_not_return(frees):
    program = subprocess.Popen(
        [sys.executable, "-c", STUCK.replace("FREES", str(frees))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with program:
        assert program.stdout.readline() == "updating\n"
        time.sleep(1)  # until it waits in its exit
        program.send_signal(signal.SIGINT)
        try:
            program.wait(20)
        finally:
            program.kill()


def late(rank):
    if rank == 1:
        time.sleep(2)
        first = None
    else:
        first = outcome(lambda: create(timeout=1.0))[0]
    kv = create()
    kv.init("w", full(1))
    value = kv.pull("w")[0, 0].item()
    kv.close()
    return first, value


def test_create_may_be_repeated_after_a_time_out():
    assert ranks.run(late, 2) == [("StoreTimeoutError", 1.0), (None, 1.0)]


def other_security(rank):
    kv = create()
    result = outcome(lambda: create(security="none", name="other"))
    kv.close()
    return result


def test_stores_of_a_process_have_one_security():
    for kind, text in ranks.run(other_security, 2):
        assert kind == "ValueError"
        assert "create: expected the security of this process's earlier stores" in text


def create_after_errors(rank):
    if rank == 1:
        with pytest.raises(ValueError, match="heartbeat"):
            torchkv.create("dist_sync", heartbeat=-1)
        with pytest.raises(ValueError, match="positive heartbeat of at most"):
            torchkv.create("dist_sync", heartbeat=1e12)
        with pytest.raises(ValueError, match="positive timeout of at most"):
            torchkv.create("dist_sync", timeout=1e12)
        with pytest.raises(ValueError, match="snapshot_dir"):
            torchkv.create("dist_async", snapshot_dir="x")
    results = []
    for type in ("dist_sync", "dist_async"):
        with torchkv.create(type, timeout=30) as kv:
            kv.init(3, torch.zeros(2))
            kv.push(3, torch.ones(2))
            kv.barrier()
            results.append(kv.pull(3).tolist())
            kv.barrier()
    return results


def test_a_refused_create_does_not_count():
    """Stores match by how many a rank has created."""
    assert ranks.run(create_after_errors, 2) == [[[2.0, 2.0], [1.0, 1.0]]] * 2


def create_with_heartbeats(rank):
    try:
        with torchkv.create("dist_sync", heartbeat=1.0 + rank, timeout=10) as kv:
            kv.init(3, torch.zeros(2))
            kv.barrier()
    except torchkv.RemoteError as error:
        return str(error)
    return None


def test_ranks_with_different_heartbeats_are_refused():
    texts = ranks.run(create_with_heartbeats, 2)
    assert any("another type, heartbeat" in text for text in texts), texts
    assert None not in texts
