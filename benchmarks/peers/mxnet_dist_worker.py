"""A worker of MXNet's distributed mode: what dist_rank.py does for torchkv and Gloo.

The environment (DMLC_*) says where the scheduler is; it and the servers are processes
that only import mxnet. See serve.py for the commands' form.
"""

from __future__ import annotations

import platform
import time
from typing import Any

import mxnet as mx
import numpy as np
from pattern import (
    ROWS_PUSHED,
    replica_pattern,
    row_ids,
    sign_pattern,
    sum_pattern,
)
from serve import serve


class Rank:
    """The store, and the arrays of the prepared case."""

    def __init__(self) -> None:
        """Without a store: that is made, and waits for the others, in `prepare`."""
        self.kv: Any = None
        self.next_key = 0
        self.optimized = False

    def versions(self) -> dict[str, Any]:
        """The versions of this environment."""
        return {
            "mxnet": mx.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        }

    def prepare(
        self,
        contestant: str,
        type: str,
        shapes: list[list[int]],
        optimizer: str | None,
        lr: float,
    ) -> None:
        """Makes arrays and keys; the optimizer is SGD on the servers, or none.

        Both contestants use the same. Keys cannot be deleted, nor can the optimizer be
        removed: cases without come first. Those with compression have a job of their
        own.
        """
        assert optimizer in (None, "sgd")
        self.total = sum_pattern
        if self.kv is None:
            self.kv = mx.kv.create(type)
            if contestant == "2bit":
                two_bit = {"type": "2bit", "threshold": 1.0}
                self.kv.set_gradient_compression(two_bit)
        if contestant == "2bit":
            self.total = sign_pattern
        assert optimizer is not None or not self.optimized
        if optimizer is not None and not self.optimized:
            self.kv.set_optimizer(mx.optimizer.SGD(learning_rate=lr))
            self.optimized = True
        self.optimizer, self.lr, self.steps, self.shapes = optimizer, lr, 0, shapes
        self.keys = [self.next_key + i for i in range(len(shapes))]
        self.next_key += len(shapes)
        self.values = [
            mx.nd.array(self.pattern(i, replica_pattern(i, self.kv.rank)))
            for i in range(len(shapes))
        ]
        self.outs = [mx.nd.zeros(tuple(shape)) for shape in shapes]
        if contestant == "rows":
            all_rows = mx.nd.arange(shapes[0][0], dtype="int64")
            self.outs = [  # servers do not answer an init without rows
                mx.nd.sparse.row_sparse_array(
                    (self.outs[0], all_rows), shape=tuple(shapes[0])
                )
            ]
            self.ids = self.ids_of(self.kv.rank)
            rows = self.values[0][: len(self.ids)]
            self.values = [
                mx.nd.sparse.row_sparse_array((rows, self.ids), shape=tuple(shapes[0]))
            ]
        self.kv.init(self.keys, self.outs)
        mx.nd.waitall()
        self.kv._barrier()

    def pattern(self, i: int, pattern: list[float]) -> np.ndarray:
        """The pattern repeated to the shape of key `i`."""
        tile = np.tile(np.array(pattern, "float32"), 1024)
        return np.resize(tile, self.shapes[i])

    def ids_of(self, rank: int) -> Any:
        """The rows of a table that a rank pushes and pulls."""
        rows = self.shapes[0][0]
        return mx.nd.array(row_ids(rows, rows // ROWS_PUSHED, rank), dtype="int64")

    def run(self, contestant: str, steps: int) -> dict[str, Any]:
        """Makes so many steps and one before; the seconds of each.

        Each has its own copy of the values, because MXNet pulls into the arrays that
        were pushed, too.
        """
        keys: Any = self.keys
        outs: Any = self.outs
        copies: Any = [[v.copy() for v in self.values] for _ in range(1 + steps)]
        if len(keys) == 1:
            keys, outs, copies = keys[0], outs[0], [copy[0] for copy in copies]
        mx.nd.waitall()

        def push_pull(values: Any) -> None:
            self.kv.push(keys, values)
            self.kv.pull(keys, out=outs)
            mx.nd.waitall()

        def pushpull(values: Any) -> None:
            self.kv.pushpull(keys, values, out=outs)
            mx.nd.waitall()

        def rows(values: Any) -> None:
            self.kv.push(keys, values)
            self.kv.row_sparse_pull(keys, out=outs, row_ids=self.ids)
            mx.nd.waitall()

        step = {
            "push, pull": push_pull,
            "pushpull": pushpull,
            "2bit": push_pull,
            "rows": rows,
        }[contestant]
        self.kv._barrier()
        step(copies[0])
        seconds = []
        for values in copies[1:]:
            start = time.perf_counter()
            step(values)
            seconds.append(time.perf_counter() - start)
        self.steps += 1 + steps
        return {"seconds": seconds}

    def check(self, contestant: str) -> dict[str, Any]:
        """Whether the values are those after all steps of both workers."""
        self.kv._barrier()
        factor = 1.0 if self.optimizer is None else -self.lr * self.steps
        if contestant == "rows":
            return {"agrees": self.check_rows(factor)}
        self.kv.pull(self.keys, out=self.outs)
        agrees = True
        for i, out in enumerate(self.outs):
            total = self.total(i, self.kv.num_workers)
            expected = self.pattern(i, [factor * value for value in total])
            agrees = agrees and np.array_equal(out.asnumpy(), expected)
        self.kv._barrier()
        return {"agrees": agrees}

    def check_rows(self, factor: float) -> bool:
        """Whether the rows of this rank are those after all steps."""
        self.kv.row_sparse_pull(self.keys[0], out=self.outs[0], row_ids=self.ids)
        total = np.zeros(self.shapes[0], "float32")
        for rank in range(self.kv.num_workers):
            ids = self.ids_of(rank).asnumpy()
            total[ids] += self.pattern(0, replica_pattern(0, rank))[: len(ids)]
        ids = self.ids.asnumpy()
        agrees = np.array_equal(self.outs[0].data.asnumpy(), factor * total[ids])
        self.kv._barrier()
        return agrees

    def drop(self) -> None:
        """Frees the arrays."""
        self.values, self.outs = [], []


if __name__ == "__main__":
    serve(Rank())
