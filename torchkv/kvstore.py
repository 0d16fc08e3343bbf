"""The store as Python programs hold it.

Every call goes straight to the C++ store; this module gives it types, docstrings
and Python's own protocols (``len``, ``in``, ``with``, ``copy``, ``pickle``).
"""

from __future__ import annotations

import copy
import io
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, SupportsIndex, TypeAlias, cast

# The C++ libraries link against those that this import has loaded.
import torch

from torchkv import _C
from torchkv.files import read_state, write_whole
from torchkv.optim import StoreOptimizer, TorchOptimizer
from torchkv.optim import names as optim_names
from torchkv.optim.groups import as_keys
from torchkv.optim.rules import on_store
from torchkv.state import folder
from torchkv.state.state_dict import load_state_dict, state_dict

Key: TypeAlias = SupportsIndex | str
"""An int (64 bits, or anything with ``__index__`` except a bool) or a str."""

Keys: TypeAlias = Key | Sequence[Key]
"""A key, or a list or tuple of keys."""

Values: TypeAlias = (
    torch.Tensor | Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]]
)
"""With one key: a tensor, or a list with one tensor per replica.
With a list of keys: a list with one of these per key, all of one form."""

Updater: TypeAlias = Callable[[Any, torch.Tensor, torch.Tensor], object]
"""What merges a pushed sum into a stored value: ``updater(key, input, stored)``."""

Optimizer: TypeAlias = str | StoreOptimizer | type[torch.optim.Optimizer]
"""MXNet's name of one, one of :mod:`torchkv.optim`, or a class of torch.optim."""


def _know_in_scripts(cls: Any) -> None:
    """Lets torch.jit.script take a class as torch.classes.torchkv.KVStore.

    As an attribute of a module, in an annotation, and as an argument.
    """
    torch.jit._state._add_script_class(cls, _C.KVStore.script_class())


