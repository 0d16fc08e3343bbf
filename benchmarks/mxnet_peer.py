"""MXNet as a contestant: worker processes in its own environment, idle between turns.

MXNet's speed depends on its engine's threads and on the store's type. Every
combination is tried on a case, and the fastest represents MXNet. If NaiveEngine, which
MXNet documents as a tool for debugging, is faster still, it is timed as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from harness import Contestant, Plan, measure

NAME = "MXNet"
NAIVE = "MXNet, NaiveEngine"

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv" / "mxnet-1.9.1" / "bin" / "python"
WORKER = Path(__file__).parent / "peers" / "mxnet_worker.py"

# OpenMP's threads spin for up to 15 ms after their work and then sleep; waking them
# takes some milliseconds on virtual machines. So each side waits until the other's
# threads sleep, and wakes its own.
SETTLE_S = 0.03
WAKE_S = 0.01
TRIALS = 3
TRIAL_S = 0.02


def engines(threads: int) -> dict[str, dict[str, str]]:
    """The environment variables of each configuration that may be the fastest."""
    many, one = str(threads), "1"
    return {
        # The calling thread does the work: fastest for small tensors.
        "NaiveEngine": {
            "MXNET_ENGINE_TYPE": "NaiveEngine",
            "OMP_NUM_THREADS": many,
            "MXNET_KVSTORE_REDUCTION_NTHREADS": many,
        },
        # MXNet's default: one operation at a time, with all threads.
        "default engine": {
            "OMP_NUM_THREADS": many,
            "MXNET_KVSTORE_REDUCTION_NTHREADS": many,
        },
        # As many operations at a time as threads.
        f"default engine, {threads} x 1 thread": {
            "MXNET_CPU_WORKER_NTHREADS": many,
            "MXNET_CPU_PRIORITY_NTHREADS": many,
            "OMP_NUM_THREADS": one,
            "MXNET_KVSTORE_REDUCTION_NTHREADS": many,
        },
    }


class Case(NamedTuple):
    """What to push and pull: replicas of one array per shape."""

    shapes: Sequence[tuple[int, ...]]
    dtype: str
    replicas: int
    outs: int  # per key; 0 to push only
    optimizer: dict[str, Any] | None = None  # its "name" and arguments
    # With an optimizer: how each key's weights, which were zero, begin after a step.
    first_step: Sequence[Sequence[float]] = ()
    # The parameters of 2bit, with a threshold of at most 1.
    compression: dict[str, Any] | None = None
    # Of the only key, a table: how many rows each replica has (pattern.row_ids).
    pushed: int | None = None


class Choice(NamedTuple):
    """One of MXNet's configurations for a case."""

    engine: str
    store: str
    way: str

    def __str__(self) -> str:
        """Its name in tables."""
        return f"{self.way}; {self.store}; {self.engine}"


class Worker:
    """A process that runs MXNet."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        """Starts it with these variables instead of all others that configure MXNet."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MXNET_", "OMP_", "PYTHON"))
        }
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            command,
            env={**kept, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def ask(self, do: str, **arguments: object) -> dict[str, Any]:
        """Sends a command and waits for its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(
                json.dumps({"do": do, **arguments}),
                file=self._process.stdin,
                flush=True,
            )
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace")
            raise RuntimeError(f"{do}: the MXNet worker ended\n{said}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{do}: the MXNet worker failed\n{answer['error']}")
        return answer

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()


class MXNet:
    """MXNet in all configurations; one at a time has a case prepared."""

    def __init__(self, workers: dict[str, Worker]) -> None:
        """Owns the workers, by their engine's name."""
        self._workers = workers
        try:
            versions = [worker.ask("versions") for worker in workers.values()]
        except BaseException:
            self.close()
            raise
        self.versions = versions[0]

    @classmethod
    def start(cls, python: Path, threads: int, smoke: bool = False) -> Self:
        """Starts a worker per configuration; for a smoke run, two."""
        environments = list(engines(threads).items())[: 2 if smoke else None]
        command = [str(python), str(WORKER)]
        return cls({name: Worker(command, env) for name, env in environments})

    def __enter__(self) -> Self:
        """The peer itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Ends all workers."""
        self.close()

    def close(self) -> None:
        """Ends all workers."""
        for worker in self._workers.values():
            worker.close()

    def try_all(self, case: Case) -> dict[Choice, float]:
        """The seconds per call of every configuration; frees the prepared case."""
        ways = ["push, pull", "pushpull"] if case.outs else ["push"]
        seconds: dict[Choice, float] = {}
        for engine, worker in self._workers.items():
            self.drop()
            worker.ask("prepare", **case._asdict())
            time.sleep(SETTLE_S)
            # Type local does not compress.
            for store in ("device",) if case.compression else ("local", "device"):
                for way in ways:
                    choice = Choice(engine, store, way)
                    seconds[choice] = self._try(choice)
        self.drop()
        return seconds

    def prepare(self, case: Case, choice: Choice) -> Contestant:
        """Makes the case's arrays in the chosen worker."""
        worker = self._workers[choice.engine]
        worker.ask("prepare", **case._asdict())

        def run(calls: int) -> float:
            time.sleep(SETTLE_S)
            seconds = self._run(choice, calls)
            time.sleep(SETTLE_S)
            wake_threads()
            return seconds

        return Contestant(
            run=run,
            agrees=lambda: bool(worker.ask("check", store=choice.store)["agrees"]),
        )

    def drop(self) -> None:
        """Frees the arrays of all workers."""
        for worker in self._workers.values():
            worker.ask("drop")

    def _run(self, choice: Choice, calls: int) -> float:
        answer = self._workers[choice.engine].ask(
            "run", store=choice.store, way=choice.way, calls=calls, wake_s=WAKE_S
        )
        return float(answer["seconds"])

    def _try(self, choice: Choice) -> float:
        self._run(choice, 1)
        calls = max(1, int(TRIAL_S / self._run(choice, 1)))
        return min(self._run(choice, calls) / calls for _ in range(TRIALS))


def fastest(trials: Mapping[Choice, float], engine: str = "") -> Choice:
    """The fastest of the choices whose engine's name has this prefix."""
    fitting = [choice for choice in trials if choice.engine.startswith(engine)]
    return min(fitting, key=trials.__getitem__)


def wake_threads() -> None:
    """Gives torch's threads work until they are awake."""
    a = torch.ones(1 << 18)
    b = torch.empty_like(a)
    end = time.perf_counter() + WAKE_S
    while time.perf_counter() < end:
        torch.add(a, a, out=b)


def measure_beside(
    mxnet: MXNet | None,
    case: Case,
    contestants: Mapping[str, Contestant],
    plan: Plan,
) -> dict[str, Any]:
    """Times contestants and, if available, MXNet's fastest configuration, interleaved.

    A faster NaiveEngine is timed separately.
    """
    choices: dict[str, Choice] = {}
    trials: dict[Choice, float] = {}
    peers: dict[str, Contestant] = {}
    if mxnet is not None:
        trials = mxnet.try_all(case)
        choices = {NAME: fastest(trials, "default"), NAIVE: fastest(trials)}
        if choices[NAME] == choices[NAIVE]:
            del choices[NAIVE]
        peers = {name: mxnet.prepare(case, choice) for name, choice in choices.items()}
    times = measure({**contestants, **peers}, plan)
    if mxnet is not None:
        mxnet.drop()
    return {
        "seconds": times,
        "mxnet": {name: str(choice) for name, choice in choices.items()},
        "mxnet_trials": {str(choice): seconds for choice, seconds in trials.items()},
    }
