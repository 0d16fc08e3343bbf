"""The store's Python API: types, docstrings and Python's protocols.

Every call goes straight to the C++ store. What saves, loads and copies a store is in
`torchkv/state/stateful.py`.
"""
# size: one class, whose documentation is three quarters of the file

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, SupportsIndex, TypeAlias

# The C++ libraries link against those that this import has loaded.
import torch

from torchkv import _C, compression, registered
from torchkv.arguments import as_keys, as_size, expect
from torchkv.compression import Compression
from torchkv.initializers import Initializer, Zeros
from torchkv.optim import StoreOptimizer, TorchOptimizer
from torchkv.optim import names as optim_names
from torchkv.optim.rules import on_store
from torchkv.state import folder
from torchkv.state.stateful import Stateful
from torchkv.stats import KeyStats, stats_of, table_of

Key: TypeAlias = SupportsIndex | str
"""An int of 64 bits (anything with ``__index__`` except a bool) or a str."""

Keys: TypeAlias = Key | Sequence[Key]
"""A key, or a list or tuple of keys."""

Values: TypeAlias = torch.Tensor | Sequence[torch.Tensor | Sequence[torch.Tensor]]
"""A tensor, or a list of one tensor per replica, of one key. Of a list of keys, a list
with one of these per key, tensors and lists mixed."""

Updater: TypeAlias = Callable[[Any, torch.Tensor, torch.Tensor], object]
"""What merges a pushed sum into a stored value, as ``updater(key, input, stored)``."""

Optimizer: TypeAlias = str | StoreOptimizer | type[torch.optim.Optimizer]
"""MXNet's name of one, one of :mod:`torchkv.optim`, or a class of torch.optim."""


def _know_in_scripts(cls: Any) -> None:
    """Makes a class torch.classes.torchkv.KVStore in what torch.jit.script compiles."""
    torch.jit._state._add_script_class(cls, _C.KVStore.script_class())


