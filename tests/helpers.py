"""Shared helpers: comparison, scripting, threads, forks, allocations."""

import faulthandler
import io
import itertools
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

import torch

import torchkv

SHAPE = (2, 3)


def full(value, device="cpu", dtype=torch.float32):
    """A tensor of the contract's shape, filled with `value`."""
    return torch.full(SHAPE, value, dtype=dtype, device=device)


def bits(tensor):
    """(dtype, shape, bytes) of a tensor: equal exactly when all its bits are."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    plain = plain.clone(memory_format=torch.contiguous_format)
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return plain.dtype, tuple(plain.shape), raw


def assert_same(actual, expected, note=""):
    """Equality of dtype, shape and every bit."""
    assert bits(actual) == bits(expected), (
        f"{note}\nactual {actual.dtype} {actual}\nexpected {expected.dtype} {expected}"
    )


def snapshot(store):
    """Everything a store holds: its keys in order, with the bits of their values."""
    return [(key, bits(store.pull(key))) for key in store.keys()]


def stored(store, key):
    """The stored value of `key`, on the CPU."""
    return store.pull(key).cpu()


def _quiet_jit():
    # TorchScript is deprecated in torch; nothing else may be silenced here.
    warnings.filterwarnings("ignore", message=r"`torch\.jit\.\w+`")


def script(thing):
    """torch.jit.script without its deprecation warning."""
    with warnings.catch_warnings():
        _quiet_jit()
        return torch.jit.script(thing)


def jit_save_load(module):
    """The module after a round trip through torch.jit.save and torch.jit.load."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        _quiet_jit()
        torch.jit.save(module, buffer)
        buffer.seek(0)
        return torch.jit.load(buffer)


def torch_save_load(thing):
    """The thing after a round trip through torch.save and torch.load."""
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def run_threads(bodies, timeout_s=60.0):
    """Runs the callables at once; raises the first error, or fails on a deadlock."""
    errors = []
    start = threading.Barrier(len(bodies))

    def guarded(body):
        try:
            start.wait()
            body()
        except BaseException:
            errors.append(traceback.format_exc())

    threads = [
        threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback(file=sys.__stderr__)
        raise AssertionError(f"deadlock: threads still run after {timeout_s} s")
    assert not errors, errors[0]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def in_child(function, timeout_s=30):
    """The result of `function` in a forked child; fails when the child hangs."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(timeout_s + 5)
            try:
                answer = function()
            except BaseException:
                answer = traceback.format_exc()
            os.write(writer, pickle.dumps(answer))
        finally:
            os._exit(0)
    os.close(writer)
    try:
        ready, _, _ = select.select([reader], [], [], timeout_s)
        if not ready:
            os.kill(child, signal.SIGKILL)
        answer = os.read(reader, 1 << 16) if ready else b""
    finally:
        os.close(reader)
        os.waitpid(child, 0)
    assert ready, f"the forked child still hung after {timeout_s} s"
    assert answer, "the forked child died"
    return pickle.loads(answer)


def check_in_child(body, timeout_s=30):
    """Runs a test's body in a forked child: a crash or a hang is one failed test."""
    failure = in_child(lambda: (body(), None)[1], timeout_s)
    assert failure is None, failure


def outcome(call):
    try:
        call()
        return "no error"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def _allocations(function):
    """Bytes that torch's CPU allocator allocates (+) and frees (-), in order."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    events = [event for event in events if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())]


def allocated_bytes(function):
    """Bytes that torch's CPU allocator allocates while `function` runs."""
    return sum(size for size in _allocations(function) if size > 0)


def peak_bytes(function):
    """The peak of the bytes allocated while `function` runs."""
    return max(itertools.accumulate(_allocations(function)), default=0)


def add_input(key, input, stored):
    """The simplest Python updater: adds the pushed value."""
    stored += input


class Add(torch.nn.Module):
    """The simplest TorchScript updater."""

    def forward(self, key: int, input: torch.Tensor, stored: torch.Tensor) -> None:
        stored.add_(input)


class AddStr(torch.nn.Module):
    """The simplest TorchScript updater for str keys."""

    def forward(self, key: str, input: torch.Tensor, stored: torch.Tensor) -> None:
        stored.add_(input)


class Momentum(torch.nn.Module):
    """Momentum SGD whose state is a dict by key; exact on small integers."""

    momentum: dict[int, torch.Tensor]

    def __init__(self):
        super().__init__()
        self.momentum = {}

    def forward(self, key: int, input: torch.Tensor, stored: torch.Tensor) -> None:
        if key not in self.momentum:
            self.momentum[key] = torch.zeros_like(stored)
        self.momentum[key].mul_(2).add_(input)
        stored.sub_(self.momentum[key])


class MomentumStr(torch.nn.Module):
    """Momentum for str keys."""

    momentum: dict[str, torch.Tensor]

    def __init__(self):
        super().__init__()
        self.momentum = {}

    def forward(self, key: str, input: torch.Tensor, stored: torch.Tensor) -> None:
        if key not in self.momentum:
            self.momentum[key] = torch.zeros_like(stored)
        self.momentum[key].mul_(2).add_(input)
        stored.sub_(self.momentum[key])


class ScriptHolder(torch.nn.Module):
    """A module, to be scripted, that holds a store."""

    def __init__(self, kv):
        super().__init__()
        self.kv = kv.script_object

    def forward(self, x):
        return x


def scripted_add_twice():
    """`stored += input * 2` as a ScriptFunction."""

    def add_twice(key: int, input: torch.Tensor, stored: torch.Tensor):
        stored.add_(input * 2)

    return script(add_twice)


def run_program(path, *arguments, **options):
    """Runs a Python program with the torchkv under test."""
    root = str(Path(torchkv.__file__).parents[1])
    search = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(path), *arguments],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=False,
        **{"timeout": 280, **options},
    )
