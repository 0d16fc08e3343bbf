"""What the other ranks see when one dies, stops or hangs."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import ranks
import torchkv

HEARTBEAT_S = 0.5


def full(value):
    return torch.full((2, 3), float(value))


def outcome(function):
    """What a call raises: its type's name and text, and the seconds it took."""
    start = time.monotonic()
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return None, "", time.monotonic() - start


def push_until_error(rank, type, victim, started):
    kv = torchkv.create(type, heartbeat=HEARTBEAT_S, timeout=30)
    kv.init(["a", "b", "c", "d"], [full(0)] * 4)
    kv.set_optimizer("sgd", learning_rate=1.0)
    out = [full(0) for _ in range(4)]
    kv.barrier()
    before = kv.num_dead_node()
    with open(f"{started}/{rank}", "w"):
        pass
    end = time.monotonic() + 30
    while time.monotonic() < end:
        failed = outcome(
            lambda: kv.pushpull(["a", "b", "c", "d"], [full(1)] * 4, out=out)
        )
        if failed[0]:
            num_dead = before, kv.num_dead_node()
            # Sticky in dist_sync.
            errors = outcome(kv.barrier)[0], outcome(lambda: kv.pull("a"))[0]
            return failed, *errors, num_dead
    return None


def wait_for(folder, num_ranks):
    end = time.monotonic() + 30
    while len(os.listdir(folder)) < num_ranks:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_an_error_on_all_others_in_dist_sync(tmp_path, number):
    with ranks.Ranks(push_until_error, 3, "dist_sync", 1, str(tmp_path)) as job:
        wait_for(tmp_path, 3)
        time.sleep(0.2)
        start = time.monotonic()
        job.kill(1, number)
        job.collect(ranks=[0, 2])
        elapsed = time.monotonic() - start
        for rank in (0, 2):
            ok, value = job.results[rank]
            assert ok, value
            (kind, text, _), barrier, pull, num_dead = value
            assert kind in ("WorkerLostError", "ServerLostError"), text
            assert "rank 1 is lost" in text
            assert barrier in ("WorkerLostError", "ServerLostError")
            assert pull in ("WorkerLostError", "ServerLostError")
            assert num_dead == (0, 1)
        # Four heartbeats, and the linger at the end of the ranks.
        assert elapsed < 4 * HEARTBEAT_S + 2 * HEARTBEAT_S + 2


def use_other_keys(rank, started, proceed):
    kv = torchkv.create("dist_async", heartbeat=HEARTBEAT_S, timeout=20)
    keys = list(range(16))
    kv.init(keys, [full(0)] * 16)
    kv.set_optimizer("sgd", learning_rate=1.0)
    kv.barrier()
    with open(f"{started}/{rank}", "w"):
        pass
    while not os.path.exists(proceed):
        time.sleep(0.01)
    if rank == 1:
        time.sleep(60)
    time.sleep(6 * HEARTBEAT_S)
    errors = [
        outcome(lambda key=key: kv.pushpull(key, full(1), full(0)))[:2] for key in keys
    ]
    return errors, kv.num_dead_node()


def test_dist_async_goes_on_for_keys_elsewhere(tmp_path):
    folder = tmp_path / "started"
    folder.mkdir()
    proceed = tmp_path / "proceed"
    with ranks.Ranks(use_other_keys, 3, str(folder), str(proceed)) as job:
        wait_for(folder, 3)
        job.kill(1)
        proceed.touch()
        job.collect(ranks=[0, 2])
        for rank in (0, 2):
            ok, result = job.results[rank]
            assert ok, result
            errors, num_dead = result
            assert num_dead == 1
            kinds = {kind for kind, _ in errors}
            assert kinds == {None, "ServerLostError"}
            for kind, text in errors:
                assert kind is None or "the server on rank 1 is lost" in text


