"""The weights of a Trainer: the parameters of all replicas and their stored values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchkv import _C
from torchkv.kvstore import KVStore
from torchkv.optim import StoreOptimizer
from torchkv.optim.built_in import BuiltIn
from torchkv.optim.groups import StoreKey


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

    def store_changed(
        self, keys: Iterable[StoreKey], optimizer: StoreOptimizer
    ) -> None:
        """Stores parameters that were written since the last call or note.

        Those of the first replica; the optimizer's state is kept.
        """
        keys = [key for key in keys if self._versions.get(key) != self._version(key)]
        if not keys:
            return
        values = {key: self._parameters[key][0].detach() for key in keys}
        known = [key for key in keys if key in self._store]
        if known:
            self._replace(known, values, optimizer)
        else:
            self._store.init(keys, list(values.values()))
        self.note_written(keys)

    def _replace(
        self,
        known: list[StoreKey],
        values: Mapping[StoreKey, Tensor],
        optimizer: StoreOptimizer,
    ) -> None:
        """Replaces the values of known keys, and adds the others."""
        store, before = self._store, self._store.pull(known)
        saved = optimizer.state_dict()
        states = {key: dict(saved["state"][key]) for key in known}
        if isinstance(optimizer, BuiltIn):
            for key, state in states.items():
                _renew_master(state, values[key])
        store.delete(known)
        try:
            store.init(list(values), list(values.values()))
            optimizer.load_state_dict({**saved, "state": states}, strict=False)
        except BaseException:  # such as a weight whose shape is not its state's
            store.delete([key for key in values if key in store])
            store.init(known, before)
            optimizer.load_state_dict(saved, strict=False)
            raise


def _renew_master(state: dict[str, Any], value: Tensor) -> None:
    """Replaces the fp32 master in a saved state by a new value of half precision.

    A master that rounds to the value is kept: it has more bits of the same weights.
    """
    dtype = _C.KVStore.state_dtype(value.dtype)
    master = state.pop("master", None)
    if dtype == value.dtype:
        return
    if master is None or not torch.equal(master.to(value), value):
        master = value.to(dtype)
    state["master"] = master
