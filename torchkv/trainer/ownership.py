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
    """Of a trainer, which alone holds it: whether others step its parameters."""

    def __init__(self, parameters: Mapping[StoreKey, list[Tensor]]) -> None:
        """Takes the parameters, from trainers that have them."""
        self._key_of = {
            id(parameter): key
            for key, copies in parameters.items()
            for parameter in copies
        }
        # The later owners of parameters that these have taken. A step looks here, as
        # most trainers lose none.
        self._taken: list[tuple[StoreKey, weakref.ref[Ownership]]] = []
        this = weakref.ref(self)
        for copies in parameters.values():
            for parameter in copies:
                known = _owners[parameter] if parameter in _owners else []
                owners = [owner for ref in known if (owner := ref()) is not None]
                for owner in owners:
                    if owner is not self:
                        owner._lose(parameter, this)
                _owners[parameter] = [*map(weakref.ref, owners), this]

    def _lose(self, parameter: Tensor, to: weakref.ref[Ownership]) -> None:
        self._taken.append((self._key_of[id(parameter)], to))

    def check(self, op: str) -> None:
        """RuntimeError if a later trainer that exists has one of the parameters."""
        self._taken = [taken for taken in self._taken if taken[1]() is not None]
        if self._taken:
            key = self._taken[0][0]
            raise RuntimeError(
                f"{op}: expected parameters that no later Trainer has, or both would "
                f"step them, but got one that another has (key {shown(key)})"
            )