def compress_for_lost_servers(rank, started, proceed):
    kv = torchkv.create("dist_async", heartbeat=HEARTBEAT_S, timeout=20)
    kv.init(list(range(3 * 16)), [full(0)] * 48)
    kv.set_optimizer("sgd", learning_rate=1.0)
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    keys = list(range(16 * rank, 16 * rank + 16))  # of this rank alone
    kv.push(keys, [full(0.375)] * 16)  # sends nothing
    kv.barrier()
    with open(f"{started}/{rank}", "w"):
        pass
    while not os.path.exists(proceed):
        time.sleep(0.01)
    if rank == 1:
        time.sleep(60)
    time.sleep(6 * HEARTBEAT_S)
    refused = outcome(lambda: kv.push(keys, [full(0.25)] * 16, async_op=True).wait())
    out = [full(9) for _ in keys]
    found = [
        outcome(lambda i=i: kv.pushpull(keys[i], full(0.125), out[i]))[0]
        for i in range(16)
    ]
    values = [value[0, 0].item() for value in out]
    return refused[:2], list(zip(found, values, strict=True))


def test_a_call_that_a_lost_server_refuses_leaves_the_residuals(tmp_path):
    folder = tmp_path / "started"
    folder.mkdir()
    proceed = tmp_path / "proceed"
    arguments = str(folder), str(proceed)
    with ranks.Ranks(compress_for_lost_servers, 3, *arguments) as job:
        wait_for(folder, 3)
        job.kill(1)
        proceed.touch()
        job.collect(ranks=[0, 2])
        for rank in (0, 2):
            ok, result = job.results[rank]
            assert ok, result
            refused, pushed = result
            assert refused[0] == "ServerLostError"
            # 0.375 + 0.125; of the refused call, nothing.
            assert set(pushed) == {("ServerLostError", 9.0), (None, -0.5)}


def hang(rank):
    with torchkv.create("dist_sync", name="both are here", timeout=60) as first:
        first.barrier()
    kv = torchkv.create("dist_sync", timeout=1.0)
    kv.init("w", full(0))
    result = None
    if rank == 0:
        result = outcome(lambda: kv.pushpull("w", full(1), full(0)))
    else:
        time.sleep(2.5)
    return result


def test_a_call_ends_by_its_timeout_and_names_who_is_missing():
    kind, text, elapsed = ranks.run(hang, 2)[0]
    assert kind == "StoreTimeoutError"
    assert "waited for rank 1" in text and "(key 'w', round 1)" in text
    assert "outcome is unknown" in text
    assert 0.9 < elapsed < 2
    assert issubclass(torchkv.StoreTimeoutError, TimeoutError)
    assert issubclass(torchkv.StoreTimeoutError, torchkv.RemoteError)
    assert issubclass(torchkv.RemoteError, RuntimeError)


def interrupted(rank, started):
    kv = torchkv.create("dist_sync")
    kv.init("w", full(0))
    if rank == 1:
        time.sleep(3)
        kv.push("w", full(1))
        kv.barrier()
        return None
    with open(f"{started}/{rank}", "w"):
        pass
    try:
        kv.pushpull("w", full(1), full(0))
    except KeyboardInterrupt:
        interrupted_at = time.time()
        kv.barrier()
        return interrupted_at


def test_ctrl_c_ends_a_waiting_call(tmp_path):
    with ranks.Ranks(interrupted, 2, str(tmp_path)) as job:
        wait_for(tmp_path, 1)
        time.sleep(0.5)
        sent = time.time()
        job.kill(0, signal.SIGINT)
        at, _ = job.join()
        assert at - sent < 1.0


def unequal(rank):
    kv = torchkv.create("dist_sync", heartbeat=HEARTBEAT_S)
    kv.init("w", full(0))
    if rank == 0:
        kv.push("w", full(1))
    return outcome(kv.barrier)[:2]


def test_a_forgotten_push_is_an_error_of_the_barrier():
    for kind, text in ranks.run(unequal, 2):
        assert kind == "RemoteError"
        assert "pushed the key less often" in text and "(key 'w')" in text


