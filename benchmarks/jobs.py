"""The processes of several-process contestants: started once, told what to do by pipes.

A job has ranks, which answer JSON lines (peers/serve.py), and may have processes that
only run, such as MXNet's servers. All use one thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

import torchkv

HERE = Path(__file__).parent
ANSWER_S = 120.0
END_S = 10.0

# One thread each; loopback, wherever there is a choice.
COMMON = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
# Ranks whose files differ count as different hosts.
OTHER_HOST = (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"])


class Process:
    """A process whose stderr is kept for error messages."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        """Starts it with these variables instead of all others that configure it."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MXNET_", "DMLC_", "OMP_", "PYTHON", "TORCHKV_"))
        }
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            command,
            env={**kept, **COMMON, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def tell(self, do: str, **arguments: object) -> None:
        """Sends a command."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # answer() says why
            line = json.dumps({"do": do, **arguments})
            print(line, file=self._process.stdin, flush=True)

    def answer(self, timeout: float) -> dict[str, Any]:
        """Waits for the answer of the command that was sent."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        if not ready:
            raise RuntimeError(f"no answer within {timeout:g} s")
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace")
            raise RuntimeError(f"the process ended\n{said}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def finish(self) -> None:
        """Lets it end: a rank at the end of its stdin."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self, timeout: float) -> None:
        """Waits for its end, or kills it."""
        self.finish()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()


class Job:
    """A contestant's processes."""

    def __init__(self, name: str) -> None:
        """Without processes; they are added while they start."""
        self.name = name
        self.ranks: list[Process] = []
        self.others: list[Process] = []
        self.tcp_store: Any = None
        self._failed = False

    @classmethod
    def of_torch(
        cls,
        name: str,
        kind: str,
        num_ranks: int = 2,
        *,
        other_host: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> Self:
        """Starts ranks of torchkv or Gloo.

        `other_host` is what starts a command as on another host: for the last rank.
        """
        job = cls(name)
        # Here, so that it outlives the ranks.
        job.tcp_store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        for rank in range(num_ranks):
            program = [sys.executable, str(HERE / "dist_rank.py"), kind]
            arguments = [str(rank), str(num_ranks), str(job.tcp_store.port)]
            prefix = other_host if rank == num_ranks - 1 else ()
            variables = {
                "PYTHONPATH": str(Path(torchkv.__file__).parents[1]),
                "GLOO_SOCKET_IFNAME": "lo",
                "TORCHKV_INTERFACE": "lo",
                **(environment or {}),
            }
            security = ["none"] if other_host else []
            command = [*prefix, *program, *arguments, *security]
            job.ranks.append(Process(command, variables))
        return job

    @classmethod
    def of_mxnet(cls, name: str, python: Path, num_ranks: int = 2) -> Self:
        """Starts MXNet's scheduler, and as many servers as workers."""
        job = cls(name)
        environment = {
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(free_port()),
            "DMLC_NODE_HOST": "127.0.0.1",
            "DMLC_LOCAL": "1",  # sockets of the file system, as torchkv's: faster
            "DMLC_NUM_WORKER": str(num_ranks),
            "DMLC_NUM_SERVER": str(num_ranks),
        }
        for role in ["scheduler", *["server"] * num_ranks]:
            command = [str(python), "-c", "import mxnet"]
            job.others.append(Process(command, {**environment, "DMLC_ROLE": role}))
        for _ in range(num_ranks):
            command = [str(python), str(HERE / "peers" / "mxnet_dist_worker.py")]
            job.ranks.append(Process(command, {**environment, "DMLC_ROLE": "worker"}))
        return job

    def ask(self, do: str, **arguments: object) -> list[dict[str, Any]]:
        """Sends a command to all ranks and waits for their answers."""
        for process in self.ranks:
            process.tell(do, **arguments)
        answers = []
        for rank, process in enumerate(self.ranks):
            try:
                answers.append(process.answer(ANSWER_S))
            except RuntimeError as error:
                self._failed = True
                raise RuntimeError(f"{self.name}, rank {rank}: {do}: {error}") from None
        return answers

    def __enter__(self) -> Self:
        """The job itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Ends all processes."""
        for process in self.ranks:
            process.finish()
        for process in [*self.ranks, *self.others]:
            process.close(0 if self._failed else END_S)


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def prefix_of_other_host() -> list[str] | None:
    """What starts a rank as on another host, if this user may."""
    for prefix in OTHER_HOST:
        with contextlib.suppress(OSError):
            if subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
                return prefix
    return None
