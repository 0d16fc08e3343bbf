"""The weights of a Trainer: the parameters of all replicas and their stored values."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from torchkv.arguments import StoreKey, shown
from torchkv.kvstore import KVStore
from torchkv.optim.built_in import BuiltIn

_ON_ONE_MACHINE = ("local", "device", "nccl")
# A step of half-precision values changes masters in fp32.
_WITH_MASTER = (torch.float16, torch.bfloat16)


class Seen:
    """Which parameters have not been written since they were noted.

    Of the first replica: in place, which their version counters show, or by an
    assignment of ``.data``. The noted memory is kept, so that no other tensor has its
    address.
    """

    def __init__(self, parameters: Mapping[StoreKey, list[Tensor]]) -> None:
        """Nothing has been noted."""
        self._parameters = parameters
        self._noted: dict[StoreKey, tuple[Tensor, int, int]] = {}

    def note(self, keys: Iterable[StoreKey]) -> None:
        """Notes the present values of these."""
        for key in keys:
            parameter = self._parameters[key][0]
            address, noted = parameter.data_ptr(), self._noted.get(key)
            same = noted is not None and noted[1] == address
            memory = noted[0] if noted and same else parameter.detach()
            self._noted[key] = memory, address, parameter._version

    def forget(self, keys: Iterable[StoreKey]) -> None:
        """Takes these for written."""
        for key in keys:
            self._noted.pop(key, None)

    def __contains__(self, key: StoreKey) -> bool:
        """Whether a parameter is as it was noted."""
        noted, parameter = self._noted.get(key), self._parameters[key][0]
        return (
            noted is not None
            and noted[1] == parameter.data_ptr()
            and noted[2] == parameter._version
        )


class Weights:
    """Keeps stored values equal to parameters that are written outside of the store.

    A stored value is the first replica's parameter itself (``share=True``) where it
    stays whole on that replica's device: that takes no second memory and needs no copy.
    Other values are copies.
    """

    def __init__(
        self, parameters: Mapping[StoreKey, list[Tensor]], store: KVStore
    ) -> None:
        """Copies the first replica's parameters to the others."""
        self._parameters = parameters
        self._store = store
        self._stored = Seen(parameters)
        self._copied = Seen(parameters)
        # Whose stored value is, or was, the first replica's parameter.
        self._shared: set[StoreKey] = set()
        # Logical places shard values on one device, too.
        self._can_share = store.type in _ON_ONE_MACHINE and not os.environ.get(
            "TORCHKV_PLACES"
        )
        self.copy_written([])

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles without what is known of these parameters' memory."""
        names = "_parameters", "_store", "_can_share", "_shared"
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes all parameters for written."""
        self.__dict__.update(state)
        self._stored = Seen(self._parameters)
        self._copied = Seen(self._parameters)

    def note_written(self, keys: Iterable[StoreKey]) -> None:
        """Notes that the parameters now equal the stored values."""
        self._stored.note(keys)

    def copy_written(self, pulled: Iterable[StoreKey]) -> None:
        """Copies the first replica's parameters to the others where they are not equal.

        Those of `pulled` are, as all replicas have got the stored values.
        """
        pulled = set(pulled)
        keys = [
            key
            for key, copies in self._parameters.items()
            if len(copies) > 1 and key not in pulled and key not in self._copied
        ]
        with torch.no_grad():
            for key in keys:
                first, *others = self._parameters[key]
                for parameter in others:
                    parameter.copy_(first)
        self._copied.note(keys)

    def _shareable(self, keys: Iterable[StoreKey]) -> set[StoreKey]:
        """The keys whose first parameter can be the stored value."""
        result: set[StoreKey] = set()
        if not self._can_share:
            return result
        overlapping = _overlapping(
            p for copies in self._parameters.values() for p in copies
        )
        for key in keys:
            first, *others = self._parameters[key]
            if (
                all(p.device == first.device for p in others)
                and (self._store.type != "local" or first.device.type == "cpu")
                and (first.is_floating_point() or first.is_complex())
                and first.numel() != 0
                # Memory of its own, without gaps: empty_like has the same strides.
                and id(first) not in overlapping
                and torch.empty_like(first, device="meta").stride() == first.stride()
                and not first.is_conj()
                and not first.is_neg()
            ):
                result.add(key)
        return result

    def store_all(self, trained: Iterable[StoreKey]) -> None:
        """As :meth:`store_changed`, also of keys that are no longer trained."""
        keys = dict.fromkeys(trained)
        self.store_changed(k for k in self._parameters if k in keys or k in self._store)

    def store_changed(self, keys: Iterable[StoreKey]) -> None:
        """Stores parameters that were written since the last call or note.

        Those of the first replica; the optimizer's state is kept. After an error or an
        interrupt, the store has all its keys, and the next call continues.
        """
        keys = [key for key in keys if key not in self._stored]
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
        shared = self._shareable({*keys} | self._shared) if keys else self._shared
        # Others that overlap with those now are copies from now on.
        for key in self._shared - shared - {*keys}:
            if key in store:
                assigned[key] = self._parameters[key][0].detach()
        # Memory that was a parameter's is no longer the store's to write.
        own = {
            key: torch.empty_like(value).copy_(value)
            for key, value in assigned.items()
            if key in self._shared and key not in shared
        }
        # A step follows writes to shared values by itself.
        copied = {k: x for k, x in assigned.items() if k not in shared | own.keys()}
        assigned.update(own | self._with_masters(copied))
        # Those that share in one call: keys may exchange their memory.
        for share in (True, False):
            some = {
                key: value
                for key, value in assigned.items()
                if (key in shared or key in own) == share
            }
            if some:
                store.assign(list(some), list(some.values()), share=share)
        for some, share in _split(new, shared):
            store.init(list(some), list(some.values()), share=share)
        self._shared = shared
        if keys and store.num_workers > 1:  # rank 0's values count
            store.pull(keys, [self._parameters[key] for key in keys])
        self.note_written(keys)

    def _with_masters(
        self, written: Mapping[StoreKey, Tensor]
    ) -> dict[StoreKey, Tensor]:
        """Half-precision values in fp32: their masters, but for elements written."""
        halves = [k for k, x in written.items() if x.dtype in _WITH_MASTER]
        if (
            not halves
            or self._store.type not in _ON_ONE_MACHINE
            or not isinstance(self._store.optimizer, BuiltIn)
        ):
            return {}
        result = {}
        states = self._store._impl.optimizer_states(halves)
        for key, state in zip(halves, states, strict=True):
            value = written[key]
            if (master := state.get("master")) is not None:
                master = master.to(value.device)
                kept = master.to(value.dtype) == value
                result[key] = torch.where(kept, master, value.to(master.dtype))
        return result

    def remove(self, keys: Iterable[StoreKey]) -> None:
        """Removes keys from the store; their parameters stay as they are."""
        keys = list(keys)
        self._store.delete(keys)
        self._stored.forget(keys)
        self._shared -= {*keys}

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
        self._shared = {*shared}
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


def _overlapping(tensors: Iterable[Tensor]) -> set[int]:
    """The ids of those whose memory overlaps with that of another."""
    result: set[int] = set()
    strided = (
        x
        for x in tensors
        if x.layout is torch.strided and not x.is_nested and x.numel()
    )
    spans = sorted(map(_span, strided), key=lambda span: span[:2])
    for _, on_device in groupby(spans, lambda span: span[0]):
        (_, _, end, last), *others = on_device  # the greatest end so far, and whose
        for _, begin, other_end, x in others:
            if begin < end:
                result |= {id(x), id(last)}
            if other_end > end:
                end, last = other_end, x
    return result


def _span(x: Tensor) -> tuple[str, int, int, Tensor]:
    """The device, the first and last address of the elements, and the tensor."""
    steps = zip(x.shape, x.stride(), strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in steps)
    begin = x.data_ptr()
    return str(x.device), begin, begin + count * x.element_size(), x


def broadcast_frozen(store: Any, parameters: Mapping[StoreKey, list[Tensor]]) -> None:
    """Gives all processes rank 0's values of the parameters that are not trained."""
    if isinstance(store, KVStore) and store.num_workers > 1:
        copies = {k: x for k, x in parameters.items() if not x[0].requires_grad}
        if copies:
            values = [x[0].detach() for x in copies.values()]
            store.broadcast(list(copies), values, list(copies.values()))
            store.delete(list(copies))


def _split(
    values: Mapping[StoreKey, Tensor], shared: set[StoreKey]
) -> Iterator[tuple[dict[StoreKey, Tensor], bool]]:
    """Runs of keys that are shared or not, in order, and whether they are."""
    for share, run in groupby(values.items(), lambda item: item[0] in shared):
        yield dict(run), share