def other_shape(rank):
    kv = torchkv.create("dist_sync", heartbeat=HEARTBEAT_S)
    return outcome(lambda: kv.init("w", torch.zeros(3 + rank))), outcome(kv.barrier)


def test_other_shapes_are_an_error():
    for init, barrier in ranks.run(other_shape, 2):
        kind, text, _ = init if init[0] else barrier
        assert kind == "RemoteError"
        assert "rank 1" in text and "another shape or dtype" in text
        assert "(key 'w')" in text


def early_exit(rank, keys):
    kv = torchkv.create("dist_sync", heartbeat=HEARTBEAT_S)
    values = [full(1)] * len(keys)
    kv.init(keys, values)
    kv.pushpull(keys, values, out=[full(0) for _ in keys])
    kv.barrier()
    if rank == 1:
        kv.close()
        return None
    if rank == 2:
        time.sleep(1)  # rank 0 is the first to hear
    return outcome(lambda: kv.pushpull(keys, values, [full(0) for _ in keys]))[:2]


@pytest.mark.parametrize("num_keys", [1, 20])
def test_a_push_that_a_closed_rank_will_never_join_is_an_error(num_keys):
    keys = [f"k{number}" for number in range(num_keys)]
    first, _, last = ranks.run(early_exit, 3, keys)
    for kind, text in (first, last):
        assert kind == "RemoteError"
        assert "rank 1 has closed the store" in text
        assert "(key 'k" in text


def missing_environment(rank):
    del os.environ["WORLD_SIZE"]
    return outcome(lambda: torchkv.create("dist_sync"))[:2]


def test_without_a_launcher_the_missing_variable_is_named():
    kind, text = ranks.run(missing_environment, 1)[0]
    assert kind == "RuntimeError" and "WORLD_SIZE" in text and "torchrun" in text


def other_security(rank):
    options = {"security": "none"} if rank == 1 else {}
    first = outcome(lambda: torchkv.create("dist_sync", **options))
    kv = torchkv.create("dist_sync", security="curve")  # the default
    kv.barrier()
    kv.close()
    return first


def test_another_security_is_an_error_of_all_ranks_at_once():
    for kind, text, elapsed in ranks.run(other_security, 3):
        assert kind == "RuntimeError"
        assert text.endswith("but got 'curve' on ranks 0, 2 and 'none' on rank 1")
        assert elapsed < 10


def absent(rank):
    if rank == 1:
        time.sleep(3)
        return None
    return outcome(lambda: torchkv.create("dist_sync", timeout=1.0))[:2]


def test_a_rank_that_never_comes_is_named():
    kind, text = ranks.run(absent, 2)[0]
    assert kind == "StoreTimeoutError"
    assert "create: timed out after 1 s; waited for rank 1" in text


def init_again(rank):
    kv = torchkv.create("dist_sync", timeout=2)
    first = None
    if rank == 0:
        time.sleep(3)
    else:
        first = outcome(lambda: kv.init(["w", "v"], [full(5)] * 2))[0]
        assert kv.keys() == []
    while second := outcome(lambda: kv.init(["w", "v"], [full(1)] * 2))[0]:
        assert second == "StoreTimeoutError"
    kv.push("w", full(rank + 1))
    return first, kv.pull("w").tolist(), kv.pull("v").tolist()


def test_an_init_that_has_timed_out_may_be_repeated():
    results = ranks.run(init_again, 2)
    values = full(3).tolist(), full(1).tolist()
    assert results == [(None, *values), ("StoreTimeoutError", *values)]


def time_out_by_the_environment(rank):
    os.environ["TORCHKV_TIMEOUT"] = "a minute"
    wrong = outcome(lambda: torchkv.create("dist_sync"))
    os.environ["TORCHKV_TIMEOUT"] = "1.5"
    kv = torchkv.create("dist_sync")
    kv.init("w", full(0))
    if rank == 1:
        time.sleep(3)
        return wrong, None
    return wrong, outcome(lambda: kv.pushpull("w", full(1), full(0)))


