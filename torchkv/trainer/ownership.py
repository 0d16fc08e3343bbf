"""Which trainer steps a parameter: the latest one of those that exist."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch import Tensor

from torchkv.arguments import StoreKey, shown

# Each parameter's owners, in order, by its id: while one of them exists, so does the
# parameter. No weak references to it, with which torch.utils.swap_tensors refuses it.
_owners: dict[int, list[weakref.ref[Ownership]]] = {}


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
        for number in [n for n, refs in _owners.items() if not _existing(refs)]:
            del _owners[number]
        for number in self._key_of:
            owners = _existing(_owners.get(number, []))
            for owner in owners:
                owner._taken.append((owner._key_of[number], this))
            _owners[number] = [*map(weakref.ref, owners), this]

    def check(self, op: str) -> None:
        """RuntimeError if a later trainer that exists has one of the parameters."""
        self._taken = [taken for taken in self._taken if taken[1]() is not None]
        if self._taken:
            key = self._taken[0][0]
            raise RuntimeError(
                f"{op}: expected parameters that no later Trainer has, or both would "
                f"step them, but got one that another has (key {shown(key)})"
            )


def _existing(refs: list[weakref.ref[Ownership]]) -> list[Ownership]:
    return [owner for ref in refs if (owner := ref()) is not None]
