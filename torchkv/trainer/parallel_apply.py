"""Runs replicas on several devices at the same time, one thread per device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


def parallel_apply(
    function: Callable[[int], Any], devices: Sequence[torch.device]
) -> list[Any]:
    """Calls ``function(i)`` for each device, and returns the results.

    Calls on one device run one after the other; all on one, in the caller's thread.

    Raises:
        Exception: what `function` raises.
    """
    by_device: dict[torch.device, list[int]] = {}
    for i, device in enumerate(devices):
        by_device.setdefault(device, []).append(i)

    def run_all(indices: list[int]) -> list[Any]:
        return [function(i) for i in indices]

    if len(by_device) == 1:
        return run_all(list(range(len(devices))))
    modes = _Modes()
    with ThreadPoolExecutor(len(by_device)) as pool:
        futures = {
            pool.submit(modes.run, device, run_all, indices): indices
            for device, indices in by_device.items()
        }
    results = {
        i: result
        for future, indices in futures.items()
        for i, result in zip(indices, future.result(), strict=True)
    }
    return [results[i] for i in sorted(results)]


class _Modes:
    """The calling thread's modes, which torch keeps per thread."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        ]
        self._cache = torch.is_autocast_cache_enabled()

    def run(
        self,
        device: torch.device,
        function: Callable[[list[int]], list[Any]],
        indices: list[int],
    ) -> list[Any]:
        """Calls a function in these modes, on a device."""
        (cpu, cpu_on, cpu_dtype), (cuda, cuda_on, cuda_dtype) = self._autocast
        index = device.index if device.type == "cuda" else None
        with (
            torch.set_grad_enabled(self._grad),
            torch.autocast(cpu, cpu_dtype, cpu_on, self._cache),
            torch.cuda.device(-1 if index is None else index),
        ):
            if not cuda_on:
                return function(indices)
            with torch.autocast(cuda, cuda_dtype, cuda_on, self._cache):
                return function(indices)
