"""Runs functions in several processes, as the ranks of a job.

`run(function, 2, ...)` returns what each rank's call returned, or raises with the
traceback of the rank that failed. A rank's first argument is its number.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
# Ranks are forked from a process that has imported these, which takes seconds.
_context.set_forkserver_preload(["torchkv", "ranks"])

TIMEOUT_S = 60.0


class RankFailed(AssertionError):
    """A rank raised; the message has its traceback."""


def _enter(
    rank: int,
    environment: dict[str, str],
    connection: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(environment)
    try:
        result = (True, function(rank, *args))
    except BaseException:
        result = (False, traceback.format_exc())
    # By value: torch's own pickler shares the memory of tensors with this process.
    connection.send_bytes(pickle.dumps(result))
    if not result[0]:
        sys.exit(1)


class Ranks:
    """Processes that run `function(rank, *args)`; they end with the context.

    The parent hosts the TCPStore, as torchrun does, so it survives every rank.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        num_ranks: int,
        *args: Any,
        environment: dict[str, str] | None = None,
        restart: int = 0,
    ) -> None:
        """Starts the ranks."""
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        self._processes = []
        self._connections = []
        self.results: dict[int, tuple[bool, Any]] = {}
        for rank in range(num_ranks):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RUN_ID": "test",
                "TORCHELASTIC_RESTART_COUNT": str(restart),
                **(environment or {}),
            }
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_enter, args=(rank, variables, theirs, function, args)
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        for connection in self._connections:
            connection.close()

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid(rank), number)

    def collect(
        self, timeout: float = TIMEOUT_S, ranks: list[int] | None = None
    ) -> None:
        """Waits until the ranks have returned or died; fills `results`."""
        end = time.monotonic() + timeout
        wanted = set(range(len(self._connections)) if ranks is None else ranks)
        while missing := {
            r: self._connections[r] for r in wanted - self.results.keys()
        }:
            ready = wait(missing.values(), max(0.0, end - time.monotonic()))
            if not ready:
                raise RankFailed(f"ranks {sorted(missing)} run after {timeout} s")
            for rank, connection in missing.items():
                if connection in ready:
                    try:
                        self.results[rank] = pickle.loads(connection.recv_bytes())
                    except EOFError:
                        self.results[rank] = (False, "the process has died")

    def join(self, timeout: float = TIMEOUT_S) -> list[Any]:
        """What the ranks returned; RankFailed if one of them raised or died."""
        self.collect(timeout)
        failed = [
            f"rank {rank}:\n{value}"
            for rank, (ok, value) in sorted(self.results.items())
            if not ok
        ]
        if failed:
            raise RankFailed("\n".join(failed))
        for rank, process in enumerate(self._processes):
            process.join(timeout)
            if process.exitcode != 0:
                raise RankFailed(f"rank {rank} ended with {process.exitcode}")
        return [self.results[rank][1] for rank in range(len(self._processes))]


def run(
    function: Callable[..., Any], num_ranks: int, *args: Any, **options: Any
) -> list[Any]:
    """Starts ranks and waits for what they return."""
    with Ranks(function, num_ranks, *args, **options) as ranks:
        return ranks.join()
