"""The gradients of a StoreEmbedding's rows, from ``backward`` to the step."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchkv import _C


class Rows(NamedTuple):
    """Distinct rows of a table, which one lookup has pulled."""

    ids: Tensor
    """In ascending order, int64, on the device of the values or in CPU memory."""
    values: Tensor
    """A leaf of autograd: its ``.grad`` has a row for each id, in this order. More rows
    at the end, without gradient, are padding."""


def sparse_rows(ids: Tensor, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A coalesced sparse tensor, of rows in ascending order of their distinct ids."""
    # torch 2.11 warns of unchecked invariants (issue 178274 of PyTorch) also where
    # torch.sparse_coo_tensor is told not to check them.
    made: Tensor = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        1,
        len(shape) - 1,
        shape,
        ids[None],
        rows,
        dtype=rows.dtype,
        layout=torch.sparse_coo,
        device=rows.device,
        is_coalesced=True,
    )
    return made


# Below so many rows, those of several lookups are merged by the step only.
_FEW_ROWS = 4096


class RowGradients:
    """Collects the rows that have a gradient, for any number of threads.

    A lookup whose graph is freed without ``backward``, as in a validation loop, leaves
    nothing behind. Without steps, gradients take at most the memory of the distinct
    rows, a few times.
    """

    def __init__(self) -> None:
        """Begins without gradients."""
        self.lock = threading.RLock()
        self._pulled: list[Rows] = []
        self._limit = _FEW_ROWS  # of rows that are not merged at once

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles without gradients, as those of a Parameter."""
        return RowGradients, ()

    def track(self, ids: Tensor, values: Tensor) -> None:
        """Adds rows as soon as ``backward`` has computed their gradient.

        The hook refers to the ids only: with the values, which it belongs to, it would
        be a cycle that keeps them until Python's garbage collector runs.
        """

        def add(values: Tensor) -> None:
            with self.lock:
                if not any(rows.values is values for rows in self._pulled):
                    self._pulled.append(Rows(ids, values))
                if sum(len(rows.ids) for rows in self._pulled) > self._limit:
                    merged = self.merged()
                    assert merged is not None
                    self._limit = max(_FEW_ROWS, 2 * len(merged.ids))

        values.requires_grad_()
        values.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]

    def add_empty(self, dim: int, dtype: torch.dtype) -> None:
        """Adds a gradient of no rows, which is one nevertheless."""
        values = torch.empty(0, dim, dtype=dtype, device="cpu", requires_grad=True)
        values.grad = torch.empty(0, dim, dtype=dtype, device="cpu")
        ids = torch.empty(0, dtype=torch.int64, device="cpu")
        with self.lock:
            self._pulled.append(Rows(ids, values))

    @torch.no_grad()
    def merged(self) -> Rows | None:
        """All rows with a gradient as one, or None: those of equal ids are added up.

        In the order of the calls of ``backward``, in the accumulation type.
        """
        with self.lock:
            pulled = [rows for rows in self._pulled if rows.values.grad is not None]
            if len(pulled) > 1:
                pulled = [_sum(pulled)]
                self.clear()
            self._pulled = pulled
            return pulled[0] if pulled else None

    def take(self) -> tuple[Tensor, Tensor] | None:
        """Removes the gradient, for one of several threads: ids and rows, or None."""
        with self.lock:
            rows = self.merged()
            if rows is None:
                return None
            gradient = gradient_of(rows)
            self.clear()
            return rows.ids, gradient

    def put_back(self, ids: Tensor, gradient: Tensor) -> None:
        """Adds what :meth:`take` has removed."""
        values = torch.zeros((), dtype=gradient.dtype, device=gradient.device)
        values = values.expand(gradient.shape).requires_grad_()
        values.grad = gradient
        with self.lock:
            self._pulled.insert(0, Rows(ids, values))

    def clear(self) -> None:
        """Drops the gradients."""
        with self.lock:
            for rows in self._pulled:
                # The graph may be kept for another backward, which accumulates into it.
                rows.values.grad = None
            self._pulled = []


def _sum(pulled: list[Rows]) -> Rows:
    # One of no rows (add_empty) is in CPU memory.
    model = next((rows for rows in pulled if len(rows.ids) != 0), pulled[0])
    first = model.values
    every = torch.cat([rows.ids.to(model.ids.device) for rows in pulled])
    ids, position = torch.unique(every, return_inverse=True)
    wide = _C.KVStore.state_dtype(first.dtype)
    shape = (len(ids), *first.shape[1:])
    total = torch.zeros(shape, dtype=wide, device=first.device)
    begin = 0
    for rows in pulled:
        end = begin + len(rows.ids)
        gradient = gradient_of(rows).to(total.device, wide)
        total.index_add_(0, position[begin:end].to(total.device), gradient)
        begin = end
    # Only the gradient matters, so all rows share the memory of one number.
    values = torch.zeros((), dtype=first.dtype, device=first.device).expand(shape)
    values.requires_grad_().grad = total.to(first.dtype)
    return Rows(ids, values)


def gradient_of(rows: Rows) -> Tensor:
    """The gradient of the rows, without that of the padding."""
    assert rows.values.grad is not None
    return rows.values.grad.detach()[: len(rows.ids)]