def test_the_environment_has_the_timeout():
    results = ranks.run(time_out_by_the_environment, 2)
    for (kind, text, _), _ in results:
        assert kind == "ValueError" and "TORCHKV_TIMEOUT, but got 'a minute'" in text
    kind, text, elapsed = results[0][1]
    assert kind == "StoreTimeoutError" and "1.5 s" in text
    assert 1.4 < elapsed < 2.5


class Interrupted(Exception):
    pass


def interrupt(number, frame):
    raise Interrupted


def wait_behind_another_thread(rank, folder, call):
    kv = torchkv.create("dist_sync", timeout=4)
    kv.init("w", full(0))
    if rank == 1:
        ranks.meet(folder, "end", rank, 2)
        return None
    calls = {
        "barrier": kv.barrier,
        "save": lambda: kv.save(f"{folder}/store"),
        "state_dict": kv.state_dict,
    }
    failed = []
    thread = threading.Thread(target=lambda: failed.append(outcome(calls[call])))
    thread.start()
    time.sleep(0.5)
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    interrupted = outcome(calls[call])
    thread.join()
    ranks.meet(folder, "end", rank, 2)
    return interrupted, failed[0]


@pytest.mark.parametrize("call", ["barrier", "save", "state_dict"])
def test_a_call_behind_another_threads_is_interrupted(tmp_path, call):
    interrupted, failed = ranks.run(wait_behind_another_thread, 2, str(tmp_path), call)[
        0
    ]
    assert interrupted[0] == "Interrupted" and 0.4 < interrupted[2] < 1.5
    assert failed[0] == "StoreTimeoutError" and 3.5 < failed[2] < 8


HOST = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def stop(pid):
    """Stops a process, and returns when none of its threads runs any more.

    kill returns before: on busy processors, they answer for milliseconds yet.
    """

    def states():
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):  # a thread that has just ended
                yield stat.read_text().rpartition(")")[2].split()[0]

    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + 30
    while {*states()} != {"T"}:
        assert time.monotonic() < end
        time.sleep(0.001)


def use_a_stopped_rendezvous(rank, folder, pid, stops_before_create):
    signal.signal(signal.SIGALRM, interrupt)
    results = []
    if stops_before_create:
        stop(pid)
        results.append(outcome(lambda: torchkv.create("dist_sync", timeout=1.5)))
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        results.append(outcome(lambda: torchkv.create("dist_sync", timeout=30)))
        os.kill(pid, signal.SIGCONT)
        return results
    kv = torchkv.create("dist_sync", timeout=1.5)
    kv.init("w", full(0))
    stop(pid)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    results.append(outcome(lambda: kv.save(f"{folder}/store")))
    results.append(outcome(lambda: kv.save(f"{folder}/store")))
    kv.push("w", full(1))  # which does not need it
    assert kv.pull("w")[0, 0].item() == 1
    os.kill(pid, signal.SIGCONT)
    end = time.monotonic() + 10
    while outcome(lambda: kv.save(f"{folder}/store"))[0]:
        assert time.monotonic() < end
    return results


@pytest.mark.parametrize("stops_before_create", [True, False])
def test_calls_end_if_the_rendezvous_is_stopped(tmp_path, stops_before_create):
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", HOST], stdin=pipe, stdout=pipe, text=True
    ) as host:
        try:
            environment = {"MASTER_PORT": host.stdout.readline().strip()}
            (results,) = ranks.run(
                use_a_stopped_rendezvous,
                1,
                str(tmp_path),
                host.pid,
                stops_before_create,
                environment=environment,
            )
        finally:
            host.kill()
    if stops_before_create:
        results.reverse()
    interrupted, timed_out = results
    assert interrupted[0] == "Interrupted" and 0.4 < interrupted[2] < 1.2
    assert timed_out[0] == "StoreTimeoutError" and timed_out[2] < 4
