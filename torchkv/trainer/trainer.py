"""gluon's Trainer: the parameters of a model, trained by an optimizer on a store."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from torchkv import _C
from torchkv.files import read_state
from torchkv.kvstore import KVStore, create
from torchkv.optim import StoreOptimizer
from torchkv.optim.built_in import BuiltIn
from torchkv.optim.groups import StoreKey, as_number, listed, shown
from torchkv.trainer.parameters import Params, collected

# Of optimizers whose rescale_grad a trainer has set: what it was, and what was set.
_rescaled: WeakKeyDictionary[StoreOptimizer, tuple[float, float]] = WeakKeyDictionary()


class Trainer:
    """Trains parameters with an optimizer on a store, as ``mxnet.gluon.Trainer`` does.

    ::

        trainer = torchkv.Trainer(model.parameters(), "adamw", {"learning_rate": 1e-3})
        for images, labels in loader:
            F.cross_entropy(model(images), labels).backward()
            trainer.step()

    A step is one call: a push of all gradients of all replicas, which the store adds up
    and steps on in one pass, and a pull of the new weights. It takes the place of
    buckets, which it outruns however small the parameters are: gradients are neither
    copied into a flat tensor first, nor weights out of one.

    A step uses gradients up: each ``.grad`` is None after it, so the next ``backward``
    writes new ones, as MXNet's does, and :meth:`zero_grad` is needed only where
    gradients are to be dropped without a step. What ``backward`` adds up between two
    steps counts in the second.

    A parameter's key in the store, and in :attr:`optimizer`, is its name or, where it
    came without, its position. One that stands several times (tied weights) has one
    key. Parameters with ``requires_grad=False`` are skipped, and trained from the
    first step at which that has changed. Weights that were written between two steps
    by other means, such as ``model.load_state_dict``, are noticed, by their version
    counter, and trained on; the optimizer's state stays. With replicas those of the
    first count. Writes in place through ``.data``, such as ``p.data.clamp_(0)``, leave
    that counter as it is, and are lost: write to the parameter itself instead,
    ``with torch.no_grad(): p.clamp_(0)``.

    With an optimizer that accumulates, each step's gradients are divided by the batch
    size of that step, in a pass of its own unless it is 1.

    With ``torch.amp.GradScaler`` the trainer stands where the optimizer does::

        trainer.zero_grad()  # a step that the scaler skipped has left its gradients
        scaler.scale(loss).backward()
        scaler.unscale_(trainer)  # only to look at gradients, or to clip them
        trainer.clip_grad_norm_(1.0)
        scaler.step(trainer)
        scaler.update()

    An infinity or NaN in a gradient of any replica skips the step of all parameters.
    ``torch.nn.utils.clip_grad_norm_`` would clip by the norm of one replica's share of
    a gradient; :meth:`clip_grad_norm_` takes that of the sum.
    """

    def __init__(
        self,
        params: Params,
        optimizer: str | StoreOptimizer | type[torch.optim.Optimizer],
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: str | KVStore | None = "device",
        compression_params: Mapping[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
    ) -> None:
        """Arguments in gluon's order, with gluon's defaults.

        Args:
            params: a module, its ``parameters()`` or ``named_parameters()``, a dict by
                name, or replicas: what :func:`torchkv.replicate` returned, or a list or
                tuple of modules of the same parameters. The other replicas get the
                first one's values. A ``ModuleList`` is a module.
            optimizer: as in :meth:`torchkv.KVStore.set_optimizer`: one of
                :mod:`torchkv.optim`, MXNet's name of one, or a class of
                :mod:`torch.optim`.
            optimizer_params: options, with a name or a class.
            kvstore: the type of a store to create, or an empty store. No two trainers
                can have the same one. None, for one replica only: no store between
                replicas, so ``update_on_kvstore`` is False.
            compression_params: not supported yet.
            update_on_kvstore: None and True: the optimizer runs on `kvstore`. False:
                `kvstore` only adds up gradients, which :meth:`allreduce_grads` writes
                back. :meth:`update` then steps once, on a store of the trainer's own
                in this process, and copies the weights to all replicas.

        Raises:
            ValueError: no parameters, one that is no leaf or not initialised yet,
                replicas that differ, one replica without the others, a store that is
                not empty or has an optimizer, or what ``set_optimizer`` refuses.
            KeyError: an optimizer whose groups or multipliers name no parameter.
            TypeError: params of another form, or arguments of another type.
            NotImplementedError: ``compression_params``, or a store type that is not
                there yet.
        """
        if optimizer_params is not None and not isinstance(optimizer_params, Mapping):
            raise TypeError(
                "Trainer: expected a dict as optimizer_params, but got "
                f"{type(optimizer_params).__name__}; the store goes by name: "
                "Trainer(params, optimizer, kvstore=...)"
            )
        if compression_params is not None:
            raise NotImplementedError("Trainer: compression_params not supported yet")
        self._parameters = collected(params)
        self._num_replicas = len(next(iter(self._parameters.values())))
        self._update_on_kvstore = update_on_kvstore is not False
        if kvstore is None:
            if update_on_kvstore or self._num_replicas > 1:
                raise ValueError(
                    "Trainer: expected a kvstore, which update_on_kvstore=True and "
                    f"several replicas need, but got None ({self._num_replicas} "
                    "replicas)"
                )
            self._update_on_kvstore = False
        self._kvstore = _empty_store(kvstore)
        # Where the optimizer runs and the weights are.
        store = self._kvstore if self._update_on_kvstore else create("device")
        assert store is not None
        self._store = store
        if isinstance(optimizer, StoreOptimizer):
            optimizer._check_names("Trainer", self._parameters)  # frozen ones, too
        store.set_optimizer(optimizer, **(optimizer_params or {}))
        # MXNet's: each step sets the optimizer's to this / batch_size.
        self._rescale = _own_rescale(self.optimizer)
        self._stamps: dict[StoreKey, tuple[int, int]] = {}
        # First replica's gradients that are the sum of all.
        self._sums: dict[StoreKey, ref[Tensor]] = {}
        # Those that are clipped, and the norm of all before.
        self._clipped: tuple[dict[StoreKey, ref[Tensor]], Tensor] | None = None
        self._last_norm: Tensor | None = None
        self._copy_first_to_others()
        self._take_weights(self._trained())
        self.optimizer._know(self._parameters)
        if self._kvstore is not None and not self._update_on_kvstore:
            self._kvstore.set_updater(None)
            self._enter_gradients(self._trained())

    # -- what it consists of

    @property
    def kvstore(self) -> KVStore | None:
        """The store between replicas, or None where there is none."""
        return self._kvstore

    @property
    def optimizer(self) -> StoreOptimizer:
        """The optimizer, for the schedulers of ``torch.optim.lr_scheduler``, too.

        Its ``set_param_groups``, ``set_lr_mult`` and ``set_wd_mult`` give parameters
        options of their own, by key. Its ``rescale_grad`` is set by each step; what it
        was before is what another trainer finds that gets the same object later.
        """
        optimizer = self._store.optimizer
        if optimizer is None:
            raise RuntimeError(
                "Trainer: expected the store to keep the trainer's optimizer, but it "
                "has another updater now"
            )
        return optimizer

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        """All parameters of all replicas, for ``torch.amp.GradScaler``.

        Read-only: options are in ``trainer.optimizer.param_groups``.
        """
        params = [p for copies in self._parameters.values() for p in copies]
        return (MappingProxyType({"params": params}),)

    @property
    def learning_rate(self) -> float:
        """The optimizer's learning rate, of its first group of keys."""
        return self.optimizer.lr

    def set_learning_rate(self, lr: float) -> None:
        """Sets :attr:`learning_rate`, from the next step on.

        Raises:
            ValueError: one that is negative, infinite or NaN; the old one stays.
            TypeError: one that is no number.
        """
        self.optimizer.lr = lr

    # -- training

    def step(self, batch_size: float = 1, ignore_stale_grad: bool = False) -> None:
        """Adds up the replicas' gradients and steps all parameters.

        Args:
            batch_size: gradients are divided by it; over all replicas. 1, the default,
                where the loss is a mean already.
            ignore_stale_grad: skip parameters without a gradient. Where only some
                replicas have one, these are added up.

        Raises:
            UserWarning: as an exception, like MXNet's: a parameter without a gradient
                since the last step. Nothing has changed.
            ValueError: a batch size that is not greater than 0 and finite.
            NotImplementedError: a sparse gradient.
        """
        size = _as_batch_size("step", batch_size)
        keys, gradients = self._fresh("step", ignore_stale_grad)
        if not self._update_on_kvstore:
            self._reduce(keys, gradients)
            gradients = [copies[:1] for copies in gradients]
        self._step(keys, gradients, size)

    def allreduce_grads(self) -> None:
        """Replaces each gradient by the sum of all replicas', to be looked at or cut.

        For ``update_on_kvstore=False``; :meth:`update` comes after it. Replicas without
        a gradient are left out.

        Raises:
            RuntimeError: the optimizer runs on the store.
        """
        self._check_local("allreduce_grads")
        keys, gradients = self._fresh("allreduce_grads", True)
        self._reduce(keys, gradients)
        self._sums = _firsts(keys, gradients)

    def update(self, batch_size: float = 1, ignore_stale_grad: bool = False) -> None:
        """Steps all parameters with the gradients that :meth:`allreduce_grads` left.

        Those of the first replica are used, and its new weights copied to the others.

        Args:
            batch_size: as in :meth:`step`.
            ignore_stale_grad: as in :meth:`step`.

        Raises:
            RuntimeError: the optimizer runs on the store.
            UserWarning, ValueError: as :meth:`step`.
        """
        self._check_local("update")
        size = _as_batch_size("update", batch_size)
        keys, gradients = self._fresh("update", ignore_stale_grad)
        self._step(keys, [copies[:1] for copies in gradients], size)

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Clips the next step by the norm of the gradients that it adds up.

        As :func:`torch.nn.utils.clip_grad_norm_`, for any number of replicas: the norm
        is that of the sum over replicas, of all parameters together, and every
        replica's gradients are multiplied in place by ``max_norm / (norm + 1e-6)`` if
        that is less than 1. A ``batch_size`` of :meth:`step` divides afterwards. With
        ``torch.amp.GradScaler``, call ``scaler.unscale_(trainer)`` before.

        Args:
            max_norm: the norm to clip to.
            norm_type: the p of the p-norm; ``inf`` is the largest absolute value.
            error_if_nonfinite: whether an infinite or NaN norm is an error.

        Returns:
            The norm before clipping, in fp64, on the first replica's device. See
            :attr:`grad_norm`, too.

        Raises:
            RuntimeError: `error_if_nonfinite`, and the norm is infinite or NaN.
                Nothing has changed.
            ValueError: a `max_norm` that is negative or NaN.
        """
        op = "clip_grad_norm_"
        limit = as_number(op, "max_norm", max_norm)
        if not limit >= 0:
            raise ValueError(
                f"{op}: expected a max_norm of at least 0, but got {max_norm!r}"
            )
        keys, gradients = self._fresh(op, True)
        norms = [
            _norm_of(
                copies[0] if _is(self._sums.get(key), copies[0]) else _sum_of(copies),
                norm_type,
            )
            for key, copies in zip(keys, gradients, strict=True)
        ]
        device = next(iter(self._parameters.values()))[0].device
        norm = torch.zeros((), dtype=torch.float64, device=device)
        if norms:
            norm = _norm_of(torch.stack([x.to(device) for x in norms]), norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"{op}: expected gradients of a finite norm, but got one of "
                f"{norm.item()}; error_if_nonfinite=False clips by it all the same"
            )
        parameters = [p for copies in self._parameters.values() for p in copies]
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        self._clipped = _firsts(keys, gradients), norm
        return norm

    @property
    def grad_norm(self) -> float | None:
        """The norm of the last step's gradients, before they were clipped.

        What :meth:`clip_grad_norm_` returned for it or, without a call of that, the
        optimizer's :attr:`~torchkv.optim.StoreOptimizer.grad_norm`. None where neither
        was computed. Waits for the device that has it.
        """
        if self._last_norm is not None:
            return float(self._last_norm)
        return self.optimizer.grad_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of all replicas, or with False fills them with zeros."""
        self._forget_gradients()
        for copies in self._parameters.values():
            for parameter in copies:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.detach_().zero_()

    # -- state

    def save_states(self, fname: str | os.PathLike[str]) -> None:
        """Writes the optimizer's options and state, per parameter, into a file.

        Weights are not in it: save ``model.state_dict()``, too. The file is complete
        or, if this fails or the machine stops, the old one.

        Raises:
            OSError: what writing raised.
        """
        self._store.save_optimizer_states(fname)

    def load_states(self, fname: str | os.PathLike[str]) -> None:
        """Brings back what :meth:`save_states` wrote, bit by bit.

        Weights do not change; load the model's before or after it.

        Raises:
            ValueError: a damaged file, a state of another optimizer, or of other
                parameters. Nothing has changed.
            OSError: what reading raised.
        """
        op = "load_states"
        state = read_state(op, fname)
        self._take_weights(self._changed(self._trained()))
        saved, trained = state.get("state"), set(self._store.keys())
        if isinstance(saved, Mapping) and saved.keys() != trained:
            some = listed(sorted(saved.keys() ^ trained, key=str))
            raise ValueError(
                f"{op}: expected the state of the trainer's {len(trained)} parameters, "
                f"but got that of {len(saved)}; only one of them has {some}"
            )
        self.optimizer.load_state_dict(state)

    def __repr__(self) -> str:
        """``Trainer(4 parameters, 2 replicas, AdamW(lr=0.001, ...))``."""
        return (
            f"Trainer({len(self._parameters)} parameters, {self._num_replicas} "
            f"replicas, {self.optimizer!r})"
        )

    # -- the parts of a step

    def _check_local(self, op: str) -> None:
        if self._update_on_kvstore:
            raise RuntimeError(
                f"{op}: expected a trainer whose optimizer does not run on the store, "
                "but got one with update_on_kvstore=True; call step(), or set "
                "update_on_kvstore=False when creating the trainer"
            )

    def _trained(self) -> list[StoreKey]:
        parameters = self._parameters.items()
        return [key for key, copies in parameters if copies[0].requires_grad]

    def _fresh(
        self, op: str, ignore_stale: bool
    ) -> tuple[list[StoreKey], list[list[Tensor]]]:
        """The keys that have gradients, and the gradients."""
        keys, gradients = [], []
        for key in self._trained():
            copies = self._parameters[key]
            found = [p.grad for p in copies if p.grad is not None]
            if len(found) < len(copies) and not ignore_stale:
                replica = [p.grad is None for p in copies].index(True)
                raise UserWarning(
                    f"{op}: expected a gradient from backward() since the last step, "
                    f"but got none (key {shown(key)}, replica {replica}); if the model "
                    "uses only some of its parameters on purpose, "
                    "ignore_stale_grad=True skips those without a gradient"
                )
            if found:
                keys.append(key)
                gradients.append(found)
        return keys, gradients

    def _reduce(self, keys: list[StoreKey], gradients: list[list[Tensor]]) -> None:
        store = self._kvstore
        if store is None or not keys or self._num_replicas * store.num_workers == 1:
            return
        self._enter_gradients([key for key in keys if key not in store])
        store.pushpull(keys, gradients)

    def _step(
        self, keys: list[StoreKey], gradients: list[list[Tensor]], size: float
    ) -> None:
        if not keys:
            return
        self._take_weights(self._changed(keys))
        optimizer = self.optimizer
        scaled: float | None = None
        if not isinstance(optimizer, BuiltIn) or optimizer.accumulate > 1:
            # rescale_grad is for all that has accumulated, of batches of any size.
            scaled = None if size == 1 else 1 / size
            size = 1.0
        if isinstance(optimizer, BuiltIn):
            rescale = self._rescale / size
            if optimizer.rescale_grad != rescale:
                optimizer.rescale_grad = rescale
                _rescaled[optimizer] = self._rescale, rescale
        weights = [self._parameters[key] for key in keys]
        clipped, norm = self._clipped or ({}, None)
        for key, copies in zip(keys, gradients, strict=True):
            if not _is(clipped.get(key), copies[0]):
                norm = None
        if scaled is not None:
            gradients = [_times(scaled, copies) for copies in gradients]
        num_skipped = optimizer.num_skipped
        self._store.pushpull(keys, gradients, weights)
        if optimizer.num_skipped == num_skipped:
            self._last_norm = norm
        self._forget_gradients()
        for key, copies in zip(keys, weights, strict=True):
            self._stamps[key] = _stamp(copies[0])
            for parameter in copies:
                parameter.grad = None

    def _forget_gradients(self) -> None:
        self._sums, self._clipped = {}, None

    def __getstate__(self) -> dict[str, Any]:
        """All but what is known of gradients, which refers to objects weakly."""
        return {**self.__dict__, "_sums": {}, "_clipped": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Lets the copy's optimizer know the parameters, as the constructor does."""
        self.__dict__.update(state)
        self.optimizer._know(self._parameters)

    # -- between model and store

    def _changed(self, keys: list[StoreKey]) -> list[StoreKey]:
        """Keys whose weights are not those that the last step wrote."""
        return [
            key
            for key in keys
            if self._stamps.get(key) != _stamp(self._parameters[key][0])
        ]

    def _take_weights(self, keys: list[StoreKey]) -> None:
        """Makes the first replica's weights the stored ones; state stays."""
        if not keys:
            return
        store = self._store
        values = [self._parameters[key][0].detach() for key in keys]
        known = [key for key in keys if key in store]
        if not known:
            store.init(keys, values)
        else:
            optimizer, before = self.optimizer, store.pull(known)
            saved = optimizer.state_dict()
            states = {key: dict(saved["state"][key]) for key in known}
            for key, value in zip(keys, values, strict=True):
                if key in states and isinstance(optimizer, BuiltIn):
                    _renew_master(states[key], value)
            store.delete(known)
            try:
                store.init(keys, values)
                optimizer.load_state_dict({**saved, "state": states}, strict=False)
            except BaseException:  # a weight of another shape than its state, say
                store.delete([key for key in keys if key in store])
                store.init(known, before)
                optimizer.load_state_dict(saved, strict=False)
                raise
        for key in keys:
            self._stamps[key] = _stamp(self._parameters[key][0])

    def _enter_gradients(self, keys: list[StoreKey]) -> None:
        if keys and self._kvstore is not None:
            weights = [self._parameters[key][0] for key in keys]
            self._kvstore.init(keys, [torch.zeros_like(w) for w in weights])

    @torch.no_grad()
    def _copy_first_to_others(self) -> None:
        for first, *others in self._parameters.values():
            for parameter in others:
                parameter.copy_(first)


def _as_batch_size(op: str, batch_size: Any) -> float:
    number = as_number(op, "batch_size", batch_size)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(
            f"{op}: expected a batch_size greater than 0 that is finite, but got "
            f"{batch_size!r}"
        )
    return number


def _times(scale: float, gradients: list[Tensor]) -> list[Tensor]:
    """Gradients, scaled in the dtype in which they will be added up."""
    kept = [
        gradient.to(_C.KVStore.state_dtype(gradient.dtype)) for gradient in gradients
    ]
    return list(torch._foreach_mul(kept, scale))


def _firsts(
    keys: Iterable[StoreKey], gradients: Iterable[list[Tensor]]
) -> dict[StoreKey, ref[Tensor]]:
    """The first replica's gradients, to be recognized later."""
    return {k: ref(copies[0]) for k, copies in zip(keys, gradients, strict=True)}


def _is(known: ref[Tensor] | None, gradient: Tensor) -> bool:
    return known is not None and known() is gradient


def _norm_of(total: Tensor, norm_type: float) -> Tensor:
    """A p-norm in fp64; of fp64 elements, too, whose squares overflow."""
    dtype = torch.complex128 if total.is_complex() else torch.float64
    if total.dtype != dtype or total.numel() == 0 or norm_type == 0:
        norm: Tensor = torch.linalg.vector_norm(total, norm_type, dtype=dtype)
        return norm
    largest = torch.linalg.vector_norm(total, math.inf)
    scale = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)
    norm = torch.linalg.vector_norm(total / scale, norm_type) * scale
    return norm


