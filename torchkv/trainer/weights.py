"""The weights of a Trainer: the parameters of all replicas and their stored values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from torchkv.kvstore import KVStore
from torchkv.optim.built_in import BuiltIn
from torchkv.optim.groups import StoreKey, shown


class Weights:
    """Keeps stored values equal to parameters that are written outside of the store."""

    def __init__(
        self, parameters: Mapping[StoreKey, list[Tensor]], store: KVStore
    ) -> None:
        """Copies the first replica's parameters to the others."""
        self._parameters = parameters
        self._store = store
        self._versions: dict[StoreKey, tuple[int, int]] = {}
        with torch.no_grad():
            for first, *others in parameters.values():
                for parameter in others:
                    parameter.copy_(first)

    def note_written(self, keys: Iterable[StoreKey]) -> None:
        """Notes that the parameters now equal the stored values."""
        for key in keys:
            self._versions[key] = self._version(key)

    def _version(self, key: StoreKey) -> tuple[int, int]:
        """Changes with each in-place write and each assignment of ``.data``."""
        parameter = self._parameters[key][0]
        return parameter.data_ptr(), parameter._version

    def store_changed(self, keys: Iterable[StoreKey]) -> None:
        """Stores parameters that were written since the last call or note.

        Those of the first replica; the optimizer's state is kept. After an error or an
        interrupt, the store has all its keys, and the next call continues.
        """
        keys = [key for key in keys if self._versions.get(key) != self._version(key)]
        store = self._store
        new: dict[StoreKey, Tensor] = {}
        assigned: dict[StoreKey, Tensor] = {}
        of_other_dtypes: dict[StoreKey, Tensor] = {}
        for key in keys:
            value = self._parameters[key][0].detach()
            if key not in store:
                new[key] = value
            elif value.shape != store.shape(key):
                raise ValueError(
                    f"Trainer: expected a weight of shape {tuple(store.shape(key))}, "
                    f"but got shape {tuple(value.shape)} (key {shown(key)})"
                )
            elif value.dtype == store.dtype(key):
                assigned[key] = value
            else:
                of_other_dtypes[key] = value
        if of_other_dtypes:
            self._store_again(of_other_dtypes)
        if assigned:
            store.assign(list(assigned), list(assigned.values()))
        if new:
            store.init(list(new), list(new.values()))
        if keys and store.num_workers > 1:  # rank 0's values count
            store.pull(keys, [self._parameters[key] for key in keys])
        self.note_written(keys)

    def _store_again(self, values: Mapping[StoreKey, Tensor]) -> None:
        """Replaces keys by new ones of the values' dtypes, with the same state."""
        store, keys = self._store, list(values)
        optimizer = store._required_optimizer("Trainer")
        before, saved = store.pull(keys), optimizer.state_dict()
        states = {key: dict(saved["state"][key]) for key in keys}
        if isinstance(optimizer, BuiltIn):
            for state in states.values():
                state.pop("master", None)  # the next step makes that of the new dtype
        try:
            store.delete(keys)
            store.init(keys, list(values.values()))
            optimizer.load_state_dict({**saved, "state": states}, strict=False)
        except BaseException:
            left = [key for key in keys if key in store]
            if left:
                store.delete(left)
            store.init(keys, before)
            optimizer.load_state_dict(saved, strict=False)
            raise
