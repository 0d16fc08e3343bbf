"""The base class of the built-in optimizers, whose formulas run in C++."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from torchkv import _C
from torchkv.arguments import StoreKey, expect, shown
from torchkv.optim.base import StoreOptimizer
from torchkv.optim.groups import Settings
from torchkv.optim.options import numbers_of, options_of, with_defaults

# Switches between torch's implementations; a store's optimizers have only one.
_IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")

# By identity, so that other KVStore objects of a store find what one of them set.
on_stores: weakref.WeakValueDictionary[int, BuiltIn] = weakref.WeakValueDictionary()


def _gradient_option(name: str) -> Any:
    def get(self: BuiltIn) -> Any:
        return self._gradient[name]

    def set_(self: BuiltIn, value: Any) -> None:
        with self._lock:
            settings = self._settings()
            gradient = with_defaults(self._name(), {**self._gradient, name: value})
            self._hand_over(self._store(), settings, gradient)
            self._gradient = gradient

    return property(get, set_, doc=f"The gradient option ``{name}``.")


class BuiltIn(StoreOptimizer):
    """Base class of the optimizers whose formula runs in C++.

    Values of fp16 and bf16 have an fp32 master, which is rounded to the stored value
    after each step.
    """

    _rule: ClassVar[str]

    accumulate: int = _gradient_option("accumulate")
    rescale_grad: float = _gradient_option("rescale_grad")
    clip_value: float | None = _gradient_option("clip_value")
    max_norm: float | None = _gradient_option("max_norm")
    skip_nonfinite: bool = _gradient_option("skip_nonfinite")
    lazy: bool = _gradient_option("lazy")

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Takes the ``locals()`` at the beginning of a subclass's ``__init__``."""
        op = type(self).__name__
        no_options = ("self", "__class__", "gradient")
        options = {k: v for k, v in arguments.items() if k not in no_options}
        for name in _IMPLEMENTATIONS:
            if options.pop(name, None):
                raise ValueError(
                    f"{op}: expected {name} to be None or False, but got True; a store "
                    "has one implementation"
                )
        self._identity = 0
        self._gradient = with_defaults(op, arguments["gradient"], options)
        # The numbers that the store has, as its optimizer() returns them.
        self._in_store: tuple[Any, ...] = ()
        super().__init__(options)
        self._hand_over(None, self._settings())

    # -- the store

    def _is_set(self, current: Any) -> bool:
        if isinstance(current, tuple) and current[0] == self._identity:
            self._follow(current)
            return True
        self._impl = None
        return False

    def _follow(self, described: tuple[Any, ...]) -> None:
        """Takes over numbers that changed in the store, such as loaded ones."""
        in_store = numbers, by_key, gradient = described[2:]
        with self._lock:
            if in_store == self._in_store:
                return
            self._in_store = in_store
            options = [options_of(self.defaults, group) for group in numbers]
            groups: list[dict[str, Any]] = [
                {"keys": [] if i else None, "params": [], **group}
                for i, group in enumerate(options)
            ]
            for key in sorted(by_key):
                if by_key[key][0] != 0:
                    groups[by_key[key][0]]["keys"].append(key)
            extras = self._extras()
            lr_mult = {k: x[1] for k, x in by_key.items() if x[1] != 1}
            wd_mult = {k: x[2] for k, x in by_key.items() if x[2] != 1}
            self._gradient = options_of(self._gradient, gradient)
            self._take_shared(gradient)
            self._keep(Settings(groups, lr_mult, wd_mult))
            self._add_extras(extras)

    def _enter(self, impl: _C.KVStore, settings: Settings) -> None:
        on_stores.pop(self._identity, None)
        self._identity = self._hand_over(impl, settings, keep_state=False)
        self._impl = impl.weak()
        on_stores[self._identity] = self

    def _hand_over(
        self,
        impl: _C.KVStore | None,
        settings: Settings,
        gradient: Mapping[str, Any] | None = None,
        keep_state: bool = True,
    ) -> int:
        """Passes its numbers to the store, if any; ValueError if one is invalid."""
        groups, shared = self._checked_numbers(settings, gradient or self._gradient)
        if impl is None:
            return 0
        numbers = groups, _by_key(settings), shared
        identity = impl.set_optimizer(self._rule, *numbers, keep_state)
        self._in_store = numbers
        return identity

    def _checked_numbers(
        self, settings: Settings, gradient: Mapping[str, Any]
    ) -> tuple[list[dict[str, float]], dict[str, float]]:
        """Of each group, and of all; ValueError if one is invalid."""
        groups = [self._numbers_of(group) for group in settings.groups]
        shared = {name: float(value or 0) for name, value in gradient.items()}
        shared.update(self._shared_numbers())
        for group in groups:
            _C.KVStore.check_optimizer(self._name(), self._rule, {**group, **shared})
        return groups, shared

    def _numbers_of(self, group: Mapping[str, Any]) -> dict[str, float]:
        return numbers_of(self._name(), {name: group[name] for name in self.defaults})

    def _shared_numbers(self) -> dict[str, float]:
        """What all groups share besides gradient options, as numbers of C++."""
        return {}

    def _is_shared(self, name: str) -> bool:
        """Whether it is the name of one of these numbers."""
        return False

    def _take_shared(self, numbers: Mapping[str, float]) -> None:
        """Takes over these numbers, which have changed in the store."""

    def _apply(self, settings: Settings) -> None:
        self._hand_over(self._store(), settings)

    # -- state

    def _state_names(self, group: Mapping[str, Any]) -> list[str]:
        """torch.optim's names of the states of the group's keys."""
        return _C.KVStore.state_names(self._rule, self._numbers_of(group))

    def _shared_options(self) -> dict[str, Any]:
        return {"gradient": {**self._gradient, **self._shared_numbers()}}

    def _parts(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"state": {}}
        impl = self._store()
        keys: list[StoreKey] = [] if impl is None else list(impl.keys())
        if impl is None or not keys:
            return parts
        parts["state"] = dict(zip(keys, impl.optimizer_states(keys), strict=True))
        group_of = self._settings().group_of()
        accumulated = ["accumulated"] if self._gradient["accumulate"] > 1 else []
        names_of = [[*self._state_names(x), *accumulated] for x in self.param_groups]
        for key, state in parts["state"].items():
            dtype = impl.dtype(key)
            if not (dtype.is_floating_point or dtype.is_complex):
                continue
            kept = _C.KVStore.state_dtype(dtype)
            group = group_of.get(key, 0)
            is_row_sparse = impl.is_row_sparse(key)
            shape = impl.shape(key)
            if is_row_sparse:  # as many as the states that there are
                shape = (impl.num_rows(key), *shape[1:])
            for name in names_of[group]:
                # A momentum that began after the first step has no buffer yet.
                if name in state or (self._rule == "sgd" and state["step"] > 0):
                    continue
                if name == "previous_weight":
                    state[name] = _weight(impl, key, kept)
                    continue
                first: complex = 0.0
                if self._rule == "adagrad" and name == "sum":
                    first = self.param_groups[group]["initial_accumulator_value"]
                    first = complex(first, first) if kept.is_complex else first
                state[name] = torch.full(shape, first, dtype=kept, device="cpu")
            if kept != dtype and "master" not in state:
                state["master"] = _weight(impl, key, kept)
        return parts

    def _load(
        self, op: str, impl: _C.KVStore, settings: Settings, parts: Mapping[str, Any]
    ) -> Callable[[], None]:
        saved = parts.get("gradient", {})
        expect(op, saved, Mapping, "a dict of options as 'gradient'")
        shared = {name: saved[name] for name in saved if self._is_shared(name)}
        gradient = {name: saved[name] for name in saved if name not in shared}
        gradient = with_defaults(op, gradient)
        states = {
            key: _plain_state(op, key, state) for key, state in parts["state"].items()
        }
        settings.check(op, impl)
        group_of = settings.group_of()
        names = [self._state_names(group) for group in settings.groups]
        for key, state in states.items():
            for name in names[group_of.get(key, 0)]:
                # SGD's buffer only exists after the first step with a momentum.
                if state["step"] > 0 and name not in state and self._rule != "sgd":
                    raise ValueError(
                        f"{op}: missing state {name!r} of {self._name()} "
                        f"(key {shown(key)})"
                    )
        before, shared_before = self._settings(), self._shared_numbers()
        try:
            self._take_shared(shared)
            self._checked_numbers(settings, gradient)
        finally:
            self._take_shared(shared_before)

        def load() -> None:
            try:
                self._take_shared(shared)
                self._hand_over(impl, settings, gradient)
            except BaseException:
                self._take_shared(shared_before)
                raise
            try:
                # On several machines also without any, as all ranks make the call.
                if states or impl.num_workers() > 1:
                    impl.set_optimizer_states(list(states), list(states.values()))
            except BaseException:
                self._take_shared(shared_before)
                self._hand_over(impl, before)
                raise
            self._gradient = gradient
            self._keep(settings)
            self._expect(impl, settings, ())

        return load

    # -- copies

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles the options only, without store and state.

        A copy of the store also copies its optimizer, with its state.
        """
        with self._lock:
            options = dict(self.defaults), dict(self._gradient)
            return self._unpickle, (*options, self._settings())

    @classmethod
    def _unpickle(
        cls, options: Mapping[str, Any], gradient: Mapping[str, Any], settings: Settings
    ) -> BuiltIn:
        make: Callable[..., BuiltIn] = cls
        optimizer = make(**gradient)
        optimizer.defaults.update(options)
        optimizer._adopt("load", settings)
        return optimizer


def _weight(impl: _C.KVStore, key: StoreKey, dtype: torch.dtype) -> torch.Tensor:
    """A key's value, of a row-sparse one its rows in the order of their states."""
    value: torch.Tensor = impl.pull(key, None, 0)
    return (value.values() if impl.is_row_sparse(key) else value).to(dtype)


