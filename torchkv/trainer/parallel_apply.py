"""Runs replicas on several devices at the same time, one thread per device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch


def parallel_apply(
    function: Callable[[int], Any], devices: Sequence[torch.device]
) -> list[Any]:
    """Calls ``function(i)`` for each device; returns the results, or raises its error.

    Calls on one device run one after the other; all on one, in the caller's thread.
    """
    if len({*devices}) == 1:
        return [function(i) for i in range(len(devices))]
    modes = _modes()

    def run_all(device: torch.device) -> dict[int, Any]:
        with modes(device):
            return {i: function(i) for i, d in enumerate(devices) if d == device}

    results: dict[int, Any] = {}
    with ThreadPoolExecutor(len({*devices})) as pool:
        for some in pool.map(run_all, dict.fromkeys(devices)):
            results.update(some)
    return [results[i] for i in range(len(devices))]


def _modes() -> Callable[[torch.device], AbstractContextManager[None]]:
    """The modes of the calling thread, for another thread to enter."""
    grad, cache = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    on = {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")}
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in on}

    @contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        with (
            torch.set_grad_enabled(grad),
            torch.autocast("cpu", dtypes["cpu"], on["cpu"], cache),
            torch.cuda.device(device if device.type == "cuda" else -1),
        ):
            if on["cuda"]:
                with torch.autocast("cuda", dtypes["cuda"], True, cache):
                    yield
            else:
                yield

    return entered
