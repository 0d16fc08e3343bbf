"""The methods of a store that save, load and copy it."""

from __future__ import annotations

import copy
import io
import os
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self, cast

import torch

from torchkv import _C
from torchkv.files import write_whole
from torchkv.gathering import checked_together
from torchkv.optim.rules import after_load
from torchkv.optim.saved import read_saved, without_options
from torchkv.state import folder, saving
from torchkv.state.state_dict import load_state_dict, state_dict

if TYPE_CHECKING:
    from torchkv.optim import StoreOptimizer


class Stateful:
    """A base of :class:`torchkv.KVStore`, in which its methods are documented."""

    __slots__ = ("_impl", "_optimizer")
    _impl: _C.KVStore
    _optimizer: StoreOptimizer | None

    @classmethod
    def _of(cls, impl: _C.KVStore, extras: Sequence[Sequence[Any]] = ()) -> Self:
        """A store around one of C++; `extras` is what schedulers added to groups."""
        store = cls.__new__(cls)
        store._impl = impl
        store._optimizer = after_load(impl, None, extras) if extras else None
        return store

    @property
    def optimizer(self) -> StoreOptimizer | None:
        """The optimizer that is the updater, or None."""
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str], progress: bool = False) -> None:
        """Writes the whole store into a folder: keys, values, updater, optimizer.

        The folder holds safetensors files and a JSON manifest, without pickle. A save
        that does not finish, for whatever reason, leaves the previous one in place.
        Saves of several processes or threads to one folder wait for each other. Each
        key is saved as of one moment, while other threads may push. Of what schedulers
        add to the optimizer's groups, numbers are saved.

        All ranks of a ``dist`` store make the call with a folder that they share, and
        each writes what its server holds; a store on one machine, or of any number of
        ranks, loads it. If one fails, all do.

        Args:
            path: the folder, created if needed. Other files in it are left alone.
            progress: whether to show a progress bar, on rank 0; needs tqdm.

        Raises:
            TypeError: the updater is a Python callable or a class of torch.optim,
                which cannot be saved. Nothing has been written.
            ImportError: a progress bar without tqdm.
        """
        saving.save(self._impl, path, progress)

    def load(self, path: str | os.PathLike[str], progress: bool = False) -> None:
        """Replaces keys, values, updater and optimizer by those that were saved.

        The saved store may be of another type. Values are in CPU memory, from which a
        ``device`` store moves them at the first push or pull, as after ``init``. If
        the saved optimizer is of the same kind as this store's, the optimizer object
        continues with the saved numbers, and so do its schedulers. Updates that other
        threads make meanwhile are lost. :func:`torchkv.load` makes a new store.

        All ranks of a ``dist`` store make the call with the same store, from a folder
        that all can read; if one cannot, none does. Versions begin at 0 there.

        Args:
            path: what :meth:`save` was given.
            progress: whether to show a progress bar; needs tqdm.

        Raises:
            FileNotFoundError: the folder does not exist.
            ValueError: it holds no store, or a damaged one, or a TorchScript updater
                with a state of its own on another number of ranks. Nothing has changed.
            TypeError: this store has keys of the other kind. Nothing has changed.
            RemoteError: another rank could not load it. Nothing has changed.
        """
        with checked_together(self._impl, "load"):
            content = folder.read(path, progress)
            made = content.made_for(self._impl)
        self._optimizer = content.replace(self._impl, made)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the whole store, of dicts, lists, tensors, numbers and str.

        All ranks of a ``dist`` store make the call; on those other than 0 the result
        has no keys.

        ``torch.save`` takes it, ``torch.load`` reads it with ``weights_only=True``, and
        ``torch.distributed.checkpoint`` takes the store itself. With a class of
        torch.optim, values and state are of one moment only if no thread pushes
        meanwhile.

        Raises:
            TypeError: the updater is a Python callable, which cannot be saved; in a
                ``dist`` store also if a class of torch.optim keeps other objects than
                tensors, numbers and strings.
        """
        return state_dict(self._impl)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Replaces the content by what :meth:`state_dict` returned.

        All ranks of a ``dist`` store make the call with the whole state, as rank 0 got
        it, or each with what it got itself. If one cannot load it, none does.

        An empty store without updater and optimizer becomes the saved one. Any other
        keeps its keys, and must have the state's shapes, dtypes and optimizer; the
        optimizer object continues with the state's numbers, and a TorchScript updater
        is replaced. The state of a class of torch.optim needs a store that has its
        keys, and the class as updater. Updates that other threads make meanwhile are
        lost.

        Args:
            state_dict: the state.
            strict: whether the keys must be the same. Otherwise keys that both have
                are loaded, and the others stay as they are.

        Raises:
            ValueError: missing or unexpected keys, another shape, dtype or optimizer,
                or an invalid part; keys missing in a ``dist`` store, even if not
                `strict`. Nothing has changed.
            RemoteError: another rank could not load it. Nothing has changed.
            TypeError: the store's updater is a Python callable.
        """
        self._optimizer = load_state_dict(self._impl, state_dict, strict)

    def save_optimizer_states(
        self, fname: str | os.PathLike[str], dump_optimizer: bool = False
    ) -> None:
        """Writes the optimizer's state to a file, complete or not at all, as in MXNet.

        Args:
            fname: the file, in an existing folder. ``torch.load(fname,
                weights_only=True)`` reads it.
            dump_optimizer: write the options, such as the learning rate, as well: the
                whole ``state_dict()`` of the optimizer. Otherwise loading keeps the
                options that the optimizer has then.

        Raises:
            ValueError: the store has no optimizer, or the path is empty.
            OSError: writing failed; an older file is unchanged.
        """
        op = "save_optimizer_states"
        state = self._required_optimizer(op).state_dict()
        if not dump_optimizer:
            state = without_options(state)
        write_whole(op, fname, lambda file: torch.save(state, file))

    def load_optimizer_states(
        self, fname: str | os.PathLike[str], strict: bool = True
    ) -> None:
        """Loads what :meth:`save_optimizer_states` wrote.

        Args:
            fname: the file.
            strict: whether its keys must be those of the store.

        Raises:
            ValueError: the store has no optimizer, the file is damaged or of another
                kind, or ``load_state_dict`` raises it. Nothing has changed.
            OSError: reading failed.
            RemoteError: another rank could not load its file. Nothing has changed.
        """
        op = "load_optimizer_states"
        optimizer = self._required_optimizer(op)
        with checked_together(self._impl, op):
            state = read_saved(op, fname, optimizer)
        optimizer.load_state_dict(state, strict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copies keys, values, type and TorchScript updater.

        Raises:
            TypeError: the updater is a Python callable, which cannot be copied.
        """
        store = self._of(_C.KVStore.from_state(self._impl.state()), self._extras())
        memo[id(self)] = store
        for name, value in self._attributes().items():
            setattr(store, name, copy.deepcopy(value, memo))
        return store

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles what ``copy.deepcopy`` copies.

        Raises:
            TypeError: the updater is a Python callable, which cannot be copied.
        """
        # As bytes: a process that is being spawned unpickles tensors by reference,
        # and those of a snapshot no longer exist by then.
        buffer = io.BytesIO()
        torch.save(self._impl.state(), buffer)
        state = buffer.getvalue()
        # The third item is what a subclass added, in pickle's form for slots.
        return (
            self.__class__._unpickle,
            (state, zlib.crc32(state), self._extras()),
            (None, self._attributes()),
        )

    @classmethod
    def _unpickle(
        cls, state: bytes, crc32: int, extras: Sequence[Sequence[Any]]
    ) -> Self:
        if zlib.crc32(state) != crc32:
            raise ValueError("load: the pickle is damaged: its checksum differs")
        with torch.device("cpu"):  # torch.load would use the default device
            loaded = torch.load(io.BytesIO(state), weights_only=True)
        return cls._of(_C.KVStore.from_state(loaded), extras)

    def _required_optimizer(self, op: str) -> StoreOptimizer:
        optimizer = self.optimizer
        if optimizer is None:
            raise ValueError(
                f"{op}: the store has no optimizer; call set_optimizer(...) first"
            )
        return optimizer

    def _extras(self) -> list[tuple[int, str, Any]]:
        optimizer = self.optimizer
        return [] if optimizer is None else optimizer._extras()

    def _attributes(self) -> dict[str, Any]:
        """What a subclass has added, in its ``__dict__`` or in slots."""
        in_dict, in_slots = cast(tuple[Any, Any], object.__getstate__(self))
        attributes = {**(in_dict or {}), **in_slots}
        del attributes["_impl"], attributes["_optimizer"]
        return attributes
