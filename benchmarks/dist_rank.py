"""A rank of torchkv's or Gloo's job: a process that measures what it is told.

    python dist_rank.py KIND RANK RANKS PORT [SECURITY]

KIND is torchkv or gloo. PORT is that of the job's TCPStore. See peers/serve.py for the
commands' form.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import torchkv
from dist_cases import (
    Behind,
    Case,
    Copies,
    Ddp,
    Gloo,
    GlooFlat,
    GlooSum,
    GlooViews,
    Rows,
    TableRows,
    Task,
    Torchkv,
    Trainer,
    TwoBit,
    TwoCalls,
)
from parameter_lists import Shape
from peers.serve import serve

TIMEOUT_S = 60.0

# By the name that the driver uses; torchkv's take a store.
OURS: dict[str, Callable[[Task, torchkv.KVStore], Case]] = {
    "torchkv": Torchkv,
    "two-calls": TwoCalls,
    "2bit": TwoBit,
    "rows": Rows,
    "table rows": TableRows,
    "behind": Behind,
    "trainer": Trainer,
}
PEERS: dict[str, Callable[[Task], Case]] = {
    "gloo": Gloo,
    "gloo-sum": GlooSum,
    "gloo-views": GlooViews,
    "gloo-flat": GlooFlat,
    "copies": Copies,
    "ddp": Ddp,
}


class Rank:
    """What the driver can tell a rank."""

    def __init__(
        self, kind: str, rank: int, num_ranks: int, port: int, security: str
    ) -> None:
        """Connects with the other ranks."""
        self.rank, self.num_ranks, self.kind = rank, num_ranks, kind
        self.tcp_store = dist.TCPStore("127.0.0.1", port, is_master=False)
        self.options = {"security": security} if security else {}
        self.cases: dict[str, Case] = {}
        if kind == "gloo":
            dist.init_process_group(
                "gloo", store=self.tcp_store, rank=rank, world_size=num_ranks
            )

    def prepare(
        self,
        contestant: str,
        type: str,
        shapes: list[Shape],
        optimizer: str | None,
        lr: float,
    ) -> None:
        """Makes the tensors, and torchkv's store."""
        task = Task(self.rank, self.num_ranks, shapes, optimizer, lr)
        if self.kind == "gloo":
            self.cases[contestant] = PEERS[contestant](task)
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # security="none" warns
            kv = torchkv.create(
                type,
                rank=self.rank,
                world_size=self.num_ranks,
                store=self.tcp_store,
                timeout=TIMEOUT_S,
                **self.options,
            )
        self.cases[contestant] = OURS[contestant](task, kv)

    def run(self, contestant: str, steps: int) -> dict[str, Any]:
        """Makes steps; their seconds."""
        return self.cases[contestant].run(steps)

    def check(self, contestant: str) -> dict[str, Any]:
        """Whether the results of all steps are right."""
        return self.cases[contestant].check()

    def idle(self, seconds: float) -> dict[str, Any]:
        """The processor's time, of all threads, while this one sleeps."""
        start, used = time.perf_counter(), time.process_time()
        time.sleep(seconds)
        used = time.process_time() - used
        return {"share": used / (time.perf_counter() - start)}

    def drop(self) -> None:
        """Closes the stores and frees the tensors."""
        for case in self.cases.values():
            case.barrier()
            case.close()
        self.cases.clear()

    def namespace(self) -> dict[str, Any]:
        """What tells hosts apart, beside the boot: ranks of one host use ipc."""
        return {"namespace": os.readlink("/proc/self/ns/mnt")}


def main() -> None:
    """Does what stdin says."""
    kind, rank, num_ranks, port, *security = sys.argv[1:]
    torch.set_num_threads(1)
    serve(Rank(kind, int(rank), int(num_ranks), int(port), "".join(security)))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