def _plain_state(op: str, key: StoreKey, state: Mapping[str, Any]) -> dict[str, Any]:
    """A key's state as passed to C++: without tensors that no step has used yet."""
    result: dict[str, Any] = {}
    for name in ("step", "num_accumulated"):
        result[name] = state.get(name)
        if not isinstance(result[name], int):
            kind = type(result[name]).__name__
            raise ValueError(
                f"{op}: expected an int as {name!r}, but got {kind} (key {shown(key)})"
            )
    for name, value in state.items():
        if name in result:
            continue
        is_tensor = isinstance(value, torch.Tensor)
        if name == "row_ids" and is_tensor and value.dtype == torch.int64:
            if max(result["step"], result["num_accumulated"]) > 0:
                result[name] = value
            continue
        if not (is_tensor and (value.is_floating_point() or value.is_complex())):
            kind = value.dtype if is_tensor else type(value).__name__
            raise ValueError(
                f"{op}: expected a floating-point or complex tensor as {name!r}, but "
                f"got {kind} (key {shown(key)})"
            )
        count = result["num_accumulated" if name == "accumulated" else "step"]
        if count > 0:
            result[name] = value
    return result


def _by_key(settings: Settings) -> dict[StoreKey, tuple[int, float, float]]:
    """Group and multipliers of the keys that have their own options."""
    _, lr_mult, wd_mult = settings
    group_of = settings.group_of()
    return {
        key: (group_of.get(key, 0), lr_mult.get(key, 1.0), wd_mult.get(key, 1.0))
        for key in {**group_of, **lr_mult, **wd_mult}
    }
