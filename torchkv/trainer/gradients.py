"""The gradients of a Trainer's next step: reduced, clipped and scaled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from torchkv import _C
from torchkv.arguments import StoreKey, as_number, shown
from torchkv.kvstore import KVStore
from torchkv.optim import StoreOptimizer
from torchkv.optim.built_in import BuiltIn
from torchkv.registered import KVStoreBase
from torchkv.trainer.embeddings import Embeddings

# The user's rescale_grad of each optimizer, and the one that a trainer has set.
_rescaled: WeakKeyDictionary[StoreOptimizer, tuple[float, float]] = WeakKeyDictionary()


class Rescale:
    """Sets ``rescale_grad`` to the user's value / batch size, as MXNet does."""

    def __init__(self, optimizer: StoreOptimizer) -> None:
        """Takes the user's ``rescale_grad``, even if another trainer has set it."""
        self._own = 1.0
        if isinstance(optimizer, BuiltIn):
            present = optimizer.rescale_grad
            own, last_set = _rescaled.get(optimizer, (present, present))
            self._own = own if present == last_set else present

    def by(self, optimizer: StoreOptimizer, batch_size: float) -> float:
        """Divides a step by a batch size; returns what remains for its gradients."""
        if not isinstance(optimizer, BuiltIn):
            return 1 / batch_size
        # It applies to all accumulated gradients, whose batch sizes may differ.
        in_place = optimizer.accumulate > 1
        rescale = self._own if in_place else self._own / batch_size
        if optimizer.rescale_grad != rescale:
            optimizer.rescale_grad = rescale
            _rescaled[optimizer] = self._own, rescale
        return 1 / batch_size if in_place else 1.0


