"""delete calls that end with a time-out or a signal."""

import signal
import time

import torch

import ranks
import torchkv
from ranks import outcome


def full(value):
    return torch.full((3,), float(value))


class Interrupted(Exception):
    pass


def interrupt(number, frame):
    raise Interrupted


def delete_too_late(rank):
    kv = torchkv.create("dist_sync", timeout=1.5)
    kv.init(["w", "v"], [full(0)] * 2)
    seen = None
    if rank == 0:
        kv.push("w", full(1))
        time.sleep(0.7)  # the push times out before the delete does
        timed_out = outcome(lambda: kv.delete("w"))
        seen = timed_out, kv.keys(), outcome(lambda: kv.pull("w"))
    else:
        time.sleep(3)
        kv.push("w", full(2))
        kv.delete("w")
    while (again := outcome(lambda: kv.init("w", full(5)))) is not None:
        assert again[0] == "StoreTimeoutError"
    if rank == 0:
        assert outcome(lambda: kv.pull("w"))[0] == "StoreTimeoutError"  # of the push
    kv.pushpull("w", full(rank), out := torch.empty(3))
    kv.barrier()
    return seen, out.tolist()


def test_a_delete_that_has_timed_out_is_done_all_the_same():
    results = ranks.run(delete_too_late, 2)
    assert [out for _, out in results] == [full(1).tolist()] * 2
    timed_out, keys, pulled = results[0][0]
    assert timed_out[0] == "StoreTimeoutError"
    assert timed_out[1].startswith("delete: timed out") and "rank 1" in timed_out[1]
    assert keys == ["v"]
    assert pulled[0] == "KeyError"


def interrupt_delete(rank, folder):
    kv = torchkv.create("dist_sync")
    kv.init("w", full(0))
    interrupted = None
    if rank == 0:
        kv.push("w", full(1))
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        interrupted = outcome(lambda: kv.delete("w"))[0]
    ranks.meet(folder, "interrupted", rank, 2)
    if rank == 1:
        kv.push("w", full(2))
    pulled = kv.pull("w").tolist()
    kv.delete("w")
    kv.init("w", full(4))
    return interrupted, pulled, kv.pull("w").tolist()


def test_an_interrupted_delete_that_waits_for_pushes_is_not_done(tmp_path):
    results = ranks.run(interrupt_delete, 2, str(tmp_path))
    values = full(3).tolist(), full(4).tolist()
    assert results == [("Interrupted", *values), (None, *values)]