class KVStore(Stateful):
    """A key-value store of tensors, shared by devices and threads.

    Make one with :func:`create`. Any number of threads may call one store; a push
    is atomic per key, and the GIL is released while the store works.

    Every method that takes a key also takes a list or tuple of keys, with a list of
    one value per key. A value is a tensor or a list of tensors, one per device; one
    call may mix them: ``push(["a", "b"], [x, [y, z]])``. Repeated keys are merged: all
    their tensors are reduced in one update.

    Errors of every method, in addition to its own; none of them changes the store:

    * ``TypeError``: a key that is neither int nor str, or not of the kind (int or
      str) of the store's first ``init``; a value that is not a tensor; a dtype that
      does not convert (``torch.can_cast``).
    * ``KeyError``: a key that is not initialized (``IndexError`` in TorchScript and
      C++).
    * ``ValueError``: a shape other than the stored one, a number of values other than
      the number of keys, an empty list, lists nested too deep, a tensor whose storage
      is smaller than its sizes need.
    * ``NotImplementedError``: a tensor that is sparse (but :meth:`push` takes some),
      quantized, without data (``meta``), or a wrapper around another (a FakeTensor,
      a DTensor).
    * ``RuntimeError``: a store that was closed or made before this process was
      forked; a call from inside the store's own updater, or under a tracer
      (``torch.jit.trace``, ``torch.fx``, ``make_fx``, ``torch.export``), which would
      lose the call.
    """

    __slots__ = ("__weakref__",)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Registers the subclass with TorchScript as a store."""
        super().__init_subclass__(**kwargs)
        _know_in_scripts(cls)

    def __init__(self, type: str = "local", **options: Any) -> None:
        """Makes an empty store; see :func:`create`."""
        expect("create", type, str, "a str as type")
        self._impl = _C.KVStore(type, options)
        self._optimizer: StoreOptimizer | None = None

    # -- what it is

    @property
    def type(self) -> str:
        """The store's type, ``"local"`` or ``"device"``, also of an alias."""
        return self._impl.type

    @property
    def rank(self) -> int:
        """This process's number among the workers; 0 on one machine."""
        return self._impl.rank()

    @property
    def num_workers(self) -> int:
        """The number of worker processes; 1 on one machine."""
        return self._impl.num_workers()

    def is_capable(self, capability: str) -> bool:
        """Whether the store has a capability: ``"optimizer"``, updates on the store.

        Raises:
            ValueError: an unknown capability.
        """
        if capability != "optimizer":
            raise ValueError(
                f"is_capable: unknown capability {capability!r}; expected 'optimizer'"
            )
        return True

    # -- values in and out

    def init(
        self, key: Keys, value: Values, whole: bool = False, share: bool = False
    ) -> None:
        """Stores a first value under each key.

        Args:
            key: new keys.
            value: one tensor per key, of any shape and strides. The store keeps a
                copy of its shape and dtype: in CPU memory in a ``local`` store, on the
                tensor's device in a ``device`` store. In a ``dist`` store rank 0's
                counts; all ranks make the call, which waits for rank 0's. A
                ``torch.sparse_coo`` tensor with one sparse dimension makes a row-sparse
                key: see :meth:`init_rows`.
            whole: in a ``dist`` store, one server holds the whole value whatever its
                size; it may not be split where an updater that is not built in, or an
                optimizer that needs whole values, such as LAMB, is set after ``init``.
            share: in a store on one machine, the value is the tensor itself, not a
                copy: updates write it in place, and what the caller writes to it
                between calls is the stored value. It stays whole, and on its device.
                Pulling it into itself copies nothing. Do not write it during calls of
                other threads. A saved or copied store shares nothing, nor does this one
                what :meth:`load_state_dict` has replaced.

        Raises:
            ValueError: a key that is already initialized; its value is kept. With
                `share`: a tensor that is not dense, on an accelerator in a ``local``
                store, or that overlaps with another shared one; later, until the key
                is deleted, a call with a tensor that overlaps with the shared one,
                unless it is the same tensor under the same key.
            NotImplementedError: `share` in a ``dist`` store.
        """
        self._impl.init(key, value, whole, share)

    def init_rows(
        self,
        key: Key,
        row_shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        num_rows: int | None = None,
        init: Initializer | None = None,
    ) -> None:
        """Makes a row-sparse key, which keeps only the rows that are pushed.

        Rows that were never pushed have their initial value and take no memory, so a
        table of a billion rows takes what its used rows take: their values, what the
        optimizer keeps for them, and about 60 to 110 bytes each for an index. They stay
        until :meth:`delete` forgets them; nothing is evicted. They are in CPU memory,
        also in a ``device`` store; in a ``dist`` store, where all ranks make the call,
        each server has those of some ids. :meth:`init` with a ``torch.sparse_coo``
        tensor makes such a key, too, whose initial value is zero.

        :meth:`push` takes ``torch.sparse_coo`` tensors with one sparse dimension, or
        dense ones of all rows. Without an updater the pushed rows replace the value:
        others are forgotten. The optimizers of :mod:`torchkv.optim` step the pushed
        rows, those with ``lazy=False`` all that the key keeps. :meth:`pull` returns the
        rows as a ``torch.sparse_coo`` tensor, and fills dense outs;
        :meth:`row_sparse_pull` looks rows up, and adds none.

        Args:
            key: a new key.
            row_shape: the shape of one row; ``()`` for a number.
            dtype: of the rows.
            num_rows: how many rows there may be: :meth:`shape` is ``(num_rows,
                *row_shape)``. None for as many as fit into 2**63 - 1 elements, the most
                that a tensor's shape can have; then :meth:`push` takes sparse tensors
                of any number of rows.
            init: one of :mod:`torchkv.initializers`; None for zeros. In a ``dist``
                store, rank 0's counts.

        Raises:
            ValueError: a key that is already initialized, a negative size, more than
                2**63 - 1 elements, a dtype that `init` does not support.
            NotImplementedError: at a push, an updater or optimizer that needs the whole
                value (LAMB; MXNet's lamb, lars, and lbsgd with its strategy "lars").
        """
        init = Zeros() if init is None else init
        expect("init_rows", init, Initializer, "one of torchkv.initializers as init")
        expect("init_rows", dtype, torch.dtype, "a torch.dtype as dtype")
        expect("init_rows", row_shape, Sequence, "a shape, such as (64,), as row_shape")
        shape = [as_size("init_rows", "row_shape", size) for size in row_shape]
        if num_rows is not None:
            num_rows = as_size("init_rows", "num_rows", num_rows)
        self._impl.init_rows(key, shape, dtype, num_rows, init._described())

    def push(
        self,
        key: Keys,
        value: Values,
        priority: int = 0,
        async_op: bool = False,
    ) -> _C.Work | None:
        """Sums each key's values and passes the sum to the updater.

        Values are added left to right in the accumulation type (fp32 for fp16 and
        bf16) and rounded once, so the same values give the same bits. The updater
        runs once per distinct key, in the order in which the keys first appear.
        Without an updater the sum replaces the stored value.

        Values may be ``torch.sparse_coo`` tensors with one sparse dimension, such as
        gradients of ``nn.Embedding(sparse=True)``. Their rows are added up by id; on
        several machines, only they are sent, repeats included. Without an updater, rows
        that were not pushed become zero; the optimizers of :mod:`torchkv.optim` other
        than LAMB, and MXNet's sgd, adam, adagrad, ftrl, lbsgd and, in CPU memory, lars
        and groupadagrad, step the pushed rows only; all others get a dense sum. The
        host waits for ids on an accelerator. For row-sparse keys, see
        :meth:`init_rows`.

        Args:
            key: keys of the store.
            value: tensors of the stored shape, on any device, of any strides, of
                dtypes that convert to the stored one. They are read until the call
                or, with ``async_op``, its work is done.
            priority: among waiting operations, larger goes first. It never changes a
                result.
            async_op: enqueue the work on the store's own streams, to overlap with the
                caller's. Calls on one key take effect in program order either way.

        Returns:
            None or, with ``async_op``, a :class:`torchkv.Work`, which documents what
            not to touch until its ``wait()``.

        Raises:
            IndexError: a sparse value with a row that the stored value does not have.
            Exception: what the updater raises, unchanged. Keys before its key have
                been updated, keys after it have not.
        """
        return self._impl.push(key, value, priority, async_op)

    def pull(
        self,
        key: Keys,
        out: Values | None = None,
        priority: int = 0,
        ignore_sparse: bool = True,
        async_op: bool = False,
        min_version: int = 0,
    ) -> Any:
        """Writes each key's value into tensors, or returns new ones.

        Args:
            key: keys of the store.
            out: tensors of the stored shape, of any strides, device and dtype that
                the stored one converts to, written in place as an optimizer writes
                a parameter: no gradient is recorded, ``requires_grad`` is fine.
                Several tensors per key are all written.
            priority: as in :meth:`push`.
            ignore_sparse: skip ``torch.sparse_coo`` outs. Otherwise they must have one
                sparse dimension, and get the rows that the value has, of a dense value
                all rows.
            async_op: as in :meth:`push`.
            min_version: wait until the value has had so many updates
                (:meth:`version`), of whichever ranks.

        Returns:
            With ``out``: as :meth:`push`. Without: a new tensor of the stored shape,
            dtype and device, or a list of them for a list of keys. Of a row-sparse key,
            a coalesced ``torch.sparse_coo`` tensor; if its number of rows is unlimited,
            up to its last row.

        Raises:
            ValueError: ``async_op`` without ``out``; in a store on one machine, a
                value with a lower version than ``min_version``.
        """
        return self._impl.pull(key, out, priority, ignore_sparse, async_op, min_version)

    def pushpull(
        self,
        key: Keys,
        value: Values,
        out: Values | None = None,
        priority: int = 0,
        async_op: bool = False,
    ) -> _C.Work | None:
        """:meth:`push`, then :meth:`pull`; without ``out``, into ``value``.

        A call in a store of several processes that raises an error or times out may
        have written some of the new values.
        """
        return self._impl.pushpull(key, value, out, priority, async_op)

    def broadcast(
        self,
        key: Keys,
        value: Values,
        out: Values,
        priority: int = 0,
        async_op: bool = False,
    ) -> _C.Work | None:
        """:meth:`init` with rank 0's value, then :meth:`pull` into ``out``."""
        return self._impl.broadcast(key, value, out, priority, async_op)

    def row_sparse_pull(
        self,
        key: Keys,
        out: Values | None = None,
        priority: int = 0,
        row_ids: Values | None = None,
    ) -> Any:
        """Writes rows of each key's value into tensors, or returns new ones.

        Args:
            key: keys of the store.
            out: per key a dense tensor of shape ``(*row_ids.shape, *value.shape[1:])``,
                which gets the rows that the ids name, in their order: an embedding
                lookup. Or a ``torch.sparse_coo`` tensor of the value's shape with one
                sparse dimension, which gets the distinct rows in ascending order,
                coalesced. Or a list of these. Devices and dtypes as :meth:`pull`.
            priority: as in :meth:`push`.
            row_ids: per key the rows, an int32 or int64 tensor of any shape, in any
                order, with or without repeats; with several outs, also a list of one
                tensor for each. The host waits for ids on an accelerator.

        Returns:
            With ``out``: None. Without: a new dense tensor on the device of the ids, of
            the stored dtype, or a list of them for a list of keys.

        Raises:
            IndexError: a row id that is negative or not below the number of rows; then
                nothing is written.
            TypeError: row ids of another dtype, or None.
            ValueError: a value without dimensions, an ``out`` of another shape, row ids
                whose number is neither 1 nor that of the outs.
        """
        return self._impl.row_sparse_pull(key, out, priority, row_ids)

    def assign(self, key: Keys, value: Values, share: bool = False) -> None:
        """Replaces values without the updater, all of them or, on an error, none.

        What the optimizer keeps for the keys, such as momentum and step, is kept. An
        fp32 master of a half-precision value is replaced, unless `value` has the
        stored dtype and is the master rounded to it.

        Args:
            key: distinct keys of the store.
            value: one tensor per key, of the stored shape and of any strides, device
                and dtype that converts to the stored one.
            share: as in :meth:`init`: the tensors, of the stored dtype, become the
                stored values. What the optimizer keeps moves to their devices.

        Raises:
            ValueError: also a repeated key, or a list of several tensors for one key;
                with `share`, as :meth:`init`.
        """
        self._impl.assign(key, value, share)

    # -- keys

    def delete(self, key: Keys, row_ids: Values | None = None) -> None:
        """Removes keys; they may be initialized again, with another shape.

        Args:
            key: keys of the store.
            row_ids: of row-sparse keys, an int32 or int64 tensor per key: the keys stay
                and forget these rows, with what the optimizer keeps for them. Rows that
                a key does not have are skipped. Versions stay on one machine. In a
                ``dist`` store the call counts as an update; in ``dist_sync``, all ranks
                make it in place of a push, and what any of them names is forgotten.

        Raises:
            IndexError: a row id that is out of range; then nothing has changed.
            ValueError: `row_ids` of a dense key.
        """
        if row_ids is not None:
            self._impl.delete(key, row_ids)
            return
        self._impl.delete(key)
        optimizer = self.optimizer
        if isinstance(optimizer, TorchOptimizer):
            optimizer.forget(as_keys("delete", key))

    def keys(self) -> list[int] | list[str]:
        """The keys, in order of ``init``."""
        return self._impl.keys()

    def version(self, key: Key) -> int:
        """The number of updates of a value.

        In a ``dist`` store as far as this process knows: of the latest value that it
        has pulled, and of its own pushes that have been answered.
        """
        return self._impl.version(key)

    def stats(self) -> dict[int | str, KeyStats]:
        """How often each key was pushed and pulled, how many bytes, and how long.

        Counts the calls of this process since the key's ``init``. Calls are ranges
        of ``torch.profiler``, too, such as ``torchkv::push``.

        Raises:
            NotImplementedError: a store type of a third party that counts nothing.
        """
        return stats_of(self)

    def shape(self, key: Key) -> torch.Size:
        """The shape of a stored value."""
        return torch.Size(self._impl.shape(key))

    def num_rows(self, key: Key) -> int:
        """How many rows a value has; of a row-sparse key, how many it keeps.

        Raises:
            ValueError: a value without dimensions.
        """
        return self._impl.num_rows(key)

    def dtype(self, key: Key) -> torch.dtype:
        """The dtype of a stored value."""
        return self._impl.dtype(key)

    def __contains__(self, key: object) -> bool:
        """Whether a key is initialized; TypeError for a key of another kind."""
        return self._impl.contains(key)

    def __len__(self) -> int:
        """The number of keys."""
        return self._impl.size()

    def __bool__(self) -> bool:
        """True: an empty store is still a store."""
        return True

    # -- updates

    def set_updater(self, updater: Updater | None, sparse: bool = False) -> None:
        """Sets what merges a pushed sum into a stored value.

        It is called as ``updater(key, input, stored)`` and writes ``stored`` in
        place. ``input`` is the sum, in the stored dtype. Both tensors are valid only
        while it runs: to keep one, clone it. It runs under ``torch.no_grad`` and never
        in two threads at once.

        It must not call the same store (a RuntimeError), nor wait for a thread that
        does: that thread waits for the updater. If two stores' updaters call each
        other's store, two threads can deadlock.

        The store holds the updater until another is set or the store is closed. A
        cycle through both is freed by Python's garbage collector, unless the store is
        on several machines, or TorchScript holds it or is the updater: then call
        :meth:`close` or ``set_updater(None)``.

        Args:
            updater: ``None``: the sum replaces the stored value (ASSIGN). A
                ``torch.jit.ScriptFunction`` or ``ScriptModule`` with ``forward(key:
                int, input: Tensor, stored: Tensor)`` (or ``key: str``, as the
                store's keys are): it runs without the GIL; a module's state is saved
                with the store and shared with other holders of the module. Any other
                callable runs under the GIL.

            sparse: whether it takes rows as they are. If all values of a key are
                ``torch.sparse_coo`` tensors, or the key is row-sparse, ``input`` is
                their sum by row, coalesced. The ``stored`` of a row-sparse key is such
                a tensor, too, with the same rows: those that it has after the call are
                written to the key. Otherwise sums for dense keys are dense, and pushes
                to row-sparse keys are a NotImplementedError.

        Raises:
            TypeError: another object, a TorchScript updater of another signature or
                for the other kind of keys. :meth:`push` raises it if the updater
                returns a new tensor and has not written ``stored``.
        """
        self._impl.set_updater(updater, sparse)

    _set_updater = set_updater  # MXNet's name

    def set_optimizer(
        self,
        optimizer: Optimizer,
        **options: Any,
    ) -> None:
        """Makes an optimizer the updater: pushed gradients become steps.

        This call does not change stored values, and all keys begin without state.
        ``set_updater(None)`` restores ASSIGN.

        Args:
            optimizer: one of :mod:`torchkv.optim`, as ``torchkv.optim.AdamW(lr=1e-3)``:
                it runs in the pass that sums the gradients, without the GIL, in several
                threads at once; values of half precision have an fp32 master. Or
                MXNet's name of one, as ``"sgd"``, which has MXNet's formula: it makes
                the class of :mod:`torchkv.optim.mxnet`. Or ``"adamw"`` or ``"lion"``,
                which MXNet does not have. Or any class of :mod:`torch.optim` whose
                step needs no closure: it runs in Python, in the stored dtype.
            **options: of a class, its arguments; of a name, MXNet's words
                (``learning_rate``, ``wd``, ``clip_gradient``, ``beta1``, ``epsilon``,
                ``gamma1``, ...) or torch's.

        Raises:
            ValueError: an unknown name or option, an invalid value, or an optimizer of
                another store. Nothing has changed.
            KeyError: options of a key that the store does not have; raised by the
                first push if the store has no keys yet.
            TypeError: an option that a class does not take, or of another type.
                :meth:`push` raises it for keys whose dtype is neither floating-point
                nor complex.
            NotImplementedError: ``max_norm`` or ``skip_nonfinite`` in a ``dist_async``
                store; ``skip_nonfinite`` in a ``dist`` store that compresses.
        """
        made = optim_names.make(optimizer, options)
        made._bind(self._impl)
        self._optimizer = made

    @property
    def optimizer(self) -> StoreOptimizer | None:
        """The optimizer, if it is the updater, with ``lr``, ``param_groups``, ..."""
        current = self._impl.optimizer()
        if isinstance(current, tuple):
            self._optimizer = on_store(self._impl, current)
            return self._optimizer
        self._optimizer = None
        return current if isinstance(current, StoreOptimizer) else None

    def set_param_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """As :meth:`torchkv.optim.StoreOptimizer.set_param_groups`.

        Raises:
            ValueError: also if the store has no optimizer.
        """
        self._required_optimizer("set_param_groups").set_param_groups(groups)

    def set_lr_mult(self, multipliers: Mapping[Any, float]) -> None:
        """Multiplies the learning rate of keys, ``{key: factor}``; of others by 1.

        Raises:
            ValueError: also if the store has no optimizer.
        """
        self._required_optimizer("set_lr_mult").set_lr_mult(multipliers)

    def set_wd_mult(self, multipliers: Mapping[Any, float]) -> None:
        """Multiplies the weight decay of keys, as :meth:`set_lr_mult`."""
        self._required_optimizer("set_wd_mult").set_wd_mult(multipliers)

    def set_gradient_compression(self, compression_params: Compression) -> None:
        """Compresses what is pushed: each value of a key's list by itself.

        In a ``dist`` store, the sum of a rank's values is compressed before it is sent.
        Each rank sets its own compression; in saved stores, rank i's residual is that
        of position i.

        What a scheme sends of a value is added up instead of it. With error feedback it
        is what it sends of the value plus the residual, what earlier pushes at the same
        position of the list have not sent, which is kept by key and position, and saved
        with the store. ``init`` and what ``pull`` returns are not compressed, nor are
        the values of a key of which one is sparse. The docs have a page on it.

        May be called at any time. Residuals stay where one scheme with error feedback
        follows another, and are dropped by others.

        Args:
            compression_params: a scheme of :mod:`torchkv.compression`, as
                ``TwoBit(threshold=0.5)``; MXNet's dict of it, as ``{"type": "2bit",
                "threshold": 0.5}``; a list of dicts with ``"keys"``, for groups of
                keys; or None.

        Raises:
            ValueError: a store of type ``local``, where nothing is sent; an unknown
                scheme or option, an invalid number, a key in two groups.
            KeyError: a group has a key that the store does not have; raised by the
                first push if the store has no keys yet.
            TypeError: an argument of another type. :meth:`push` raises it for keys
                whose dtype is not floating-point.
            NotImplementedError: a ``dist`` store with an optimizer that has
                ``skip_nonfinite=True``; a store of a third party that does not
                compress. :meth:`push` raises it while it is captured into a CUDA graph.
        """
        self._impl.set_gradient_compression(*compression.parse(compression_params))

    @property
    def gradient_compression(self) -> Compression:
        """What :meth:`set_gradient_compression` has set; None without compression."""
        return compression.shown_as(*self._impl.gradient_compression())

    # -- workers

    def num_dead_node(self) -> int:
        """The number of other processes that this one takes for lost.

        0 on one machine. In a ``dist`` store a process is lost if it sends no heartbeat
        for four periods, or has ended without closing the store. Does not wait for
        other processes, and also answers once calls fail because of a lost one.
        Processes may learn of a loss at different times.
        """
        return self._impl.num_dead_node()

    def barrier(self) -> None:
        """Waits for all workers; returns at once on one machine."""
        self._impl.barrier()

    _barrier = barrier  # MXNet's name

    # -- the other bindings

    @property
    def capsule(self) -> Any:
        """What TorchScript reads to script a module that has a store."""
        return self._impl.capsule

    @property
    def script_object(self) -> torch.ScriptObject:
        """This store as ``torch.classes.torchkv.KVStore``, for a scripted module."""
        return self._impl.script_object()

    @staticmethod
    def from_script_object(script_object: torch.ScriptObject) -> KVStore:
        """The store behind a ``torch.classes.torchkv.KVStore``; no copy is made.

        Raises:
            TypeError: an object of another class.
        """
        return KVStore._of(_C.KVStore.from_script_object(script_object))

    # -- life

    def close(self) -> None:
        """Frees values and updater; later calls but ``close`` are RuntimeErrors."""
        self._impl.close()

    def __enter__(self) -> Self:
        """The store itself."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Closes the store."""
        self.close()

    def __repr__(self) -> str:
        """``KVStore(type='local', keys=3, bytes=72)``."""
        return self._impl.repr()

    def __str__(self) -> str:
        """The same, and a table of the largest keys."""
        return table_of(self)


