"""The base class of a store's optimizers: options, groups of keys, saved state."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from torchkv import _C
from torchkv.arguments import StoreKey, check_known, expect
from torchkv.gathering import checked_together
from torchkv.optim.groups import (
    RESERVED,
    Group,
    Groups,
    Settings,
    as_group,
    as_multipliers,
)
from torchkv.optim.mxnet_interface import MXNetInterface
from torchkv.optim.saved import fitted
from torchkv.optim.torch_interface import TorchInterface
from torchkv.parameter_names import name_among


class StoreOptimizer(TorchInterface, MXNetInterface):
    """Base class of all optimizers that run on a store.

    Set one with :meth:`torchkv.KVStore.set_optimizer`; from then on each push is a
    step of its keys. An optimizer belongs to one store at a time, until another
    updater is set on that store or the store is closed. Its state is kept in the
    store, once per key, regardless of the number of replicas. It is thread-safe.

    It is a :class:`torch.optim.Optimizer`, so all schedulers accept it. The first of
    :attr:`param_groups` holds all keys that are in no other group; the others are those
    of :meth:`set_param_groups`. Writing an option there takes effect at the next push.
    """

    def __init__(self, defaults: dict[str, Any]) -> None:
        """Initializes the first group with `defaults`, which are already checked."""
        self._lock = threading.RLock()
        self._impl: _C.WeakKVStore | None = None  # the store it was set on last
        self._lr_mult: dict[StoreKey, float] = {}
        self._wd_mult: dict[StoreKey, float] = {}
        self._groups = Groups()
        # Keys that may have options before the store has them.
        self._later_keys: dict[StoreKey, None] = {}
        # Schedulers warn if step() was never called; here, pushes are the steps.
        self._opt_called = True
        super().__init__([{"params": []}], defaults)

    @property  # type: ignore[override]
    def param_groups(self) -> Groups:
        """The groups of keys, whose options are writable."""
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        if groups or self._groups:  # torch's constructor sets an empty list
            raise ValueError(
                "param_groups: the list cannot be replaced; call set_param_groups"
            )

    # -- implemented by subclasses

    def _name(self) -> str:
        """The optimizer's name in messages and saved states."""
        return type(self).__name__

    def _is_set(self, current: Any) -> bool:
        """Whether it is what its store's ``optimizer()`` returned."""
        raise NotImplementedError

    def _enter(self, impl: _C.KVStore, settings: Settings) -> None:
        """Becomes the updater of a store, with new state."""
        raise NotImplementedError

    def _apply(self, settings: Settings) -> None:
        """Checks and applies options; on an error, none of them."""
        raise NotImplementedError

    def _shared_options(self) -> dict[str, Any]:
        """The items of the state dict with options of all groups."""
        return {}

    def _parts(self) -> dict[str, Any]:
        """The items of the state dict with the state of the keys."""
        raise NotImplementedError

    def _load(
        self, op: str, impl: _C.KVStore, settings: Settings, parts: Mapping[str, Any]
    ) -> Callable[[], None]:
        """Checks a saved state; what it returns restores it, or changes nothing."""
        raise NotImplementedError

    # -- the store

    def _store(self) -> _C.KVStore | None:
        """The store it is set on, or None."""
        impl = None if self._impl is None else self._impl.lock()
        if impl is None:
            return None
        try:
            current = impl.optimizer()
        except RuntimeError:  # closed, forked, or called during an update
            current = None
        return impl if self._is_set(current) else None

    def _bind(self, impl: _C.KVStore) -> None:
        """Becomes the updater of a store; ValueError if it is set on another one."""
        with self._lock:
            if self._store() not in (None, impl):
                raise ValueError(
                    f"set_optimizer: {self!r} is already set on another store; create "
                    "one optimizer per store, or call set_updater(None) on the other"
                )
            if self._store() is None:
                self._later_keys = {}
            settings = self._settings().renamed("set_optimizer", self._find_key(impl))
            settings.check("set_optimizer", impl)
            names = settings.names()
            self._check_known("set_optimizer", impl, names)
            self._enter(impl, settings)
            self._keep(settings)
            self._expect(impl, settings, names)

    def _store_with_state(self, op: str) -> _C.KVStore | None:
        """The store or None; RuntimeError if it was freed, and the state with it."""
        if self._impl is not None and self._impl.lock() is None:
            raise RuntimeError(
                f"{op}: the store that held the optimizer's state was freed; keep the "
                "store, or the Trainer, alive as long as the optimizer"
            )
        return self._store()

    def _find_key(self, impl: _C.KVStore | None) -> Callable[[Any], Any]:
        """Maps names with or without torch.compile's ``_orig_mod.`` to keys."""
        return name_among([*self._later_keys, *(impl.keys() if impl else ())])

    def _check_known(
        self, op: str, impl: _C.KVStore, names: Iterable[StoreKey]
    ) -> None:
        """KeyError for an unknown key, unless the store is empty."""
        if impl.size() > 0:
            check_known(op, names, {*impl.keys(), *self._later_keys})

    def _expect(
        self, impl: _C.KVStore, settings: Settings, named: Iterable[StoreKey]
    ) -> None:
        """Has the first push check keys that were named while the store was empty."""
        unchecked = {*impl.expected_keys(), *(() if impl.size() else named)}
        unchecked -= self._later_keys.keys()
        impl.expect_keys([key for key in settings.names() if key in unchecked])

    def _know(
        self, keys: Iterable[StoreKey], zero_grad: Callable[[bool], None]
    ) -> None:
        """Allows options of keys that the store will only have later, a trainer's."""
        with self._lock:
            self._zero_grad = weakref.WeakMethod(zero_grad)
            impl = self._store()
            assert impl is not None
            self._later_keys = dict.fromkeys(keys)
            settings = self._settings()
            if settings.renamed("Trainer", self._find_key(impl)) != settings:
                self._adopt("Trainer", settings)
            self._expect(impl, self._settings(), [])

    def _keys_of_first_group(self) -> list[StoreKey]:
        with self._lock:
            impl = self._store()
            if impl is None:
                return []
            others = {key for group in self.param_groups[1:] for key in group["keys"]}
            known = dict.fromkeys([*self._later_keys, *impl.keys()])
            return [key for key in known if key not in others]

    # -- options

    @property
    def lr(self) -> float:
        """The learning rate of the first group; writing it takes effect immediately.

        Also for the groups that have the same, as :meth:`set_learning_rate`.

        Raises:
            ValueError: on writing a value that is negative, infinite or NaN. Nothing
                has changed.
        """
        lr: float = self.param_groups[0]["lr"]
        return lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._set_in_groups("lr", value)

    def _settings(self) -> Settings:
        """The current groups and multipliers."""
        self._store()  # may take over numbers that were loaded
        groups = [group.stored() for group in self.param_groups]
        return Settings(groups, self._lr_mult, self._wd_mult)

    def _change(self, group: Group, changes: Mapping[str, Any]) -> None:
        for name in RESERVED:
            if name in changes:
                raise ValueError(
                    f"param_groups: unexpected option {name!r}; call set_param_groups "
                    "to change the keys of groups"
                )
        with self._lock:
            settings = self._settings()
            for other, new in zip(self.param_groups, settings.groups, strict=True):
                if other is group and not changes.keys().isdisjoint(self.defaults):
                    new.update(changes)
                    self._apply(settings)
            dict.update(group, changes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of keys: ``{"keys": [...], "lr": ...}``.

        Raises:
            ValueError: a key that is already in a group, or as
                :meth:`set_param_groups`.
        """
        if not self.param_groups:  # torch's constructor makes the first group
            first = {"keys": None, **param_group, **self.defaults}
            self.param_groups.assign(self, [first])
            return
        op = "add_param_group"
        with self._lock:
            settings = self._settings()
            group = as_group(op, param_group, settings.groups[0], self.defaults)
            settings = settings._replace(groups=[*settings.groups, group])
            self._adopt(op, settings, group["keys"])

    def set_param_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Puts keys into groups with their own options.

        All other keys are in the first group, ``param_groups[0]``. Replaces the groups
        of an earlier call; the state of the keys is kept.

        Args:
            groups: each ``{"keys": [...], "lr": ..., "weight_decay": ...}``. Options
                that are not given are copied from the first group.

        Raises:
            ValueError: a group without keys, a key in two groups, an unknown option,
                or an invalid value. Nothing has changed.
            KeyError: an unknown key; names of parameters may have ``torch.compile``'s
                ``_orig_mod.`` or not. If the store is still empty, its first push
                raises it instead.
            TypeError: a key of the wrong kind (int or str) for the store.
        """
        op = "set_param_groups"
        expect(op, groups, list | tuple, "a list of dicts")
        with self._lock:
            settings = self._settings()
            first = settings.groups[0]
            made = [as_group(op, group, first, self.defaults) for group in groups]
            settings = settings._replace(groups=[first, *made])
            self._adopt(op, settings, settings.group_of())

    def _adopt(
        self, op: str, settings: Settings, names: Iterable[StoreKey] = ()
    ) -> None:
        """Checks, applies and keeps settings in which a caller has named `names`."""
        impl = self._store()
        find = self._find_key(impl)
        settings, names = settings.renamed(op, find), [*map(find, names)]
        settings.check(op, impl)
        if impl is not None:
            self._check_known(op, impl, names)
        self._apply(settings)
        self._keep(settings)
        if impl is not None:
            self._expect(impl, settings, names)

    def _keep(self, settings: Settings) -> None:
        self._lr_mult, self._wd_mult = dict(settings.lr_mult), dict(settings.wd_mult)
        self.param_groups.assign(self, settings.groups)

    def set_lr_mult(self, multipliers: Mapping[Any, float]) -> None:
        """Multiplies the learning rate of some keys; the multiplier of all others is 1.

        Args:
            multipliers: ``{key: multiplier}``. Replaces those of an earlier call, as in
                MXNet.

        Raises:
            ValueError: a multiplier that is negative, infinite or NaN.
            KeyError: as :meth:`set_param_groups`.
            TypeError: an invalid key, or a multiplier that is not a number.
        """
        self._set_multipliers("lr_mult", multipliers)

    def set_wd_mult(self, multipliers: Mapping[Any, float]) -> None:
        """Multiplies the weight decay of some keys; see :meth:`set_lr_mult`."""
        self._set_multipliers("wd_mult", multipliers)

    def _set_multipliers(self, field: str, multipliers: Mapping[Any, float]) -> None:
        op = f"set_{field}"
        with self._lock:
            checked = as_multipliers(op, multipliers)
            changed: dict[str, Any] = {field: checked}
            settings = self._settings()._replace(**changed)
            self._adopt(op, settings, checked)

    # -- state

    @property
    def grad_norm(self) -> float | None:
        """The total 2-norm of the gradients of the last push that made a step.

        Over all keys of the push, before clipping by ``max_norm``. None unless
        ``max_norm`` or ``skip_nonfinite`` is set, which compute it. In a ``dist``
        store, None on all ranks but 0.
        """
        impl = self._store_with_state("grad_norm")
        return None if impl is None else impl.grad_norm()

    @property
    def num_skipped(self) -> int:
        """How many pushes ``skip_nonfinite`` skipped; in ``dist`` stores, on rank 0."""
        impl = self._store_with_state("num_skipped")
        return 0 if impl is None else impl.num_skipped()

    def _saved(self) -> dict[str, Any]:
        """As :meth:`state_dict`, without its hooks."""
        with self._lock:
            self._store_with_state("state_dict")
            return {**self._saved_options(), **self._parts()}

    def _saved_options(self) -> dict[str, Any]:
        """What :meth:`_saved` returns, without the state."""
        with self._lock:
            self._store()  # may take over numbers that were loaded
            return {
                "optimizer": self._name(),
                # Tuples: loading a distributed checkpoint descends into lists and
                # dicts, and only loads items that already exist.
                "param_groups": tuple(
                    {k: _copied(x) for k, x in group.stored().items() if k != "params"}
                    for group in self.param_groups
                ),
                "lr_mult": tuple(self._lr_mult.items()),
                "wd_mult": tuple(self._wd_mult.items()),
                **self._shared_options(),
            }

    def _load_saved(self, state_dict: dict[str, Any], strict: bool) -> None:
        """As :meth:`load_state_dict`, without its hooks."""
        op = "load_state_dict"
        expect(op, state_dict, Mapping, "a dict")
        with self._lock:
            try:
                impl = self._store()
                with nullcontext() if impl is None else checked_together(impl, op):
                    saved = fitted(op, self, impl, state_dict, strict)
                    load = self._load(op, *saved)
                load()
            except TypeError as error:  # of a key or an option
                raise ValueError(str(error)) from error

    def _extras(self) -> list[tuple[int, str, Any]]:
        """What others, such as schedulers, have added: group, name and value."""
        return [
            (i, name, value)
            for i, group in enumerate(self.param_groups)
            for name, value in group.stored().items()
            if group.is_extra(name)
        ]

    def _add_extras(self, extras: Iterable[Sequence[Any]]) -> None:
        for i, name, value in extras:
            if i < len(self.param_groups) and self.param_groups[i].is_extra(name):
                dict.update(self.param_groups[i], {name: value})

    def __repr__(self) -> str:
        """``AdamW(lr=0.001, betas=(0.9, 0.999), ...)``, as in the first group."""
        first = self.param_groups[0]
        options = ", ".join(f"{name}={first[name]!r}" for name in self.defaults)
        return f"{self._name()}({options})"


def _copied(option: Any) -> Any:
    """Schedulers write into a learning rate that is a tensor."""
    if isinstance(option, torch.Tensor):
        return option.detach().clone()
    return tuple(map(_copied, option)) if type(option) is tuple else option