class Gradients:
    """The gradients of all replicas, and which of them are reduced or clipped.

    Tensors are recognized by weak references: another ``backward`` makes new ones.
    """

    def __init__(
        self,
        parameters: Mapping[StoreKey, list[Tensor]],
        embeddings: Embeddings,
        store: KVStore | KVStoreBase | None,
    ) -> None:
        """Of all replicas; `store` is only used to sum them, and may be None."""
        self._parameters = parameters
        self._embeddings = embeddings
        self._store = store
        if isinstance(store, KVStore):
            store.set_updater(None)
            self.init(self.trained())
        elif store is not None:
            values = {
                k: [p.detach() for p in copies] for k, copies in parameters.items()
            }
            firsts = [copies[0] for copies in values.values()]
            store.broadcast(list(values), firsts, list(values.values()))
        self.forget()

    def forget(self) -> None:
        """Forgets what was reduced and clipped."""
        # The first replica's gradients.
        self._reduced: dict[StoreKey, ref[Tensor]] = {}
        self._clipped: dict[StoreKey, ref[Tensor]] = {}
        self._norm: Tensor | None = None  # before clipping

    def zero(self, keys: Iterable[StoreKey], set_to_none: bool = True) -> None:
        """Sets the gradients of parameters, and those of embeddings, to None or 0."""
        self.forget()
        self._embeddings.zero_grad(set_to_none)
        for key in keys:
            for parameter in self._parameters[key]:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.detach_().zero_()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles without the weak references."""
        names = "_parameters", "_embeddings", "_store"
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begins without reduced and clipped gradients."""
        self.__dict__.update(state)
        self.forget()

    def fresh(self, op: str, ignore_stale: bool) -> dict[StoreKey, list[Tensor]]:
        """The gradients of the trained parameters and embeddings, by replica.

        Raises:
            UserWarning: a replica without a gradient, unless `ignore_stale`.
        """
        result = {}
        stale = []
        num_trained = len(self.trained()) + len(self._embeddings.trained())
        for key in self.trained():
            copies = self._parameters[key]
            found = [p.grad for p in copies if p.grad is not None]
            if len(found) < len(copies) and not ignore_stale:
                replica = [p.grad is None for p in copies].index(True)
                stale.append(f"{shown(key)}, replica {replica}")
            if found:
                result[key] = found
        for key in self._embeddings.trained():
            found, without = self._embeddings.gradients(key)
            if without is not None and not ignore_stale:
                stale.append(f"{shown(key)}, replica {without}")
            if found:
                result[key] = found
        if stale:
            raise UserWarning(
                f"{op}: expected a gradient of each parameter from backward() since "
                f"the last step, but got none for {len(stale)} of "
                f"{num_trained} (key {'; key '.join(stale)}); if the model "
                "only uses some of its parameters on purpose, ignore_stale_grad=True "
                "skips those without a gradient"
            )
        return result

    def trained(self) -> list[StoreKey]:
        """The keys of parameters that require gradients."""
        parameters = self._parameters.items()
        return [key for key, copies in parameters if copies[0].requires_grad]

    def init(self, keys: Iterable[StoreKey]) -> None:
        """Adds keys to the store that sums gradients, if it has keys.

        With several processes, all get rank 0's weights: what it holds does not matter.
        """
        if isinstance(self._store, KVStore):
            new = [key for key in keys if key not in self._store]
            if new and self._store.num_workers > 1:
                values = [self._parameters[key][0].detach() for key in new]
                self._store.broadcast(new, values, [self._parameters[k] for k in new])
            elif new:
                values = [torch.zeros_like(self._parameters[key][0]) for key in new]
                self._store.init(new, values)

    def reduce(self, fresh: Mapping[StoreKey, list[Tensor]]) -> None:
        """Replaces each replica's gradients by the sum of all."""
        if self._store is not None and fresh:
            num_replicas = len(self._parameters[next(iter(fresh))])
            if (
                num_replicas * self._store.num_workers > 1
                or getattr(self._store, "gradient_compression", None) is not None
            ):
                self.init(fresh)
                self._store.pushpull(list(fresh), list(fresh.values()))
        self._reduced = self._firsts(fresh)

    @torch.no_grad()
    def clip(
        self, max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> Tensor:
        """Clips all gradients by the total norm of the sum over replicas."""
        op = "clip_grad_norm_"
        limit = as_number(op, "max_norm", max_norm)
        if not limit >= 0:
            raise ValueError(
                f"{op}: expected a max_norm of at least 0, but got {max_norm!r}"
            )
        fresh = self.fresh(op, True)
        norms = [
            _norm_of(
                copies[0] if self._is(self._reduced, key, copies) else _sum(copies),
                norm_type,
            )
            for key, copies in fresh.items()
        ]
        parameters = self.tensors()
        device = parameters[0].device if parameters else None
        norm = torch.zeros((), dtype=torch.float64, device=device)
        if norms:
            norm = _norm_of(torch.stack([x.to(device) for x in norms]), norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"{op}: expected gradients of a finite norm, but got one of "
                f"{norm.item()}; error_if_nonfinite=False clips by it anyway"
            )
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        self._clipped, self._norm = self._firsts(fresh), norm
        return norm

    def norm_before_clipping(
        self, fresh: Mapping[StoreKey, list[Tensor]]
    ) -> Tensor | None:
        """The norm that :meth:`clip` returned for these gradients, or None."""
        if all(self._is(self._clipped, *item) for item in fresh.items()):
            return self._norm
        return None

    def tensors(self) -> list[Tensor]:
        """All parameters of all replicas, and embeddings' rows with gradients."""
        parameters = [p for copies in self._parameters.values() for p in copies]
        return parameters + self._embeddings.rows_with_grad()

    def _firsts(
        self, gradients: Mapping[StoreKey, list[Tensor]]
    ) -> dict[StoreKey, ref[Tensor]]:
        return {key: ref(self._first(key, gradients[key])) for key in gradients}

    def _is(
        self,
        known: Mapping[StoreKey, ref[Tensor]],
        key: StoreKey,
        copies: list[Tensor],
    ) -> bool:
        return key in known and known[key]() is self._first(key, copies)

    def _first(self, key: StoreKey, copies: list[Tensor]) -> Tensor:
        """The first gradient or, as those of embeddings are made anew, their rows'."""
        return self._embeddings.first_of(key) if key in self._embeddings else copies[0]


def scaled(gradients: list[Tensor], scale: float) -> list[Tensor]:
    """Multiplies gradients in their accumulation type, and leaves them in it."""
    dtypes = [_C.KVStore.state_dtype(gradient.dtype) for gradient in gradients]
    wide = [g.to(dtype) for g, dtype in zip(gradients, dtypes, strict=True)]
    return list(torch._foreach_mul(wide, scale))


def _norm_of(total: Tensor, norm_type: float) -> Tensor:
    """A p-norm in fp64; fp64 elements are scaled, as their squares may overflow."""
    if total.is_sparse:
        total = total.coalesce().values()
    dtype = torch.complex128 if total.is_complex() else torch.float64
    if total.dtype != dtype or total.numel() == 0 or norm_type == 0:
        norm: Tensor = torch.linalg.vector_norm(total, norm_type, dtype=dtype)
        return norm
    largest = torch.linalg.vector_norm(total, math.inf)
    scale = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)
    norm = torch.linalg.vector_norm(total / scale, norm_type) * scale
    return norm


def _sum(copies: list[Tensor]) -> Tensor:
    """The sum of replicas' gradients, as the store computes it."""
    first, *others = copies
    if not others:
        return first
    total = first.to(_C.KVStore.state_dtype(first.dtype), copy=True)
    for other in others:
        other = other.to(total.device, total.dtype)
        # A sparse tensor takes no dense one in place.
        total = other + total if total.is_sparse else total.add_(other)
    return total