_know_in_scripts(KVStore)
registered.is_a(KVStore)
torch.jit.ignore(KVStore)  # type: ignore[no-untyped-call]  # its source cannot be compiled


def create(
    type: str = "local",
    **options: Any,  # in TorchScript: torch.classes.torchkv.KVStore(type)
) -> KVStore:
    """Makes an empty store.

    Args:
        type: ``"local"``: values are stored and summed in CPU memory. ``"device"``:
            on the device of the tensor that initialized them or, if that is the CPU,
            on an accelerator of the first push or pull that has any: the one with the
            fewest bytes so far, largest values first. ``"nccl"``: the same, with NCCL
            for communication between GPUs, on whose number the bits of its sums may
            depend. MXNet's names ``local_update_cpu``, ``local_allreduce_cpu`` (=
            ``local``) and ``local_allreduce_device`` (= ``device``) are accepted.
            ``"dist_sync"`` (= ``dist``): shared by the processes of a job, each of
            which serves a part of the keys; an update has the sum of all processes'
            pushes. ``"dist_async"``: each push is an update of its own. Both are made
            by all processes, which ``torchrun`` or another launcher starts. A name
            of :func:`torchkv.register`: an instance of that class, to which the
            options are passed. Names match exactly.
        **options: of the ``dist`` types:

            * ``name`` (str): tells stores of one type apart; the processes' stores
              are one by type and name.
            * ``rank``, ``world_size`` (int), ``store`` (torch.distributed.Store):
              without them, those of the default process group or, if there is none,
              of the environment variables that ``torchrun`` sets.
            * ``timeout`` (float): seconds after which a call fails, at most 1e9;
              300, or ``TORCHKV_TIMEOUT``.
            * ``heartbeat`` (float): period of the signs of life in seconds; 1, the
              same on all ranks. A process that is silent for four of them is lost.
            * ``snapshot_dir`` (str), ``snapshot_every`` (``"100 rounds"`` or
              ``"30s"``): of ``dist_sync``: rank 0 lets the servers write what they
              hold to a folder, between two of its steps, while training goes on. A
              store that is created where there is a snapshot begins with it: ``init``
              keeps the values, and :meth:`KVStore.version` says at which step to go
              on. The folder is one for all hosts; the last two snapshots are kept.
            * ``security``: between hosts, ``"curve"`` (the default: encrypted, with
              the job's secret) or ``"none"``.

    Raises:
        ValueError: an unknown type; the message lists the valid ones. Options of a
            store on one machine.
        RuntimeError: ``nccl`` if PyTorch has loaded no NCCL; a ``dist`` type where
            nothing says who the other processes are, or without ZeroMQ.
        StoreTimeoutError: the other processes do not create the store in time.
    """
    if cls := registered.registered(type):
        return cls(**options)  # type: ignore[return-value]  # a third party's
    return KVStore(
        type, **options
    )  # in TorchScript: torch.classes.torchkv.KVStore(type)


def load(
    path: str | os.PathLike[str],
    progress: bool = False,
    type: str | None = None,
    **options: Any,
) -> KVStore:
    """Makes a store from what :meth:`KVStore.save` wrote.

    Args:
        path: the folder.
        progress: whether to show a progress bar; needs tqdm.
        type: the type of the new store; None: that of the saved one.
        **options: of a ``dist`` type, as of :func:`create`.

    Raises:
        FileNotFoundError: the folder does not exist.
        ValueError: it holds no store, or a damaged one; or :func:`create` raises it.
            Of a ``dist`` type, the other ranks then wait until they time out.
        ImportError: a progress bar without tqdm.
    """
    expect("load", type, str | None, "a str as type")
    content = folder.read(path, progress)
    of_store = content.type if type is None else type
    if not options and not of_store.startswith("dist"):
        if type is not None:
            KVStore(type)  # raises what create() does
        return KVStore._of(content.make(of_store), content.extras)
    store = KVStore(of_store, **options)
    store._optimizer = content.replace(store._impl, content.made_for(store._impl))
    return store
