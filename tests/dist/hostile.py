"""A job of two ranks that train while a stranger attacks their sockets.

    python tests/dist/hostile.py --frames 100000

The stranger sends random, truncated, bit-flipped, recorded and replayed frames and
connections, 200 a second, with pauses for comparison, over

* ipc: to the ranks' sockets in their folder, as the same user;
* none: over tcp, from a third host that sees what the ranks send (security="none");
* curve: the same with security="curve";
* insider: as "none", with flips in what the token protects: whoever reads the token may
  change values, but must not crash a rank.

Everywhere but in the last, the weights must be as computed, the ranks' memory bounded
and a step at most twice as long as without the stranger.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import functools
import os
import signal
import socket
import stat
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from random import Random
from typing import Any

import torch

import ranks
import strangers
import torchkv
import usage

MODES = ("ipc", "none", "curve", "insider")
SECRET = "0123456789abcdef0123456789abcdef"
SIZES = {"a": (2, 3), "b": (20_000,), "c": (300,)}  # b is split over both servers
STEP_S = 0.005  # between steps
PAUSE_S = 0.6
ATTACK_S = 1.0
MAX_GROWTH = 48 << 20  # bytes of memory of a rank
MAX_FILES = 600  # open ones of a rank
MAX_SLOWER = 2.0


def gradient(step: int, rank: int) -> int:
    return (step * 7 + rank * 3) % 11 - 5


def train(rank: int, security: str | None, stop: str, tolerant: bool) -> dict[str, Any]:
    """Steps until the file `stop` exists; checks every weight after every step."""
    torch.set_num_threads(1)
    options = {"security": security} if security else {}
    kv = torchkv.create("dist_sync", timeout=10 if tolerant else 60, **options)
    keys = [*SIZES, "stop"]
    out = [torch.zeros(size) for size in SIZES.values()] + [torch.zeros(1)]
    kv.init(keys, out)
    kv.set_optimizer("sgd", learning_rate=1.0)
    expected = 0
    times, memory, files = array.array("d"), array.array("d"), 0
    try:
        for step in range(1 << 40):
            number = gradient(step, rank)
            stopping = float(rank == 0 and os.path.exists(stop))
            values = [torch.full(size, float(number)) for size in SIZES.values()]
            start = time.monotonic()
            kv.pushpull(keys, [*values, torch.full((1,), stopping)], out=out)
            times.extend((start, time.monotonic()))
            expected -= gradient(step, 0) + gradient(step, 1)
            for key, value in zip(SIZES, out, strict=False):
                assert value.eq(expected).all(), (step, key, value, expected)
            if step % 100 == 0:
                memory.extend((time.monotonic(), usage.resident_bytes()))
                files = max(files, usage.num_files())
            if out[-1].item() != 0:
                break
            time.sleep(STEP_S)
        kv.barrier()
        for key, size in SIZES.items():
            assert torch.equal(kv.pull(key), torch.full(size, float(expected)))
        kv.close()
    except Exception as error:
        if not tolerant:
            raise
        return {"error": f"{type(error).__name__}: {error}"}
    memory.extend((time.monotonic(), usage.resident_bytes()))
    return {"times": times, "memory": memory, "files": files}


@dataclass
class Report:
    """What the stranger did, and what the ranks saw of it."""

    mode: str
    sent: int
    refused: int
    num_steps: int = 0
    latencies: tuple[float, float] = (0.0, 0.0)  # with and without the stranger
    growth: int = 0
    files: int = 0
    errors: list[str] = field(default_factory=list)  # of the ranks, as insiders cause

    @property
    def slower(self) -> float:
        return self.latencies[0] / self.latencies[1]

    def __str__(self) -> str:
        text = f"{self.mode}: {self.sent} frames and connections"
        text += f" ({self.refused} cut off); {self.num_steps} steps"
        if self.errors:
            return f"{text}; the ranks ended with {self.errors}"
        if self.mode == "insider":
            return f"{text}; no rank crashed"
        loud, quiet = (1e3 * seconds for seconds in self.latencies)
        return (
            f"{text}, all exact; median of a step {loud:.2f} ms, without the stranger"
            f" {quiet:.2f} ms ({self.slower:.2f} x); memory grew by"
            f" {self.growth / 1e6:.1f} MB; at most {self.files} files"
        )


def slowness(report: Report) -> list[str]:
    """Steps that the stranger delays; only a machine without other load can tell."""
    if report.mode == "insider" or report.slower <= MAX_SLOWER:
        return []
    return [f"a step takes {report.slower:.2f} times as long"]


def problems(report: Report) -> list[str]:
    """What is not as it must be, whatever else the machine does."""
    if report.mode == "insider":
        return []
    found = []
    if report.growth > MAX_GROWTH:
        found.append(f"the memory grew by {report.growth} bytes")
    if report.files > MAX_FILES:
        found.append(f"a rank had {report.files} open files")
    return found


def stranger(connection: Connection, host: str | None, options: dict[str, Any]) -> None:
    """A process: sends as many frames as it is told."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if host is not None:
        ranks.enter_host(host)
    attacker = strangers.Stranger(**options)
    with contextlib.suppress(EOFError):
        while True:
            count = connection.recv()
            connection.send(attacker.attack(count))


