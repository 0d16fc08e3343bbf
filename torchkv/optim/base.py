"""What all optimizers of a store share: options, groups of keys, saved state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from torchkv import _C
from torchkv.optim.groups import (
    PLACES,
    Group,
    Groups,
    Settings,
    StoreKey,
    as_key,
    as_keys,
    as_multipliers,
    listed,
    near,
    shown,
)


class StoreOptimizer(torch.optim.Optimizer):
    """What the optimizers of a store have in common.

    Set one with :meth:`torchkv.KVStore.set_optimizer`; from then on each push is a
    step of its keys. It belongs to one store at a time, until another updater is set
    there or the store is closed. Its state lives in the store, once per key, however
    many replicas push. Any number of threads may use it.

    It is a :class:`torch.optim.Optimizer`, so schedulers take it. :attr:`param_groups`
    has a first group for all keys that are in no other, and then those of
    :meth:`set_param_groups`; a write to an option there takes effect at the next
    push.
    """

    def __init__(self, defaults: dict[str, Any]) -> None:
        """Makes one of `defaults`, which are checked already."""
        self._lock = threading.RLock()
        self._lr_mult: dict[StoreKey, float] = {}
        self._wd_mult: dict[StoreKey, float] = {}
        self._groups = Groups()
        # Keys that may have options though the store does not have them yet.
        self._later_keys: frozenset[StoreKey] = frozenset()
        # Schedulers warn where no step came before them; here pushes are steps.
        self._opt_called = True
        super().__init__([{"params": []}], defaults)

    @property  # type: ignore[override]
    def param_groups(self) -> Groups:
        """The groups of keys, for schedulers; the options in them can be written."""
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        if groups or self._groups:  # torch's constructor sets an empty list
            raise ValueError(
                "param_groups: expected set_param_groups to change the groups, but got "
                "another list"
            )

    # -- what the kinds of optimizers do each in their way

    def _name(self) -> str:
        """Its name in messages and saved states."""
        return type(self).__name__

    def _store(self) -> _C.KVStore | None:
        """The store that it works on, if there is one."""
        raise NotImplementedError

    def _is_store_gone(self) -> bool:
        """Whether the store that it works on was freed, and the state with it."""
        raise NotImplementedError

    def _enter(self, impl: _C.KVStore, settings: Settings) -> None:
        """Becomes the updater of a store."""
        raise NotImplementedError

    def _apply(self, settings: Settings) -> None:
        """Checks options and brings them into effect; all or, if it raises, none."""
        raise NotImplementedError

    # -- the store

    def _bind(self, impl: _C.KVStore) -> None:
        """Becomes the updater of a store, unless it is that of another one."""
        with self._lock:
            if self._store() not in (None, impl):
                raise ValueError(
                    "set_optimizer: expected an optimizer that is on no store, but got "
                    f"{self!r}, which is on another one; make one for each store, or "
                    "call set_updater(None) on the other"
                )
            op = "set_optimizer"
            settings = self._settings()
            settings.check_kind(impl)
            if self._store() is None:
                self._later_keys = frozenset()
            names = settings.names()
            self._check_known(op, impl, names)
            self._enter(impl, settings)
            self._expect(impl, settings, names)

    def _store_with_state(self, op: str) -> _C.KVStore | None:
        """The store; RuntimeError where it is gone, and the state with it."""
        if self._is_store_gone():
            raise RuntimeError(
                f"{op}: expected an optimizer whose store exists, which has the state, "
                "but got one whose store was freed; keep the store, or the Trainer, as "
                "long as the optimizer"
            )
        return self._store()

    def _check_known(
        self, op: str, impl: _C.KVStore, names: Iterable[StoreKey]
    ) -> None:
        """KeyError for a name that is no key, if the store has keys."""
        if impl.size() == 0:
            return
        for key in names:
            if not impl.contains(key) and key not in self._later_keys:
                raise _unknown(op, key, {*impl.keys(), *self._later_keys})

    def _expect(
        self, impl: _C.KVStore, settings: Settings, named: Iterable[StoreKey]
    ) -> None:
        """Lets the first push check the names that a store without keys took."""
        unchecked = {*impl.expected_keys(), *(() if impl.size() else named)}
        unchecked -= self._later_keys
        impl.expect_keys([key for key in settings.names() if key in unchecked])

    def _check_names(self, op: str, keys: Iterable[StoreKey]) -> None:
        """KeyError where other keys than these have options."""
        keys = frozenset(keys)
        for key in self._settings().names():
            if key not in keys:
                raise _unknown(op, key, keys)

    def _know(self, keys: Iterable[StoreKey]) -> None:
        """Lets keys have options that the store will have later."""
        with self._lock:
            impl = self._store()
            assert impl is not None
            self._later_keys = frozenset(keys)
            self._expect(impl, self._settings(), [])

    # -- options

    @property
    def lr(self) -> float:
        """The learning rate of the first group. Writing it takes effect at once.

        Raises:
            ValueError: on writing one that is negative, infinite or NaN; the old one
                stays.
        """
        lr: float = self.param_groups[0]["lr"]
        return lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.param_groups[0]["lr"] = value

    def _settings(self) -> Settings:
        """Groups and factors as they are now."""
        self._store()  # may bring numbers that were loaded
        groups = [dict(group) for group in self.param_groups]
        return Settings(groups, self._lr_mult, self._wd_mult)

    def _change(self, group: Group, changes: Mapping[str, Any]) -> None:
        for name in PLACES:
            if name in changes:
                raise ValueError(
                    f"param_groups: expected an option, but got {name!r}; "
                    "set_param_groups changes which keys are in which group"
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
            ValueError: a key that is in a group already, no keys, or what
                :meth:`set_param_groups` refuses.
        """
        if not self.param_groups:  # torch's constructor makes the first group
            first = {"keys": None, **param_group, **self.defaults}
            self.param_groups.replace(0, 0, [Group(self, first)])
            return
        op = "add_param_group"
        with self._lock:
            settings = self._settings()
            made = self._made(op, param_group)
            groups = [*settings.groups, made]
            self._name_keys(op, settings._replace(groups=groups), made["keys"])

    def set_param_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Puts keys into groups with options of their own.

        All other keys are in the first group, ``param_groups[0]``. Groups made by an
        earlier call are dissolved; state of the keys stays.

        Args:
            groups: ``{"keys": [...], "lr": ..., "weight_decay": ...}`` each. Options
                that are not given are as they are in the first group at this moment.

        Raises:
            ValueError: a group without keys, a key in two groups, an unknown option,
                or an invalid value. Nothing has changed.
            KeyError: a key that the store does not have. While the store has no keys
                at all, its first push raises it instead.
            TypeError: a key of the kind that the store does not take.
        """
        op = "set_param_groups"
        if not isinstance(groups, list | tuple):
            raise TypeError(
                f"{op}: expected a list of dicts, but got {type(groups).__name__}"
            )
        with self._lock:
            settings = self._settings()
            made = [self._made(op, group) for group in groups]
            settings = settings._replace(groups=[settings.groups[0], *made])
            self._name_keys(op, settings, [key for g in made for key in g["keys"]])

    def _made(self, op: str, group: Mapping[str, Any]) -> dict[str, Any]:
        """A group out of what a caller gave for it."""
        if not isinstance(group, Mapping):
            raise TypeError(
                f"{op}: expected a dict as group, but got {type(group).__name__}"
            )
        keys = as_keys(op, group.get("keys", []))
        if not keys:
            raise ValueError(f"{op}: expected 'keys' in each group, but got none")
        for name in group:
            if name not in self.defaults and name != "keys":
                raise ValueError(
                    f"{op}: expected an option out of {', '.join(self.defaults)}, but "
                    f"got {name!r}{near(str(name), self.defaults)}"
                )
        first = self.param_groups[0]
        return {
            **{name: first[name] for name in self.defaults},
            **group,
            "keys": keys,
            "params": [],
        }

    def _name_keys(
        self, op: str, settings: Settings, names: Iterable[StoreKey]
    ) -> None:
        """Adopts settings, of which a caller has named the keys `names`."""
        impl = self._store()
        if impl is not None:
            settings.check_distinct(op)
            settings.check_kind(impl)
            self._check_known(op, impl, names)
        self._adopt(op, settings)
        if impl is not None:
            self._expect(impl, settings, names)

    def _adopt(self, op: str, settings: Settings) -> None:
        """Applies groups and multipliers, then keeps them."""
        self._check(op, settings)
        self._apply(settings)
        self._keep(settings)

    def _check(self, op: str, settings: Settings) -> None:
        settings.check_distinct(op)
        impl = self._store()
        if impl is not None:
            settings.check_kind(impl)

    def _keep(self, settings: Settings) -> None:
        self._lr_mult = dict(settings.lr_mult)
        self._wd_mult = dict(settings.wd_mult)
        # In place: programs hold on to param_groups and to its first group.
        groups = settings.groups
        self.param_groups.replace(len(groups), len(self.param_groups), [])
        for i, group in enumerate(groups):
            if i == 0:
                dict.clear(self.param_groups[0])
                dict.update(self.param_groups[0], group)
            elif i < len(self.param_groups) and self.param_groups[i] == group:
                continue
            else:
                self.param_groups.replace(i, i + 1, [Group(self, group)])

    def set_lr_mult(self, multipliers: Mapping[Any, float]) -> None:
        """Multiplies the learning rate of keys; all others have the factor 1.

        Args:
            multipliers: ``{key: factor}``. What an earlier call set is forgotten, as
                in MXNet.

        Raises:
            ValueError: a factor that is negative, infinite or NaN.
            KeyError: as :meth:`set_param_groups`.
            TypeError: a key that the store does not take, a factor that is no number.
        """
        op = "set_lr_mult"
        with self._lock:
            factors = as_multipliers(op, multipliers)
            settings = self._settings()._replace(lr_mult=factors)
            self._name_keys(op, settings, factors)

    def set_wd_mult(self, multipliers: Mapping[Any, float]) -> None:
        """Multiplies the weight decay of keys, as :meth:`set_lr_mult`."""
        op = "set_wd_mult"
        with self._lock:
            factors = as_multipliers(op, multipliers)
            settings = self._settings()._replace(wd_mult=factors)
            self._name_keys(op, settings, factors)

    # -- what torch's own optimizers do by hand

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Refused: a push of gradients is a step.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "step: expected gradients to be pushed, which makes the store's optimizer "
            "step, but got a call of step(); call store.push(keys, gradients) instead"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: gradients are the model's, for ``model.zero_grad()``."""

    # -- state

    @property
    def grad_norm(self) -> float | None:
        """The 2-norm of the gradients of the last push that made a step.

        Of all keys of the push together, before ``max_norm`` limited it. None where
        the optimizer has neither ``max_norm`` nor ``skip_nonfinite``, which compute
        it.
        """
        impl = self._store_with_state("grad_norm")
        return None if impl is None else impl.grad_norm()

    @property
    def num_skipped(self) -> int:
        """How many pushes made no step, as a gradient was not finite.

        Counted from the beginning of the store; only ``skip_nonfinite`` skips.
        """
        impl = self._store_with_state("num_skipped")
        return 0 if impl is None else impl.num_skipped()

    def state_dict(self) -> dict[str, Any]:
        """A snapshot of options and state, of tensors, numbers, strings and keys.

        ``torch.save`` writes it, ``torch.load(weights_only=True)`` reads it, and the
        optimizer is a ``Stateful`` of ``torch.distributed.checkpoint``.

        Returns:
            A dict with ``"optimizer"``, the name; ``"param_groups"``; ``"lr_mult"`` and
            ``"wd_mult"``, pairs of key and factor; for built-in optimizers
            ``"gradient"``, the gradient options; and ``"state"``, by key: the number of
            steps and tensors by torch.optim's names, each of the stored value's shape,
            held once however many replicas push. They share nothing with the store.
            Not on a store, its state is empty.

        Raises:
            RuntimeError: its store was freed, and the state with it.
        """
        with self._lock:
            self._store_with_state("state_dict")
            return {
                "optimizer": self._name(),
                # Tuples: what reads a distributed checkpoint goes into lists and
                # dicts, and takes from them only what is there already.
                "param_groups": tuple(
                    {name: value for name, value in group.items() if name != "params"}
                    for group in self.param_groups
                ),
                "lr_mult": tuple(self._lr_mult.items()),
                "wd_mult": tuple(self._wd_mult.items()),
                **self._more_state(),
                "state": self._states(),
            }

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Brings back what :meth:`state_dict` gave. Stored values do not change.

        Args:
            state_dict: of an optimizer of the same name. It is only read, and not
                after the call.
            strict: whether its keys must be those of the store. If not, keys that
                one of them lacks are left alone.

        Raises:
            ValueError: of another optimizer, keys missing or too many, a state
                missing, unknown or of another shape than the key's. The message names
                the option or key. Nothing has changed.
            RuntimeError: it is not set on a store.
        """
        op = "load_state_dict"
        parts = self._checked_parts(op, state_dict)
        with self._lock:
            impl = self._store()
            if impl is None:
                raise RuntimeError(
                    f"{op}: expected an optimizer that is set on a store, but got one "
                    "that is not; call store.set_optimizer(...) first"
                )
            try:
                self._load_parts(op, impl, parts, strict)
            except TypeError as error:  # of a key or an option
                raise ValueError(str(error)) from error

    def _load_parts(
        self, op: str, impl: _C.KVStore, parts: Mapping[str, Any], strict: bool
    ) -> None:
        present = impl.keys()
        # A distributed checkpoint loads tensors into the state of the int 3 and
        # puts numbers beside it, under the str "3".
        states: dict[StoreKey, dict[str, Any]] = {}
        for key, state in parts["state"].items():
            states.setdefault(_as_present(op, key, present), {}).update(state)
        if strict:
            _check_same_keys(op, set(present), set(states))
        common = {key: states[key] for key in present if key in states}
        groups = [{**dict(group), "params": []} for group in parts["param_groups"]]
        for group in groups:
            if group["keys"] is not None:
                group["keys"] = as_keys(op, group["keys"])
        lr_mult = as_multipliers(op, _pairs(op, "lr_mult", parts["lr_mult"]))
        wd_mult = as_multipliers(op, _pairs(op, "wd_mult", parts["wd_mult"]))
        settings = Settings(groups, lr_mult, wd_mult)
        self._load(op, impl, settings, {**parts, "state": common})

    def _checked_parts(self, op: str, state_dict: Any) -> dict[str, Any]:
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"{op}: expected a dict, but got {type(state_dict).__name__}"
            )
        parts = {"lr_mult": [], "wd_mult": [], **state_dict}
        for name in ("optimizer", "param_groups", "state"):
            if name not in parts:
                raise ValueError(
                    f"{op}: expected what state_dict() of a store's optimizer "
                    f"returned, but got a dict without {name!r}"
                )
        if parts["optimizer"] != self._name():
            raise ValueError(
                f"{op}: expected the state of the optimizer {self._name()}, but got "
                f"that of {parts['optimizer']}"
            )
        groups = parts["param_groups"]
        if not isinstance(groups, list | tuple) or not groups:
            raise ValueError(f"{op}: expected at least one parameter group")
        for i, group in enumerate(groups):
            if not isinstance(group, Mapping):
                raise ValueError(
                    f"{op}: expected a dict as param_groups[{i}], but got "
                    f"{type(group).__name__}"
                )
            for name in ("keys", *self.defaults):
                if name not in group:
                    raise ValueError(
                        f"{op}: expected the option {name!r} in param_groups[{i}], but "
                        "got none"
                    )
            if (group["keys"] is None) != (i == 0):
                raise ValueError(
                    f"{op}: expected a list of keys in each of param_groups but the "
                    f"first, but got {group['keys']!r} in param_groups[{i}]"
                )
        if not isinstance(parts["state"], Mapping):
            raise ValueError(
                f"{op}: expected a dict by key as 'state', but got "
                f"{type(parts['state']).__name__}"
            )
        for key, state in parts["state"].items():
            if not isinstance(state, Mapping):
                raise ValueError(
                    f"{op}: expected a dict by name as state, but got "
                    f"{type(state).__name__} (key {shown(key)})"
                )
        return parts

    def _more_state(self) -> dict[str, Any]:
        """What an optimizer saves besides."""
        return {}

    def _states(self) -> dict[StoreKey, dict[str, Any]]:
        """Copies of the state, by key."""
        raise NotImplementedError

    def _load(
        self, op: str, impl: _C.KVStore, settings: Settings, parts: Mapping[str, Any]
    ) -> None:
        """Brings back a saved state; all of it or, if it raises, nothing."""
        raise NotImplementedError

    def _extras(self) -> list[dict[str, Any]]:
        """What others, such as schedulers, have added to the groups."""
        known = {*self.defaults, *PLACES}
        return [
            {name: value for name, value in group.items() if name not in known}
            for group in self.param_groups
        ]

    def _add_extras(self, extras: Sequence[Mapping[str, Any]]) -> None:
        known = {*self.defaults, *PLACES}
        for group, more in zip(self.param_groups, extras, strict=False):
            dict.update(group, {k: v for k, v in more.items() if k not in known})

    def __repr__(self) -> str:
        """``AdamW(lr=0.001, betas=(0.9, 0.999), ...)`` of the first group."""
        first = self.param_groups[0]
        options = ", ".join(f"{name}={first[name]!r}" for name in self.defaults)
        return f"{self._name()}({options})"


def _as_present(op: str, key: Any, present: Sequence[StoreKey]) -> StoreKey:
    """A key of a saved state, of the kind of the store's keys."""
    if isinstance(key, str) and present and isinstance(present[0], int):
        try:
            return int(key)
        except ValueError:
            pass
    return as_key(op, key)


def _unknown(op: str, key: StoreKey, known: Iterable[StoreKey]) -> KeyError:
    hint = near(key, map(str, known)) if isinstance(key, str) else ""
    return KeyError(
        f"{op}: expected keys of the store, but got {shown(key)}, which was never "
        f"initialised{hint} (key {shown(key)})"
    )


def _pairs(op: str, name: str, pairs: Any) -> dict[Any, Any]:
    try:
        return dict(pairs)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{op}: expected pairs of key and factor as {name}, but got {pairs!r}"
        ) from error


def _check_same_keys(op: str, present: set[Any], saved: set[Any]) -> None:
    missing, unknown = present - saved, saved - present
    for what, keys in (("missing", missing), ("too many", unknown)):
        if keys:
            some = listed(sorted(keys, key=str))
            raise ValueError(
                f"{op}: expected the state of the store's keys, but got one in which "
                f"{len(keys)} are {what} (key {some}); strict=False leaves them alone"
            )