def _sum_of(copies: list[Tensor]) -> Tensor:
    """The sum of replicas' gradients, as the store adds them up."""
    first, *others = copies
    if not others:
        return first
    total = first.to(_C.KVStore.state_dtype(first.dtype), copy=True)
    for other in others:
        total += other.to(total.device, total.dtype)
    return total


def _own_rescale(optimizer: StoreOptimizer) -> float:
    """The user's rescale_grad, also where another trainer has set its own."""
    if not isinstance(optimizer, BuiltIn):
        return 1.0
    before, last_set = _rescaled.get(optimizer, (None, None))
    present = optimizer.rescale_grad
    return present if before is None or present != last_set else before


def _stamp(parameter: Tensor) -> tuple[int, int]:
    """Another one after each write in place, and each exchange of ``.data``."""
    return parameter.data_ptr(), parameter._version


def _renew_master(state: dict[str, Any], value: Tensor) -> None:
    """Makes a saved state's fp32 copy that of a new value of half precision.

    One that rounds to the value stays: it has more bits of the same weights.
    """
    kept = _C.KVStore.state_dtype(value.dtype)
    master = state.pop("master", None)
    if kept == value.dtype:
        return
    if master is None or not torch.equal(master.to(value), value):
        master = value.to(kept)
    state["master"] = master


def _empty_store(kvstore: Any) -> KVStore | None:
    if kvstore is None:
        return None
    if isinstance(kvstore, str):
        return create(kvstore)
    if not isinstance(kvstore, KVStore):
        raise TypeError(
            "Trainer: expected a store or the type of one as kvstore, but got "
            f"{type(kvstore).__name__}"
        )
    if len(kvstore) > 0 or kvstore.optimizer is not None:
        raise ValueError(
            "Trainer: expected a store without keys and optimizer, but got "
            f"{kvstore!r}; make one for each trainer"
        )
    return kvstore