class KVStore:
    """A key-value store of tensors, shared by devices and threads.

    Make one with :func:`create`. Any number of threads may call one store; a push
    is atomic per key, and the GIL is released while the store works.

    Wherever a method takes a key it takes a list or tuple of keys, too, and then a
    list with one value per key. A value is a tensor or, with one tensor per device,
    a list of tensors. A key that stands several times in one call counts once,
    with all its tensors.

    Errors of every method, besides its own:

    * ``TypeError``: a key that is no int or str, or not of the kind (int or str)
      that the store's first ``init`` fixed; a value that is no tensor; a dtype
      that does not convert (``torch.can_cast``).
    * ``KeyError``: a key that ``init`` has not seen (``IndexError`` from
      TorchScript and C++).
    * ``ValueError``: a shape that differs from the stored one, a number of values
      that differs from the number of keys, an empty list, lists nested too deep, a
      tensor whose storage is smaller than its sizes need.
    * ``NotImplementedError``: a tensor that is sparse, quantised, without data
      (``meta``), or a wrapper around another (a FakeTensor, a DTensor).
    * ``RuntimeError``: a store that was closed, that was made before this process
      was forked, that is called from inside its own updater, or that is called while
      a tracer (``torch.jit.trace``, ``torch.fx``, ``make_fx``, ``torch.export``)
      records operators, which would lose the call.

    A call that is refused by one of these has changed nothing. What an updater
    raises reaches the caller of ``push`` as it is, after the keys before its own
    have been updated.
    """

    __slots__ = ("__weakref__", "_impl", "_optimizer")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Lets TorchScript know the subclass, as a store."""
        super().__init_subclass__(**kwargs)
        _know_in_scripts(cls)

    def __init__(self, type: str = "local") -> None:
        """Makes an empty store; see :func:`create`."""
        self._impl = _C.KVStore(type)
        self._optimizer: StoreOptimizer | None = None

    @classmethod
    def _of(cls, impl: _C.KVStore) -> Self:
        store = cls.__new__(cls)
        store._impl = impl
        store._optimizer = None
        return store

    # -- what it is

    @property
    def type(self) -> str:
        """The store's type, ``"local"`` or ``"device"``, also of an alias."""
        return self._impl.type

    @property
    def rank(self) -> int:
        """This process's number among the workers; 0 on one machine."""
        return 0

    @property
    def num_workers(self) -> int:
        """The number of worker processes; 1 on one machine."""
        return 1

    def is_capable(self, capability: str) -> bool:
        """Whether the store can do something that not every store can.

        Args:
            capability: ``"optimizer"``: updates run on the store.

        Raises:
            ValueError: an unknown capability.
        """
        if capability != "optimizer":
            raise ValueError(
                "is_capable: expected a capability out of 'optimizer', "
                f"but got {capability!r}"
            )
        return True

    # -- values in and out

    def init(self, key: Keys, value: Values) -> None:
        """Stores a first value under each key.

        Args:
            key: new keys.
            value: one tensor per key, of any shape and strides. The store keeps a
                copy with its shape and dtype: in CPU memory in a ``local`` store,
                on the tensor's device in a ``device`` store.

        Raises:
            ValueError: a key that is initialised already; its value stays.
        """
        self._impl.init(key, value)

    def push(
        self,
        key: Keys,
        value: Values,
        priority: int = 0,
        async_op: bool = False,
    ) -> _C.Work | None:
        """Adds up each key's values and hands the sum to the updater.

        Values are added left to right in the accumulation type (fp32 for fp16 and
        bf16) and rounded once, so the same values give the same bits. The updater
        runs once per distinct key, in the order in which the keys first appear.
        Without an updater the sum replaces the stored value.

        Args:
            key: keys of the store.
            value: tensors of the stored shape, on any device, of any strides, of
                dtypes that convert to the stored one. They are only read, and
                not after the call or, with ``async_op``, its work.
            priority: larger goes first among operations that wait at the same
                time. It never changes a result.
            async_op: enqueue on streams of the store's own, beside the caller's, so
                that communication overlaps with computation. Calls on one key take
                effect in the order in which they are made, with ``async_op`` or
                without.

        Returns:
            None or, with ``async_op``, a :class:`torchkv.Work`: it says what to leave
            alone until its ``wait()``.

        Raises:
            Exception: what the updater raises, as it is. Keys before its own have
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
    ) -> Any:
        """Writes each key's value into tensors, or returns new ones.

        Args:
            key: keys of the store.
            out: tensors of the stored shape, of any strides, device and dtype that
                the stored one converts to, filled in place as an optimizer writes
                a parameter: no gradient is recorded, ``requires_grad`` is fine.
                Several tensors per key are all filled.
            priority: as in :meth:`push`.
            ignore_sparse: skip row-sparse outs. There are none yet.
            async_op: as in :meth:`push`.

        Returns:
            With ``out``: as :meth:`push`. Without: a new tensor of the stored shape,
            dtype and device or, for a list of keys, a list of them.

        Raises:
            ValueError: ``async_op`` without ``out``.
        """
        return self._impl.pull(key, out, priority, ignore_sparse, async_op)

    def pushpull(
        self,
        key: Keys,
        value: Values,
        out: Values | None = None,
        priority: int = 0,
        async_op: bool = False,
    ) -> _C.Work | None:
        """Pushes, then pulls.

        Args:
            key: keys of the store.
            value: as in :meth:`push`.
            out: as in :meth:`pull`. Without it the pulled value is written over
                ``value``.
            priority: as in :meth:`push`.
            async_op: as in :meth:`push`.

        Returns:
            As :meth:`push`.
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
        """Initialises keys (rank 0's value counts), then pulls them to ``out``.

        Args:
            key: new keys.
            value: as in :meth:`init`.
            out: as in :meth:`pull`.
            priority: as in :meth:`push`.
            async_op: as in :meth:`push`.

        Returns:
            As :meth:`push`.
        """
        return self._impl.broadcast(key, value, out, priority, async_op)

    def row_sparse_pull(
        self, key: Keys, out: Any = None, priority: int = 0, row_ids: Any = None
    ) -> None:
        """Pulls only the rows asked for; not supported yet.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("row_sparse_pull: not supported yet")

    # -- keys

    def delete(self, key: Keys) -> None:
        """Forgets keys; they may be initialised anew, with another shape."""
        self._impl.delete(key)
        optimizer = self.optimizer
        if isinstance(optimizer, TorchOptimizer):
            optimizer.forget(as_keys("delete", key))

    def keys(self) -> list[int] | list[str]:
        """The keys, in order of ``init``."""
        return self._impl.keys()

    def shape(self, key: Key) -> torch.Size:
        """The shape of a stored value."""
        return torch.Size(self._impl.shape(key))

    def dtype(self, key: Key) -> torch.dtype:
        """The dtype of a stored value."""
        return self._impl.dtype(key)

    def __contains__(self, key: object) -> bool:
        """Whether a key is initialised; TypeError for a key of another kind."""
        return self._impl.contains(key)

    def __len__(self) -> int:
        """The number of keys."""
        return self._impl.size()

    def __bool__(self) -> bool:
        """True: an empty store is still a store."""
        return True

    # -- updates

    def set_updater(self, updater: Updater | None) -> None:
        """Sets what merges a pushed sum into a stored value.

        It is called as ``updater(key, input, stored)`` and writes ``stored`` in
        place. ``input`` is the sum, in the stored dtype. Both tensors are its own only
        while it runs: to keep one, clone it. It runs under ``torch.no_grad`` and never
        in two threads at once.

        It must not call the same store, which is a RuntimeError, and must not wait for
        another thread that calls the same store: that thread waits for the updater to
        end, so both hang. Where it calls another store, that one's updater must not
        call this one back, or two threads may wait for each other.

        The store holds the updater until another is set or the store is closed. An
        updater that itself holds the store makes a cycle, which Python's garbage
        collector frees, unless TorchScript holds the store or is the updater: then
        :meth:`close` or ``set_updater(None)`` breaks it.

        Args:
            updater: ``None``: the sum replaces the stored value (ASSIGN). A
                ``torch.jit.ScriptFunction`` or ``ScriptModule`` with ``forward(key:
                int, input: Tensor, stored: Tensor)`` (or ``key: str``, as the
                store's keys are): it runs without the GIL, and a module's state is
                saved with the store and shared with whoever else holds the module.
                Any other callable: it runs under the GIL.

        Raises:
            TypeError: neither of these, or a TorchScript updater of another
                signature or for the other kind of keys. From then on :meth:`push`
                raises it, too, where the updater returns a new tensor and has not
                written ``stored``.
        """
        self._impl.set_updater(updater)

    _set_updater = set_updater  # MXNet's name

    def set_optimizer(
        self,
        optimizer: Optimizer,
        **options: Any,
    ) -> None:
        """Makes an optimizer the updater: pushed gradients become steps.

        Stored values do not change by this call, and all keys begin without state.
        ``set_updater(None)`` restores ASSIGN.

        Args:
            optimizer: One of :mod:`torchkv.optim`: ``torchkv.optim.AdamW(lr=1e-3)``. It
                runs in the pass that adds up the gradients, without the GIL, and in
                several threads at once; values of half precision have an fp32 master.
                Or MXNet's name of one: ``"sgd"``, ``"nag"``, ``"adam"``, ``"adamw"``,
                ``"adagrad"``, ``"rmsprop"``, ``"lion"``, ``"lamb"``. Or any class of
                :mod:`torch.optim` whose step needs no closure: it runs in Python, in
                the stored dtype.
            **options: with a class, its arguments; with a name, MXNet's words
                (``learning_rate``, ``wd``, ``clip_gradient``, ``beta1``, ``epsilon``,
                ``gamma1``, ...) or torch's. The formulas are torch's; learning rates
                that are not given are MXNet's.

        Raises:
            ValueError: an unknown name or option of it, a number that makes no sense,
                or an optimizer that is on another store. Nothing has changed.
            KeyError: an optimizer with options of a key that the store does not have.
                While the store has no keys at all, its first push raises it instead.
            TypeError: an option that a class does not take, or of another type. From
                then on :meth:`push` raises it for keys whose dtype is neither
                floating-point nor complex.
        """
        made = optim_names.make(optimizer, options)
        made._bind(self._impl)
        self._optimizer = made

    @property
    def optimizer(self) -> StoreOptimizer | None:
        """The optimizer that is the updater, or None where another one is.

        It has the learning rate (``store.optimizer.lr``), ``param_groups``,
        ``state_dict()`` and ``load_state_dict()``.
        """
        current = self._impl.optimizer()
        if isinstance(current, tuple):
            self._optimizer = on_store(self._impl, current)
            return self._optimizer
        self._optimizer = None
        return current if isinstance(current, StoreOptimizer) else None

    def _required_optimizer(self, op: str) -> StoreOptimizer:
        optimizer = self.optimizer
        if optimizer is None:
            raise ValueError(
                f"{op}: expected a store with an optimizer, but got one without; call "
                "set_optimizer(...) first"
            )
        return optimizer

    def set_param_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Gives keys options of their own.

        See :meth:`torchkv.optim.StoreOptimizer.set_param_groups`.

        Raises:
            ValueError: there is no optimizer, too.
        """
        self._required_optimizer("set_param_groups").set_param_groups(groups)

    def set_lr_mult(self, multipliers: Mapping[Any, float]) -> None:
        """Multiplies the learning rate of keys, ``{key: factor}``; others have 1.

        See :meth:`torchkv.optim.StoreOptimizer.set_lr_mult`.

        Raises:
            ValueError: there is no optimizer, too.
        """
        self._required_optimizer("set_lr_mult").set_lr_mult(multipliers)

    def set_wd_mult(self, multipliers: Mapping[Any, float]) -> None:
        """Multiplies the weight decay of keys, as :meth:`set_lr_mult`."""
        self._required_optimizer("set_wd_mult").set_wd_mult(multipliers)

    def save_optimizer_states(self, path: str | os.PathLike[str]) -> None:
        """Writes the optimizer's ``state_dict()`` to a file.

        The file is complete or, if this fails or the machine stops, the old one:
        it is written beside, flushed to the disk, then renamed.

        Args:
            path: of the file; its folder exists. ``torch.load(path,
                weights_only=True)`` reads it.

        Raises:
            ValueError: there is no optimizer, or the path is empty.
            OSError: what writing raised.
        """
        op = "save_optimizer_states"
        state = self._required_optimizer(op).state_dict()
        write_whole(op, path, lambda file: torch.save(state, file))

    def load_optimizer_states(
        self, path: str | os.PathLike[str], strict: bool = True
    ) -> None:
        """Brings back what :meth:`save_optimizer_states` wrote.

        Args:
            path: of the file.
            strict: whether its keys must be those of the store.

        Raises:
            ValueError: there is no optimizer, the file is damaged or another one, or
                what its ``load_state_dict`` raises. Nothing has changed.
            OSError: what reading raised.
        """
        op = "load_optimizer_states"
        self._required_optimizer(op).load_state_dict(read_state(op, path), strict)

    def set_gradient_compression(self, compression_params: Any) -> None:
        """Compresses what travels between devices; not supported yet.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("set_gradient_compression: not supported yet")

    # -- workers

    def barrier(self) -> None:
        """Waits for all workers; on one machine there is nothing to wait for."""
        self._impl.barrier()

    _barrier = barrier  # MXNet's name

    # -- on disk

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the whole store into a folder: keys, values, updater, optimizer.

        Safetensors files and a JSON manifest, without pickle. A save that does not
        come to its end, whatever ends it, leaves what the folder held before. Saves
        of several processes or threads to one folder wait for each other. Each key
        is saved as it is at one moment; pushes of other threads may go on. Of what a
        scheduler adds to the optimizer's groups, numbers are saved.

        Args:
            path: the folder. It is made where there is none; files in it that are
                not a store's stay.

        Raises:
            TypeError: the updater is a Python callable, which cannot be saved.
                Nothing has been written.
        """
        folder.save(self._impl, path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replaces keys, values, updater and optimizer by those that were saved.

        The saved store may be of another type. Values come to CPU memory; a
        ``device`` store moves them at the first push or pull, as after ``init``.
        Where the saved optimizer is of the same kind as this store's, that object goes
        on with the saved numbers, and so do its schedulers. Updates that other threads
        make meanwhile are lost. :func:`torchkv.load` makes a new store instead.

        Args:
            path: what :meth:`save` was given.

        Raises:
            FileNotFoundError: there is no such folder.
            ValueError: it holds no store, or a damaged one. Nothing has changed.
            TypeError: this store has keys of the other kind. Nothing has changed.
        """
        self._optimizer = folder.load(self._impl, path)

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything in the store, for PyTorch's own tools to save.

        Dicts, lists, tensors, numbers and str: ``torch.save`` takes it, ``torch.load``
        takes it with ``weights_only=True``, and ``torch.distributed.checkpoint``
        takes the store itself.

        Raises:
            TypeError: the updater is a Python callable, which cannot be saved.
        """
        return state_dict(self._impl)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Takes over what :meth:`state_dict` returned, here or elsewhere.

        An empty store without updater and optimizer becomes the saved one. Any other
        keeps its keys, and must have the state's shapes, dtypes and optimizer; the
        optimizer's numbers and a TorchScript updater become those of the state, and
        the optimizer object goes on.
        Updates that other threads make meanwhile are lost.

        Args:
            state_dict: the state.
            strict: whether the keys must be the same. Else those that both have are
                taken, and the others stay as they are.

        Raises:
            ValueError: keys that are missing or too many, another shape, dtype or
                optimizer, a part that makes no sense. Nothing has changed.
            TypeError: the store's updater is a Python callable.
        """
        self._optimizer = load_state_dict(self._impl, state_dict, strict)

    # -- the other bindings

    @property
    def capsule(self) -> Any:
        """For TorchScript, which reads it to script a module that has a store."""
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
        """Frees values and updater. Every later call is a RuntimeError, but close."""
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copies keys, values, type and TorchScript updater.

        Raises:
            TypeError: the updater is a Python callable, which cannot be copied.
        """
        store = self.__class__._of(_C.KVStore.from_state(self._impl.state()))
        store._restore_extras(self._extras())
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
        # and those of a snapshot are gone by then.
        buffer = io.BytesIO()
        torch.save(self._impl.state(), buffer)
        state = buffer.getvalue()
        # The third member is what a subclass added, in pickle's form for slots.
        return (
            self.__class__._unpickle,
            (state, zlib.crc32(state), self._extras()),
            (None, self._attributes()),
        )

    @classmethod
    def _unpickle(
        cls, state: bytes, crc32: int, extras: Sequence[Mapping[str, Any]]
    ) -> Self:
        if zlib.crc32(state) != crc32:
            raise ValueError(
                "load: expected the store as it was pickled, but its checksum differs: "
                "the pickle is damaged"
            )
        with torch.device("cpu"):  # torch.load would take the default device
            loaded = torch.load(io.BytesIO(state), weights_only=True)
        store = cls._of(_C.KVStore.from_state(loaded))
        store._restore_extras(extras)
        return store

    def _extras(self) -> list[dict[str, Any]]:
        """What schedulers have added to the optimizer's groups."""
        optimizer = self.optimizer
        return [] if optimizer is None else optimizer._extras()

    def _restore_extras(self, extras: Sequence[Mapping[str, Any]]) -> None:
        optimizer = self.optimizer
        if optimizer is not None:
            optimizer._add_extras(extras)

    def _attributes(self) -> dict[str, Any]:
        """What a subclass has added, in its ``__dict__`` or in slots."""
        in_dict, in_slots = cast(tuple[Any, Any], object.__getstate__(self))
        attributes = {**(in_dict or {}), **in_slots}
        del attributes["_impl"], attributes["_optimizer"]
        return attributes


_know_in_scripts(KVStore)
torch.jit.ignore(KVStore)  # type: ignore[no-untyped-call]  # its source cannot be compiled


def create(type: str = "local") -> KVStore:
    """Makes an empty store.

    Args:
        type: ``"local"``: values live in CPU memory and are added up there.
            ``"device"``: a value lives, and is added up, on the device of the
            tensor that initialised it or, if that is the CPU, on one of the
            accelerators that the first push or pull's ``out`` with any brings:
            the one with the fewest bytes so far, largest values first.
            ``"nccl"``: the same, with NCCL as carrier between GPUs; the bits of
            its sums may depend on their number. MXNet's names
            ``local_update_cpu``, ``local_allreduce_cpu`` (= ``local``) and
            ``local_allreduce_device`` (= ``device``) are taken, too. Matching is
            exact.

    Raises:
        ValueError: an unknown type; the message has the valid ones.
        RuntimeError: ``nccl`` where PyTorch has loaded no NCCL.
        NotImplementedError: the ``dist`` types, for now.
    """
    return KVStore(type)  # in TorchScript: torch.classes.torchkv.KVStore(type)


def load(path: str | os.PathLike[str]) -> KVStore:
    """Makes a store from what :meth:`KVStore.save` wrote, of the saved type.

    Args:
        path: what ``save`` was given.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it holds no store, or a damaged one.
    """
    content = folder.read(path)
    extras = [] if content.optimizer is None else content.optimizer.extras
    store = KVStore._of(content.make(content.type))
    if any(extras):
        store._restore_extras(extras)
    return store
