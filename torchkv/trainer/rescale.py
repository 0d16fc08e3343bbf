"""Division by the batch size, through the optimizer's ``rescale_grad``."""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakKeyDictionary

from torchkv.optim import StoreOptimizer
from torchkv.optim.built_in import BuiltIn
from torchkv.optim.groups import as_number

# The user's rescale_grad of each optimizer, and the one that a trainer has set.
_rescaled: WeakKeyDictionary[StoreOptimizer, tuple[float, float]] = WeakKeyDictionary()


class Rescale:
    """Sets ``rescale_grad`` to the user's value / batch size, as MXNet does."""

    def __init__(self, optimizer: StoreOptimizer) -> None:
        """Takes the user's ``rescale_grad``, even if another trainer has set it."""
        self._own = 1.0
        if isinstance(optimizer, BuiltIn):
            before, last_set = _rescaled.get(optimizer, (None, None))
            present = optimizer.rescale_grad
            self._own = present if before is None or present != last_set else before

    def by(self, optimizer: StoreOptimizer, batch_size: float) -> float:
        """Divides a step by a batch size; returns what remains for its gradients."""
        if not isinstance(optimizer, BuiltIn):
            return 1 / batch_size
        # It applies to all accumulated gradients, whose batch sizes may differ.
        in_place = optimizer.accumulate > 1
        rescale = self._own if in_place else self._own / batch_size
        if optimizer.rescale_grad != rescale:
            optimizer.rescale_grad = rescale
            _rescaled[optimizer] = self._own, rescale
        return 1 / batch_size if in_place else 1.0


def as_batch_size(op: str, batch_size: Any) -> float:
    """A batch size; ValueError unless it is greater than 0 and finite."""
    number = as_number(op, "batch_size", batch_size)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(
            f"{op}: expected a finite batch_size greater than 0, but got {batch_size!r}"
        )
    return number
