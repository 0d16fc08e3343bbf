"""The methods of a Trainer that save and load."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from torchkv.arguments import StoreKey, listed
from torchkv.gathering import checked_together, gather
from torchkv.kvstore import KVStore
from torchkv.optim import StoreOptimizer
from torchkv.optim.saved import read_saved
from torchkv.optim.saved import renamed as renamed_optimizer
from torchkv.parameter_names import name_among, plain_name
from torchkv.registered import KVStoreBase
from torchkv.state.state_dict import renamed, with_residuals, without_compression
from torchkv.trainer.gradients import Gradients
from torchkv.trainer.weights import Weights


class States:
    """A base of :class:`torchkv.Trainer`, in which its methods are documented."""

    _num_replicas: int
    _parameters: dict[StoreKey, list[Tensor]]
    _store: KVStore
    _kvstore: KVStore | KVStoreBase | None
    _gradients: Gradients
    _weights: Weights

    @property
    def optimizer(self) -> StoreOptimizer:
        """The optimizer."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The weights, and the optimizer's options and state, per parameter.

        A copy, of dicts, lists, tensors, numbers and str, in the form of
        :meth:`torchkv.KVStore.state_dict`. ``torch.save`` takes it, ``torch.load``
        reads it with ``weights_only=True``, and ``torch.distributed.checkpoint`` takes
        the trainer itself. Names are without the ``_orig_mod.`` that ``torch.compile``
        adds. All ranks of a ``dist`` store make the call; on those other than 0 the
        result has no parameters. Schedulers have a state of their own, and a model's
        buffers, such as those of BatchNorm, are only in ``model.state_dict()``.

        Raises:
            TypeError: on a ``dist`` store, a class of ``torch.optim`` that keeps other
                objects than tensors, numbers and strings.
        """
        self._weights.store_all(self._gradients.trained())
        is_dist = self._store.type.startswith("dist")  # then a position for each rank
        positions = self._store.num_workers if is_dist else self._num_replicas
        state = with_residuals(self._store.state_dict(), positions)
        state = renamed(state, plain_name)
        if (parts := state["torch_optimizer"]) is not None:
            state["torch_optimizer"] = renamed_optimizer(parts, plain_name)
        return state

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Continues from what :meth:`state_dict` returned, bit for bit.

        The parameters of all replicas get the weights at once, also those that do not
        require gradients any more. Gradients stay.

        Args:
            state_dict: that of a trainer with the same parameters and the same kind of
                optimizer. All ranks of a ``dist`` store load the same, or each what it
                got itself; if one cannot, none does. One without gradient compression
                leaves the trainer's as it is; with ``update_on_kvstore=False``, so does
                each.
            strict: whether it must have all trained parameters, and no others than the
                trainer's. Otherwise parameters that both have are loaded.

        Raises:
            ValueError: missing or unexpected parameters, if `strict`, another shape,
                dtype or optimizer, or an invalid part. Nothing has changed.
            RemoteError: another rank could not load it. Nothing has changed.
            TypeError: as :meth:`state_dict`.
        """
        op = "load_state_dict"
        self._weights.store_all(self._gradients.trained())
        with checked_together(self._store._impl, op):
            if "format" not in state_dict:
                raise ValueError(
                    f"{op}: expected what a Trainer's state_dict() returned, but got a "
                    "dict without 'format', as those of models and optimizers"
                )
            names = [*self._parameters, *self._store.keys()]
            state_dict = renamed(state_dict, name_among(names))
            frozen = self._frozen_in(op, state_dict.get("keys"))
        if self._store is not self._kvstore:  # which has compressed already
            state_dict = without_compression(state_dict)
        self._weights.store_changed(frozen)
        with self._removed_on_error(frozen):
            self._store.load_state_dict(state_dict, strict)
        self._weights.store_loaded()

    def _frozen_in(self, op: str, saved: Any) -> list[StoreKey]:
        """The parameters that are no longer trained, but were in what rank 0 loads.

        Within :func:`checked_together`: other ranks may have loaded no keys.
        """
        keys = []
        if isinstance(saved, Mapping):
            keys = [k for k in self._parameters if k in saved and k not in self._store]
        if self._store.num_workers > 1:
            data = json.dumps(keys).encode()
            keys = json.loads(
                gather(self._store._impl, op, 0, data, to_all=True)[0].decode()
            )
        return keys

    @contextmanager
    def _removed_on_error(self, keys: list[StoreKey]) -> Iterator[None]:
        """Removes keys that were stored only to be loaded.

        Not on several machines, where other ranks may be lost.
        """
        try:
            yield
        except BaseException:
            if keys and self._store.num_workers == 1:
                self._weights.remove(keys)
            raise

    def save_states(self, fname: str | os.PathLike[str]) -> None:
        """Writes the optimizer's options and state, per parameter, to a file.

        All ranks of a ``dist`` store make the call, each with a file of its own.
        Weights are not included; save ``model.state_dict()`` as well. That has no
        table of a StoreEmbedding: save :meth:`state_dict` instead, which has all. The
        file is replaced atomically: after a failure or crash it is still the old one.

        Raises:
            OSError: what writing raised.
        """
        self._store.save_optimizer_states(fname, dump_optimizer=True)

    def load_states(self, fname: str | os.PathLike[str]) -> None:
        """Loads what :meth:`save_states` wrote, bit for bit.

        All ranks of a ``dist`` store make the call; if one cannot load its file, none
        does. Weights do not change; load the model's state before or afterwards. Of a
        file without options (``store.save_optimizer_states(fname)``) the trainer keeps
        its own.

        Raises:
            ValueError: a damaged file, or the state of another optimizer or of other
                parameters. Nothing has changed.
            OSError: what reading raised.
            RemoteError: another rank could not load its file. Nothing has changed.
        """
        op = "load_states"
        optimizer = self.optimizer
        self._weights.store_all(self._gradients.trained())
        with checked_together(self._store._impl, op):
            state = read_saved(op, fname, optimizer)
            saved = state.get("state")
            names = {}
            if isinstance(saved, Mapping):
                rename = name_among([*self._parameters, *self._store.keys()])
                names = {rename(name): None for name in saved}
            frozen = self._frozen_in(op, names)
            trained = {*self._store.keys(), *frozen}
            if isinstance(saved, Mapping) and names.keys() != trained:
                some = listed(sorted(trained.symmetric_difference(names), key=str))
                raise ValueError(
                    f"{op}: expected the state of the trainer's {len(trained)} "
                    f"parameters, but got that of {len(saved)}; only one of them has "
                    f"{some}"
                )
        self._weights.store_changed(frozen)
        with self._removed_on_error(frozen):
            optimizer.load_state_dict(state)
