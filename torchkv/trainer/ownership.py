"""Which trainer steps a parameter: the latest one of those that exist."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torchkv.arguments import StoreKey, shown

# The ownership of each parameter's latest trainer.
_latest: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class Ownership:
    """A trainer's of its parameters. It lives as long as the trainer, its only user."""

    def __init__(self, parameters: Mapping[StoreKey, list[Tensor]]) -> None:
        """Takes the parameters, from trainers that have them."""
        self._parameters = parameters
        # The later owners of parameters that these have taken.
        self._taken: dict[StoreKey, weakref.ref[Ownership]] = {}
        this = weakref.ref(self)
        for copies in parameters.values():
            for parameter in copies:
                other = _latest[parameter]() if parameter in _latest else None
                if other is not None and other is not self:
                    other._lose(parameter, this)
                _latest[parameter] = this

    def _lose(self, parameter: Tensor, to: weakref.ref[Ownership]) -> None:
        for key, copies in self._parameters.items():
            if any(copy is parameter for copy in copies):
                self._taken[key] = to

    def check(self, op: str) -> None:
        """RuntimeError if a later trainer that exists has one of the parameters."""
        for key, owner in self._taken.items():
            if owner() is not None:
                raise RuntimeError(
                    f"{op}: expected parameters that no later Trainer has, or both "
                    f"would step them, but got one that another has (key {shown(key)})"
                )
