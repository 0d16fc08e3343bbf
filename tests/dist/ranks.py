"""Runs functions in several processes, as the ranks of a job.

`run(function, 2, ...)` returns what each rank's call returned, or raises with the
traceback of the rank that failed. A rank's first argument is its number. With
`hosts=Hosts(2)`, the ranks are on two hosts, in turn.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
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

num_killed = 0  # or ended without a result: these could not clean up


class RankFailed(AssertionError):
    """A rank raised; the message has its traceback."""


def outcome(function: Callable[[], Any]) -> Any:
    """What a call returns; or, if it raises, its error's type's name and text."""
    try:
        return function()
    except Exception as error:
        return type(error).__name__, str(error)


class NoHosts(Exception):
    """This user may not make hosts, or the tools are missing; the message says so."""


_libc = ctypes.CDLL(None, use_errno=True)
_NEW_NETWORK = 0x40000000
_NEW_MOUNTS = 0x00020000


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _move_to(namespace: str) -> None:
    """Puts this thread into a network."""
    file = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(file, _NEW_NETWORK), "setns")
    finally:
        os.close(file)


def _on_thread(function: Callable[[], Any]) -> Any:
    result: list[Any] = []

    def run() -> None:
        try:
            result.extend((True, function()))
        except BaseException as error:
            result.extend((False, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if not result[0]:
        raise result[1]
    return result[1]


class Hosts:
    """Hosts of one network, and a router between them: namespaces of Linux.

    They end with the context, and with the process. A rank on one takes those on the
    others for ranks of other machines. On the router is the ranks' TCPStore.
    """

    ROUTER = -1
    ADDRESS = "10.77.0.254"  # of the router

    def __init__(self, num_hosts: int) -> None:
        """Raises NoHosts where they cannot be made."""
        if shutil.which("ip") is None:
            raise NoHosts("no `ip`: apt install iproute2")
        self._files: list[int] = []
        try:
            self._files = [_on_thread(self._make) for _ in range(num_hosts + 1)]
            self.command(self.ROUTER, "ip", "link", "add", "hub", "type", "bridge")
            self._set_up(self.ROUTER, "hub", self.ADDRESS)
            for host in range(num_hosts):
                self.command(
                    *(self.ROUTER, "ip", "link", "add", f"to{host}", "type", "veth"),
                    *("peer", "name", "eth0", "netns", self.path(host)),
                )
                self.command(
                    self.ROUTER, "ip", "link", "set", f"to{host}", "master", "hub", "up"
                )
                self._set_up(host, "eth0", self.address(host))
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            raise NoHosts(
                f"cannot make networks: {getattr(error, 'stderr', None) or error}"
            ) from error

    @staticmethod
    def _make() -> int:
        _check(_libc.unshare(_NEW_NETWORK), "unshare")
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    def _set_up(self, host: int, device: str, address: str) -> None:
        self.command(host, "ip", "address", "add", f"{address}/24", "dev", device)
        self.command(host, "ip", "link", "set", device, "up")
        self.command(host, "ip", "link", "set", "lo", "up")

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []

    @property
    def num_hosts(self) -> int:
        return len(self._files) - 1

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def path(self, host: int) -> str:
        """Of the host's network, for all processes of the user."""
        return f"/proc/{os.getpid()}/fd/{self._files[host]}"

    def call(self, host: int, function: Callable[[], Any]) -> Any:
        """Calls a function on a thread on the host. Its sockets stay there."""

        def run() -> Any:
            _move_to(self.path(host))
            return function()

        return _on_thread(run)

    def command(self, host: int, *command: str) -> str:
        """Runs a program on the host."""
        run = functools.partial(
            subprocess.run, command, check=True, capture_output=True, text=True
        )
        return self.call(host, run).stdout

    def limit(self, host: int, rate: str) -> None:
        """The host's link in both directions, such as to "100mbit".

        Its queues are short, so that packets are lost where TCP sends faster. Raises
        NoHosts where the system has no such queues.
        """
        shape = ("root", "tbf", "rate", rate, "burst", "32kb", "latency", "5ms")
        for where, device in ((self.ROUTER, f"to{host}"), (host, "eth0")):
            try:
                self.command(where, "tc", "qdisc", "replace", "dev", device, *shape)
            except (OSError, subprocess.CalledProcessError) as error:
                raise NoHosts(
                    f"cannot limit links: {getattr(error, 'stderr', None) or error}"
                ) from error

    def num_lost(self, host: int) -> int:
        """Packets that the limited link has lost."""
        texts = [
            self.command(where, "tc", "-s", "qdisc", "show", "dev", device)
            for where, device in ((self.ROUTER, f"to{host}"), (host, "eth0"))
        ]
        return sum(int(n) for text in texts for n in re.findall(r"dropped (\d+)", text))

    def remove_limit(self, host: int) -> None:
        for where, device in ((self.ROUTER, f"to{host}"), (host, "eth0")):
            self.command(where, "tc", "qdisc", "del", "dev", device, "root")

    def connect(self, host: int, up: bool) -> None:
        """Puts the host's cable in, or takes it out."""
        self.command(
            self.ROUTER, "ip", "link", "set", f"to{host}", "up" if up else "down"
        )


def enter_host(path: str) -> None:
    """Moves this process, while it has one thread, to a host."""
    _move_to(path)
    _check(_libc.unshare(_NEW_MOUNTS), "unshare")  # by which ranks tell hosts


def _enter(
    rank: int,
    environment: dict[str, str],
    host: str | None,
    connection: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(environment)
    try:
        if host is not None:
            enter_host(host)
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
        environments: dict[int, dict[str, str]] | None = None,
        restart: int = 0,
        hosts: Hosts | None = None,
    ) -> None:
        """Starts the ranks; `environments` are of single ranks."""
        address = "127.0.0.1" if hosts is None else hosts.ADDRESS

        def make_store() -> dist.TCPStore:
            return dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)

        self.store = (
            make_store() if hosts is None else hosts.call(hosts.ROUTER, make_store)
        )
        self._processes = []
        self._connections = []
        self.results: dict[int, tuple[bool, Any]] = {}
        for rank in range(num_ranks):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(self.store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RUN_ID": "test",
                "TORCHELASTIC_RESTART_COUNT": str(restart),
                **(environment or {}),
                **(environments or {}).get(rank, {}),
            }
            host = None if hosts is None else hosts.path(rank % hosts.num_hosts)
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_enter, args=(rank, variables, host, theirs, function, args)
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        global num_killed
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
            num_killed += process.exitcode != 0
        for connection in self._connections:
            connection.close()

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def is_alive(self, rank: int) -> bool:
        return self._processes[rank].is_alive()

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

    def check(self) -> None:
        """RankFailed if a rank has failed; does not wait."""
        for rank, process in enumerate(self._processes):
            if process.exitcode not in (None, 0):
                self.collect(ranks=[rank])
                raise RankFailed(f"rank {rank}:\n{self.results[rank][1]}")

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


def meet(folder: str, name: object, rank: int, num_ranks: int) -> None:
    """Waits until all ranks are here, without a store."""
    open(os.path.join(folder, f"{name}-{rank}"), "w").close()
    for other in range(num_ranks):
        while not os.path.exists(os.path.join(folder, f"{name}-{other}")):
            time.sleep(0.001)
