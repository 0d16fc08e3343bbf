"""Which trainer steps a parameter: the latest one of those that exist."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torchkv.arguments import StoreKey, shown

# Each parameter's owners, in order.
_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class Ownership:
    """A trainer's of its parameters. It lives as long as the trainer, its only user."""

    def __init__(self, parameters: Mapping[StoreKey, list[Tensor]]) -> None:
        """Takes the parameters, from trainers that have them."""
        self._parameters = parameters
        # The later owners of parameters that these have taken. A step looks here, as
        # most trainers lose none.
        self._taken: list[tuple[StoreKey, weakref.ref[Ownership]]] = []
        this = weakref.ref(self)
        for copies in parameters.values():
            for parameter in copies:
                known = _owners[parameter] if parameter in _owners else []
                owners = [ref for ref in known if ref() is not None]
                for ref in owners:
                    owner = ref()
                    if owner is not None:
                        owner._lose(parameter, this)
                _owners[parameter] = [*owners, this]

    def _lose(self, parameter: Tensor, to: weakref.ref[Ownership]) -> None:
        for key, copies in self._parameters.items():
            if any(copy is parameter for copy in copies):
                self._taken.append((key, to))

    def check(self, op: str) -> None:
        """RuntimeError if a later trainer that exists has one of the parameters."""
        for key, owner in self._taken:
            if owner() is not None:
                raise RuntimeError(
                    f"{op}: expected parameters that no later Trainer has, or both "
                    f"would step them, but got one that another has (key {shown(key)})"
                )
