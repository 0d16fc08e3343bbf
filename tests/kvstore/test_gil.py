"""A TorchScript updater runs with the GIL released; proved by order, not by time.

The main thread never releases the GIL while it looks (the switch interval is made
huge), so whatever progress it sees was made by threads that do not hold it.
"""

import sys
import threading
import time

import pytest
import torch

from helpers import script

THREADS, KEYS = 4, 50
LIMIT_S = 30.0


class Gated(torch.nn.Module):
    """Counts its calls; the calls wait until the gate is opened."""

    def __init__(self, gate, count):
        super().__init__()
        self.register_buffer("gate", gate)
        self.register_buffer("count", count)

    def forward(self, key: int, input: torch.Tensor, stored: torch.Tensor) -> None:
        spins = 0
        while int(self.gate) == 0:
            spins += 1
            assert spins < 5000000, "the gate stayed shut"
        stored.add_(input)
        self.count.add_(1)


@pytest.fixture
def gil_is_kept():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10000.0)
    yield
    sys.setswitchinterval(interval)


def start_pushing(kv):
    """Starts threads that push all keys; returns when all of them are inside push."""
    entered = threading.Semaphore(0)
    errors = []
    keys = list(range(KEYS))
    values = [torch.ones(8) for _ in keys]

    def body():
        try:
            entered.release()
            kv.push(keys, values)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for _ in threads:
        entered.acquire()
    return threads, errors


def finish(threads, errors):
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    assert not errors, errors


def watch(count, until, limit_s):
    """Holds the GIL until `count` gets to `until` or time is up; the last count."""
    end = time.monotonic() + limit_s
    while count[0] < until and time.monotonic() < end:
        pass
    return int(count[0])


def test_threads_push_while_the_main_thread_holds_the_gil(kv, gil_is_kept):
    gate, count = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    # Reading and writing through numpy never gives the GIL away.
    open_gate, seen = gate.numpy(), count.numpy()
    kv.init(list(range(KEYS)), [torch.zeros(8) for _ in range(KEYS)])
    kv.set_updater(script(Gated(gate, count)))
    threads, errors = start_pushing(kv)

    before = int(seen[0])
    open_gate[0] = 1
    after = watch(seen, THREADS * KEYS, LIMIT_S)

    finish(threads, errors)
    assert before == 0
    assert after == THREADS * KEYS
    assert all((kv.pull(key) == THREADS).all() for key in range(KEYS))


def test_a_python_updater_makes_no_progress_meanwhile(kv, gil_is_kept):
    count = torch.zeros(1, dtype=torch.int64)
    seen = count.numpy()
    gate = threading.Event()

    def update(key, input, stored):
        gate.wait()
        stored += input
        seen[0] += 1

    kv.init(list(range(KEYS)), [torch.zeros(8) for _ in range(KEYS)])
    kv.set_updater(update)
    threads, errors = start_pushing(kv)

    before = int(seen[0])
    gate.set()
    after = watch(seen, 1, 0.3)

    finish(threads, errors)
    assert before == 0
    assert after == 0, "the main thread did hold the GIL while it looked"
    assert seen[0] == THREADS * KEYS


@pytest.mark.parametrize("updater", [None, "script"])
def test_no_gil_is_needed_between_the_keys_of_a_call(kv, updater, gil_is_kept):
    """A pull and an ASSIGN of many keys proceed as well."""
    gate, count = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    if updater:
        kv.set_updater(script(Gated(gate, count)))
    keys = list(range(KEYS))
    kv.init(keys, [torch.zeros(1 << 16) for _ in keys])
    values = [torch.full((1 << 16,), 7.0) for _ in keys]
    outs = [torch.zeros(1 << 16) for _ in keys]
    last = outs[-1].numpy()
    entered = threading.Semaphore(0)

    def body():
        entered.release()
        kv.pushpull(keys, values, out=outs)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    entered.acquire()
    watch_end = time.monotonic() + LIMIT_S
    while last[-1] != 7.0 and time.monotonic() < watch_end:
        pass
    seen = float(last[-1])
    finish([thread], [])
    assert seen == 7.0