@contextlib.contextmanager
def start_stranger(host: str | None, options: dict[str, Any]):
    ours, theirs = ranks._context.Pipe()
    process = ranks._context.Process(
        target=stranger, args=(theirs, host, options), daemon=True
    )
    process.start()
    theirs.close()

    def attack(count: int) -> tuple[int, int]:
        ours.send(count)
        return ours.recv()

    try:
        yield attack
    finally:
        ours.close()
        process.join(10)
        process.kill()
        process.join()


def addresses(job: ranks.Ranks, num_ranks: int) -> list[list[str]]:
    """The lines that each rank tells the others: host, ipc, tcp, pid, start."""
    return [
        job.store.get(f"torchkv/test/0/address/{rank}/0").decode().split("\n")
        for rank in range(num_ranks)
    ]


def check_folder(endpoint: str) -> str:
    """That only this user can connect; says what was checked."""
    path = endpoint.removeprefix("ipc://")
    status = os.stat(os.path.dirname(path))
    assert stat.S_IMODE(status.st_mode) == 0o700, oct(status.st_mode)
    assert status.st_uid == os.geteuid()
    if os.geteuid() != 0:
        return "mode 0700; other users not tried: not root"
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            with socket.socket(socket.AF_UNIX) as other:
                try:
                    other.connect(path)
                except PermissionError:
                    code = 0
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0, "another user has reached the socket"
    return "mode 0700; another user cannot connect"


def attack_job(mode: str, frames: int, seed: int = 0) -> Report:
    """RankFailed if a rank dies or sees a wrong weight."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        hosts = None if mode == "ipc" else stack.enter_context(ranks.Hosts(2))
        security = {"none": "none", "insider": "none", "curve": "curve"}.get(mode)
        stop = os.path.join(folder, "stop")
        recording = None
        if hosts is not None:
            recording = hosts.call(hosts.ROUTER, functools.partial(record, "to0"))
        job = stack.enter_context(
            ranks.Ranks(
                *(train, 2, security, stop, mode == "insider"),
                hosts=hosts,
                environment={"TORCHKV_JOB_SECRET": SECRET, "OMP_NUM_THREADS": "1"},
            )
        )
        lines = addresses(job, 2)
        options: dict[str, Any] = {"mode": mode, "seed": seed}
        options["targets"] = [each[1 if hosts is None else 2] for each in lines]
        options["token"] = job.store.get("torchkv/test/0/token")
        if mode == "ipc":
            print(f"ipc folder: {check_folder(options['targets'][0])}", flush=True)
        time.sleep(1.0)
        if recording is not None:
            options["streams"] = recording()
            assert options["streams"], "nothing was recorded"
        router = None if hosts is None else hosts.path(hosts.ROUTER)
        attack = stack.enter_context(start_stranger(router, options))
        attack(0)  # it has started
        return run_phases(mode, frames, job, attack, stop)


def record(device: str) -> Callable[[], list[bytes]]:
    """Records from now until the function that is returned is called."""
    recorder = strangers.Recorder(device)
    return recorder.streams


def run_phases(
    mode: str,
    frames: int,
    job: ranks.Ranks,
    attack: Callable[[int], tuple[int, int]],
    stop: str,
) -> Report:
    loud: list[tuple[float, float]] = []
    report = Report(mode, 0, 0)
    while report.sent < frames:
        time.sleep(PAUSE_S)
        count = min(int(ATTACK_S * strangers.RATE), frames - report.sent)
        start = time.monotonic()
        sent, refused = attack(count)
        loud.append((start, time.monotonic()))
        report.sent += sent
        report.refused += refused
        job.check()
    time.sleep(PAUSE_S / 2)
    open(stop, "w").close()
    results = job.join()
    if errors := [result["error"] for result in results if "error" in result]:
        report.errors = errors
        return report
    evaluate(report, results, loud)
    return report


def evaluate(
    report: Report, results: list[dict[str, Any]], loud: list[tuple[float, float]]
) -> None:
    with_stranger, without = [], []
    for result in results:
        times = result["times"]
        for start, end in zip(times[::2], times[1::2], strict=True):
            if any(first <= start and end <= last for first, last in loud):
                with_stranger.append(end - start)
            elif start > loud[0][0] - PAUSE_S and all(
                end < first or start > last for first, last in loud
            ):
                without.append(end - start)
        memory = result["memory"]
        samples = list(zip(memory[::2], memory[1::2], strict=True))
        before = max(size for at, size in samples if at < loud[0][0])
        report.growth = max(report.growth, int(samples[-1][1] - before))
        report.files = max(report.files, result["files"])
    report.num_steps = len(results[0]["times"]) // 2
    report.latencies = statistics.median(with_stranger), statistics.median(without)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--frames", type=int, default=100_000, help="in each mode")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--seed", type=int, default=Random().randrange(1 << 32))
    args = parser.parse_args()
    print(f"--seed {args.seed}", flush=True)
    failed = False
    for mode in args.modes:
        try:
            report = attack_job(mode, args.frames, args.seed)
            found = [*slowness(report), *problems(report)]
            print(report, flush=True)
        except ranks.NoHosts as error:
            print(f"{mode}: skipped, {error}", flush=True)
            continue
        except (ranks.RankFailed, AssertionError) as error:
            found = [str(error)]
        for problem in found:
            print(f"{mode}: FAILED: {problem}", flush=True)
        failed = failed or bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
