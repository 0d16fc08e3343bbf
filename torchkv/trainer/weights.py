"""The weights of a Trainer: the parameters of all replicas and their stored values."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

import torch
from torch import Tensor

from torchkv.arguments import StoreKey, shown
from torchkv.kvstore import KVStore
from torchkv.optim.built_in import BuiltIn

_ON_ONE_MACHINE = ("local", "device", "nccl")
# A step of half-precision values changes masters in fp32, which writes to the values
# would have to reach.
_WITHOUT_MASTER = (torch.float32, torch.float64, torch.complex64, torch.complex128)


class Weights:
    """Keeps stored values equal to parameters that are written outside of the store.

    A stored value is the first replica's parameter itself (``share=True``) where it
    stays whole on that replica's device, and the step keeps no master of it: that takes
    half the memory and needs no copy. Other values are copies.
    """

    def __init__(
        self, parameters: Mapping[StoreKey, list[Tensor]], store: KVStore
    ) -> None:
        """Copies the first replica's parameters to the others."""
        self._parameters = parameters
        self._store = store
        self._versions: dict[StoreKey, tuple[int, int]] = {}
        # Logical places shard values on one device, too.
        self._can_share = store.type in _ON_ONE_MACHINE and not os.environ.get(
            "TORCHKV_PLACES"
        )
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

    def _shareable(self, keys: Iterable[StoreKey]) -> set[StoreKey]:
        """The keys whose first parameter can be the stored value."""
        result: set[StoreKey] = set()
        if not self._can_share:
            return result
        storages = Counter(
            p.untyped_storage().data_ptr()
            for copies in self._parameters.values()
            for p in copies
        )
        for key in keys:
            first, *others = self._parameters[key]
            storage = first.untyped_storage()
            if (
                all(p.device == first.device for p in others)
                and (self._store.type != "local" or first.device.type == "cpu")
                and first.dtype in _WITHOUT_MASTER
                and first.numel() != 0
                # Memory of its own, without gaps: empty_like has the same strides.
                and storages[storage.data_ptr()] == 1
                and storage.nbytes() == first.nbytes
                and torch.empty_like(first, device="meta").stride() == first.stride()
                and not first.is_conj()
                and not first.is_neg()
            ):
                result.add(key)
        return result

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
        shared = self._shareable(keys) if keys else set()
        for some, share in _split(assigned, shared):
            store.assign(list(some), list(some.values()), share=share)
        for some, share in _split(new, shared):
            store.init(list(some), list(some.values()), share=share)
        if keys and store.num_workers > 1:  # rank 0's values count
            store.pull(keys, [self._parameters[key] for key in keys])
        self.note_written(keys)

    def store_loaded(self) -> None:
        """Writes what the store has loaded into the parameters, and shares these."""
        keys = [key for key in self._store.keys() if key in self._parameters]
        with torch.no_grad():
            if keys:
                self._store.pull(keys, [self._parameters[key] for key in keys])
        shared = {
            key: self._parameters[key][0].detach() for key in self._shareable(keys)
        }
        if shared:
            self._store.assign(list(shared), list(shared.values()), share=True)
        self.note_written(keys)

    def _store_again(self, values: Mapping[StoreKey, Tensor]) -> None:
        """Replaces keys by new ones of the values' dtypes, with the same state."""
        store, keys = self._store, list(values)
        optimizer = store._required_optimizer("Trainer")
        before, saved = store.pull(keys), optimizer._saved()
        states = {key: dict(saved["state"][key]) for key in keys}
        if isinstance(optimizer, BuiltIn):
            for state in states.values():
                state.pop("master", None)  # the next step makes that of the new dtype
        try:
            store.delete(keys)
            for some, share in _split(values, self._shareable(keys)):
                store.init(list(some), list(some.values()), share=share)
            optimizer._load_saved({**saved, "state": states}, strict=False)
        except BaseException:
            left = [key for key in keys if key in store]
            if left:
                store.delete(left)
            store.init(keys, before)
            optimizer._load_saved(saved, strict=False)
            raise


def _split(
    values: Mapping[StoreKey, Tensor], shared: set[StoreKey]
) -> Iterator[tuple[dict[StoreKey, Tensor], bool]]:
    """Runs of keys that are shared or not, in order, and whether they are."""
    for share, run in groupby(values.items(), lambda item: item[0] in shared):
        yield dict(run), share
