"""An embedding whose table is a value of a store."""

from __future__ import annotations

import operator
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchkv import _C
from torchkv.arguments import StoreKey, as_batch_size, expect, is_int, shown
from torchkv.initializers import Initializer, Normal
from torchkv.kvstore import Key, KVStore
from torchkv.nn.row_gradients import RowGradients, gradient_of, sparse_rows

_MODES = ("sum", "mean", "max")
# The elements of a shape, of a sparse tensor, too. A key whose rows are unlimited has
# the shape of as many as fit.
_MOST_ELEMENTS = 2**63 - 1


class StoreEmbedding(nn.Module):
    """``nn.Embedding`` and ``nn.EmbeddingBag`` with the table in a store.

    ::

        store = torchkv.create("local")
        model = Model(torchkv.nn.StoreEmbedding(None, 64, store, "table"))
        trainer = torchkv.Trainer(model, "adam", {"lr": 1e-3}, kvstore=store)
        for ids, labels in loader:
            F.cross_entropy(model(ids), labels).backward()
            trainer.step()

    A lookup pulls the distinct rows of the batch, and ``backward`` records their
    gradients. The next step pushes those of all lookups since the last one, as one
    sparse tensor of distinct rows: :meth:`torchkv.Trainer.step`, or :meth:`push` in a
    loop without a trainer. So ids that are not in a batch cost nothing. The store's
    optimizer steps the rows that were pushed (:meth:`torchkv.KVStore.push`).

    Several modules may have one key of one store: replicas, or an input and an output
    embedding. :func:`torchkv.replicate` makes replicas that share the store.

    The module has no parameters: the table is not in ``parameters()`` nor in the
    module's ``state_dict()``, but in the store and in that of the trainer. The
    methods :meth:`zero_grad` and ``requires_grad_`` of a module that contains this one
    do not reach it: call its own, or :meth:`torchkv.Trainer.zero_grad`. ``to()`` has no
    effect: outputs are on the device of the ids, in the dtype of the table. Copies and
    pickles have a copy of the whole store, which the modules of one model share, and no
    gradients.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        store: KVStore,
        key: Key,
        *,
        padding_idx: int | None = None,
        mode: str | None = None,
        include_last_offset: bool = False,
        dtype: torch.dtype | None = None,
        init: Initializer | None = None,
    ) -> None:
        """Uses a key, dense or row-sparse, or makes a row-sparse one.

        Args:
            num_embeddings: the number of rows; ids are from 0 to it less 1. None: that
                of the key or, of a new key, as many as fit into 2**63 - 1 elements.
            embedding_dim: the number of elements of a row.
            store: where the table is. On several machines, all ranks make the module,
                and rank 0's `init` counts.
            key: the table's key. If the store has it, its value of shape
                ``(num_embeddings, embedding_dim)`` is the table. If not, the module
                calls ``store.init_rows``, and a row exists once it has a gradient.
            padding_idx: an id whose output is zeros, whatever the table has, and which
                gets no gradient; bags leave it out. May be negative, from the end, if
                the number of rows is known.
            mode: None: a row for each id, as ``nn.Embedding``. ``"sum"``, ``"mean"`` or
                ``"max"``: one for each bag of ids, as ``nn.EmbeddingBag``.
            include_last_offset: as in ``nn.EmbeddingBag``: the last offset is the end.
            dtype: of the table, floating-point. None: that of the key or, of a new key,
                torch's default dtype.
            init: the initial value of rows of a new key, of
                :mod:`torchkv.initializers`. None: normally distributed with mean 0 and
                variance 1, as in ``nn.Embedding``, with a seed from torch's random
                number generator. Not used if the store has the key.

        Raises:
            ValueError: the store's value has another shape or dtype, a number that is
                not positive, 2**63 elements or more, an unknown mode,
                `include_last_offset` without a mode, or a `padding_idx` that is not a
                row.
            TypeError: an argument of the wrong type, or a dtype that is not
                floating-point.
            Exception: what ``store.init_rows`` raises.
        """
        super().__init__()
        op = "StoreEmbedding"
        expect(op, store, KVStore, "a store of torchkv's")
        self.store = store
        self.key: StoreKey = _C.KVStore.key_of(op, key)
        where = f" (key {shown(self.key)})"
        embedding_dim = _as_int("an int as embedding_dim", embedding_dim, where)
        if num_embeddings is not None:
            what = "an int or None as num_embeddings"
            num_embeddings = _as_int(what, num_embeddings, where)
        if padding_idx is not None:
            padding_idx = _as_int("an int or None as padding_idx", padding_idx, where)
        expect(op, dtype, torch.dtype | None, "a torch.dtype or None as dtype", where)
        for name, count in (
            ("num_embeddings", num_embeddings),
            ("embedding_dim", embedding_dim),
        ):
            if count is not None and count < 1:
                raise ValueError(
                    f"{op}: expected {name} above 0, but got {count}{where}"
                )
        if (num_embeddings or 0) * embedding_dim > _MOST_ELEMENTS:
            raise ValueError(
                f"{op}: expected less than 2**63 elements, but got {num_embeddings} "
                f"rows of {embedding_dim}; None allows any ids{where}"
            )
        if mode is not None and mode not in _MODES:
            known = ", ".join(map(repr, _MODES))
            raise ValueError(
                f"{op}: unknown mode {mode!r}; expected None or one of {known}{where}"
            )
        if include_last_offset and mode is None:
            raise ValueError(
                f"{op}: include_last_offset needs a mode, but got None{where}"
            )
        self.embedding_dim = embedding_dim
        self.mode = mode
        self.include_last_offset = include_last_offset
        is_new = self.key not in store
        self.dtype = dtype or torch.get_default_dtype()
        self.num_embeddings = num_embeddings
        if not is_new:
            self._take_shape(dtype)
        if not self.dtype.is_floating_point:
            raise TypeError(
                f"{op}: expected a floating-point dtype, but got {self.dtype}{where}"
            )
        self.padding_idx = self._checked_padding(padding_idx)
        if is_new:
            self._init_rows(init)
        self._requires_grad = True
        self._gradients = RowGradients()

    def _take_shape(self, dtype: torch.dtype | None) -> None:
        """Of the store's value; ValueError if it is not such a table."""
        shape, stored = self.store.shape(self.key), self.store.dtype(self.key)
        rows = self.num_embeddings
        expected = (shape[0] if rows is None and shape else rows, self.embedding_dim)
        if tuple(shape) != expected:
            raise ValueError(
                "StoreEmbedding: expected a value of shape "
                f"({'any' if rows is None else rows}, {self.embedding_dim}), but got "
                f"{tuple(shape)} (key {shown(self.key)})"
            )
        if dtype not in (None, stored):
            raise ValueError(
                f"StoreEmbedding: expected a value of {dtype}, but got {stored} "
                f"(key {shown(self.key)})"
            )
        self.dtype = stored
        self.num_embeddings = shape[0] if shape[0] < self._most_rows else None

    def _init_rows(self, init: Initializer | None) -> None:
        if init is None:
            seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
            init = Normal(seed=seed)
        self.store.init_rows(
            self.key,
            (self.embedding_dim,),
            dtype=self.dtype,
            num_rows=self.num_embeddings,
            init=init,
        )

    @property
    def _most_rows(self) -> int:
        return _MOST_ELEMENTS // self.embedding_dim

    def _checked_padding(self, index: int | None) -> int | None:
        if index is None:
            return None
        rows = self.num_embeddings
        low, high = (0, self._most_rows) if rows is None else (-rows, rows)
        if not low <= index < high:
            raise ValueError(
                f"StoreEmbedding: expected a padding_idx from {low} to {high - 1}, but "
                f"got {index} (key {shown(self.key)})"
            )
        return index + (rows or 0) if index < 0 else index

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Looks up rows, or bags of them.

        Args:
            input: ids, int32 or int64, of any shape and on any device. With a mode:
                bags of shape (B, N), or of shape (N) with `offsets`.
            offsets: with a mode, and an input of one dimension: where each bag begins,
                of shape (B), or (B + 1) with ``include_last_offset``.
            per_sample_weights: with the mode ``"sum"``: a weight for each id, of the
                input's shape and the table's dtype.

        Returns:
            ``(*input.shape, embedding_dim)`` or, with a mode, ``(B, embedding_dim)``,
            of the table's dtype, on the input's device.

        Raises:
            IndexError: an id that is not a row of the table.
            TypeError: an input of another dtype.
            ValueError: offsets or weights without a mode; with one, what
                ``F.embedding_bag`` raises.
            RuntimeError: the store is closed, or a tracer runs.
        """
        if self.mode is None and not (offsets is None and per_sample_weights is None):
            raise ValueError(
                "StoreEmbedding: expected ids only, as its mode is None, but got "
                f"offsets or per_sample_weights (key {shown(self.key)})"
            )
        positions, rows, padding = self._pull(input)
        if self.mode is None:
            return F.embedding(positions, rows, padding)
        return F.embedding_bag(
            positions,
            rows,
            None if offsets is None else offsets.to(torch.int64),
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )

    def _pull(self, input: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """Positions among the distinct rows, these, and the position of the padding."""
        if input.dtype not in (torch.int32, torch.int64):
            raise TypeError(
                "StoreEmbedding: expected ids of torch.int32 or torch.int64, but got "
                f"{input.dtype} (key {shown(self.key)})"
            )
        # On the ids' device, so that at most distinct ones are copied.
        ids, positions = torch.unique(
            input.detach().to(torch.int64), return_inverse=True
        )
        if self._row_device(ids) != ids.device:
            ids = ids.to("cpu")
        padding = None
        if self.padding_idx is not None:
            found = (ids == self.padding_idx).nonzero()
            if len(found) != 0:
                at = int(found)
                ids = torch.cat([ids[:at], ids[at + 1 :]])
                padding = len(ids)
                moved = positions - (positions > at).to(torch.int64)
                positions = torch.where(positions == at, padding, moved)
        num_padding = 0 if padding is None else 1
        shape = len(ids) + num_padding, self.embedding_dim
        rows = torch.empty(shape, dtype=self.dtype, device=input.device)
        self.store.row_sparse_pull(self.key, rows[: len(ids)], row_ids=ids)
        rows[len(ids) :] = 0
        if self._requires_grad and torch.is_grad_enabled():
            self._gradients.track(ids, rows)
        return positions, rows, padding

    # -- gradients

    @property
    def grad(self) -> Tensor | None:
        """The gradient of all lookups since the last step, or None.

        A coalesced ``torch.sparse_coo`` tensor of the table's dtype, of shape
        ``(num_embeddings, embedding_dim)``; without a number of rows, of as many as a
        tensor can have. It is on the GPU where the table is, if lookups were on GPUs,
        so that a push does not move the table; else in CPU memory, as for a row-sparse
        table, and for one that is split over several devices. Changing ``.grad`` of
        :meth:`rows_with_grad` changes it.
        """
        with self._gradients.lock:
            rows = self._gradients.merged()
            return None if rows is None else self._sparse(rows.ids, gradient_of(rows))

    def _row_device(self, tensor: Tensor) -> torch.device:
        """Where the store works on the table's rows: a CPU tensor needs no answer."""
        if tensor.is_cpu:
            return tensor.device
        return self.store._impl.row_device(self.key)

    def _sparse(self, ids: Tensor, rows: Tensor) -> Tensor:
        device = self._row_device(rows)
        shape = self.num_embeddings or self._most_rows, self.embedding_dim
        return sparse_rows(ids.to(device), rows.to(device), shape)

    def rows_with_grad(self) -> list[Tensor]:
        """A tensor whose ``.grad`` is the gradient of the next step, if there is one.

        For programs that work on the gradients of parameters, as
        ``nn.utils.clip_grad_norm_([*model.parameters(), *table.rows_with_grad()], 1)``.
        ``.grad`` is dense, with one row for each distinct id of the batch. A trainer
        does this by itself.
        """
        rows = self._gradients.merged()
        return [] if rows is None else [rows.values]

    def push(self, batch_size: float = 1) -> None:
        """Pushes the gradient, with which the store steps, in a loop without a Trainer.

        Args:
            batch_size: the gradient is divided by it; with ``torch.amp.GradScaler``,
                pass ``scaler.get_scale()``, and give the optimizer
                ``skip_nonfinite=True``.

        Raises:
            RuntimeError: ``backward`` has computed no gradient since the last push, or
                the store has neither optimizer nor updater.
            ValueError: a batch size that is not greater than 0 and finite.
        """
        size = as_batch_size("push", batch_size)
        if self._gradients.merged() is not None and (
            self.store._impl.optimizer() is None
        ):
            raise RuntimeError(
                "push: expected a store with an optimizer, as the gradient would "
                f"replace the table, but got {self.store!r}; call set_optimizer(...) "
                f"first (key {shown(self.key)})"
            )
        taken = self._gradients.take()
        if taken is None:
            raise RuntimeError(
                "push: expected a gradient from backward() since the last push, but "
                f"got none (key {shown(self.key)})"
            )
        gradient = self._sparse(*taken)
        if size != 1:
            wide = _C.KVStore.state_dtype(gradient.dtype)
            gradient = gradient.to(wide) * (1 / size)
        try:
            self.store.push(self.key, gradient)
        except BaseException:
            self._gradients.put_back(*taken)
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradient, or else sets it to one of no rows."""
        had_gradient = self._gradients.merged() is not None
        self._gradients.clear()
        if had_gradient and not set_to_none:
            self._note_no_rows()

    def _note_no_rows(self) -> None:
        """Adds a gradient of no rows, unless there is one."""
        if self._requires_grad and self._gradients.merged() is None:
            self._gradients.add_empty(self.embedding_dim, self.dtype)

    @property
    def requires_grad(self) -> bool:
        """Whether lookups record gradients; if not, the table is not stepped."""
        return self._requires_grad

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Sets :attr:`requires_grad`, to freeze the table; returns the module."""
        self._requires_grad = requires_grad
        return self

    def extra_repr(self) -> str:
        """``1000, 64, key='table', padding_idx=0, mode='sum'``."""
        parts = [f"{self.num_embeddings}, {self.embedding_dim}, key={shown(self.key)}"]
        if self.padding_idx is not None:
            parts.append(f"padding_idx={self.padding_idx}")
        if self.mode is not None:
            parts.append(f"mode={self.mode!r}")
        return ", ".join(parts)


def _as_int(what: str, value: object, where: str) -> int:
    if not is_int(value):
        kind = type(value).__name__
        raise TypeError(f"StoreEmbedding: expected {what}, but got {kind}{where}")
    return operator.index(value)


def embeddings_of(module: nn.Module) -> list[StoreEmbedding]:
    """The distinct StoreEmbeddings in a module."""
    return [part for part in module.modules() if isinstance(part, StoreEmbedding)]
