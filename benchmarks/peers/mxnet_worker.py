"""MXNet's side of a benchmark: a process controlled by JSON lines.

Each line of stdin is a command, each line of stdout its answer or ``{"error": ...}``:

    {"do": "versions"}                              -> {"mxnet": "1.9.1", ...}
    {"do": "prepare", "shapes": [[2, 3]], "dtype": "float32", "replicas": 4, "outs": 4,
     "optimizer": null, "first_step": [], "compression": null, "pushed": null}
    {"do": "run", "store": "local", "way": "push, pull", "calls": 3,
     "wake_s": 0.01}                                -> {"seconds": ...}
    {"do": "check", "store": "local"}               -> {"agrees": true}
    {"do": "drop"}

The environment of the process determines the engine and its threads. MXNet works
asynchronously; the seconds include all the work of the calls.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np
from pattern import replica_pattern, row_ids, sign_pattern, sum_pattern


class Case:
    """The arrays of a case, and a store of each requested type."""

    def __init__(
        self,
        shapes: list[list[int]],
        dtype: str,
        replicas: int,
        outs: int,
        optimizer: dict[str, Any] | None = None,
        first_step: Sequence[list[float]] = (),
        compression: dict[str, Any] | None = None,
        pushed: int | None = None,
    ) -> None:
        """Makes and touches all arrays."""
        self.optimizer, self.first_step = optimizer, first_step
        self.compression = compression
        self.keys = list(range(len(shapes)))
        self.shapes, self.dtype, self.replicas = shapes, dtype, replicas
        self.values = [
            [
                self.rows(key, r, pushed)
                if pushed
                else self.array(key, replica_pattern(key, r))
                for r in range(replicas)
            ]
            for key in self.keys
        ]
        self.outs = [
            [mx.nd.zeros(tuple(shape), dtype=dtype) for _ in range(outs)]
            for shape in shapes
        ]
        self.stores: dict[str, Any] = {}
        mx.nd.waitall()

    def numpy_array(self, key: int, pattern: list[int]) -> np.ndarray:
        """The pattern repeated to the key's shape."""
        tile = np.tile(np.array(pattern, self.dtype), 1024)  # resize copies per tile
        return np.resize(tile, self.shapes[key])

    def array(self, key: int, pattern: list[int]) -> Any:
        """The same as MXNet's array."""
        return mx.nd.array(self.numpy_array(key, pattern), dtype=self.dtype)

    def rows(self, key: int, replica: int, pushed: int) -> Any:
        """Some rows, which repeat a replica's pattern, as a row-sparse array."""
        rows, dim = self.shapes[key]
        pattern = np.array(replica_pattern(key, replica), self.dtype)
        values = np.resize(np.tile(pattern, 1024), (pushed, dim))
        ids = np.array(row_ids(rows, pushed, replica))
        return mx.nd.sparse.row_sparse_array((values, ids), shape=(rows, dim))

    def store(self, store_type: str) -> Any:
        """The store of that type, with the case's keys initialized."""
        if store_type not in self.stores:
            store = mx.kv.create(store_type)
            if self.compression:
                store.set_gradient_compression(self.compression)
            if self.optimizer:
                arguments = dict(self.optimizer)
                store.init(self.keys, [mx.nd.zeros(tuple(s)) for s in self.shapes])
                name = arguments.pop("name")
                store.set_optimizer(mx.optimizer.create(name, **arguments))
            else:
                store.init(self.keys, [values[0] for values in self.values])
            self.stores[store_type] = store
        return self.stores[store_type]

    def run(self, store: str, way: str, calls: int, wake_s: float) -> dict[str, Any]:
        """Makes the calls asynchronously; the clock includes all of them.

        As on torchkv's side, several calls start with one that is not timed, and the
        threads have been woken.
        """
        kv = self.store(store)
        keys: Any = self.keys
        values: Any = self.values
        outs: Any = self.outs
        if len(keys) == 1:
            keys, values, outs = keys[0], values[0], outs[0]

        def push() -> None:
            kv.push(keys, values)

        def push_pull() -> None:
            kv.push(keys, values)
            kv.pull(keys, out=outs)

        def pushpull() -> None:
            kv.pushpull(keys, values, out=outs)

        call = {"push": push, "push, pull": push_pull, "pushpull": pushpull}[way]
        wake_threads(wake_s)
        if calls > 1:
            call()
        mx.nd.waitall()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        mx.nd.waitall()
        return {"seconds": time.perf_counter() - start}

    def check(self, store: str) -> dict[str, Any]:
        """Whether all outs (or, without outs, the stored values) have the sum."""
        results = self.outs
        if not results[0]:
            results = [[mx.nd.zeros(tuple(s), dtype=self.dtype)] for s in self.shapes]
            self.store(store).pull(self.keys, out=results)
        if self.optimizer:
            return {
                "agrees": all(
                    np.allclose(out.asnumpy().ravel()[:8], first, rtol=1e-4, atol=1e-6)
                    for outs, first in zip(results, self.first_step)  # noqa: B905 - Python 3.8
                    for out in outs
                )
            }
        expected = [sum_pattern(key, self.replicas) for key in self.keys]
        if self.compression:
            threshold = self.compression["threshold"]
            signs = [sign_pattern(key, self.replicas) for key in self.keys]
            expected = [[threshold * x for x in pattern] for pattern in signs]
        return {
            "agrees": all(
                np.array_equal(
                    out.asnumpy(),
                    self.numpy_array(key, expected[key]),
                )
                for key, outs in enumerate(results)
                for out in outs
            )
        }


def wake_threads(seconds: float) -> None:
    """Gives the engine's and OpenMP's threads work until they are awake."""
    a = mx.nd.ones(1 << 18)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        mx.nd.elemwise_add(a, a).wait_to_read()


def versions() -> dict[str, Any]:
    """The versions of this environment."""
    return {
        "mxnet": mx.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    """Handles requests until the end of stdin."""
    # Only replies may be written to the pipe; libraries may print to stdout.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    case = None
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        try:
            answer: dict[str, Any] = {}
            if do == "versions":
                answer = versions()
            elif do == "prepare":
                case = Case(**command)
            elif do == "drop":
                case = None
            elif do in ("run", "check") and case is not None:
                answer = getattr(case, do)(**command)
            else:
                raise ValueError(f"expected a command for this state, but got {do!r}")
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
