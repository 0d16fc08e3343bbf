"""What the built-in optimizers share: options checked and handed over to C++.

The formulas are in ``csrc/kernels/rules.h``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypedDict

import torch

from torchkv import _C
from torchkv.optim.base import StoreOptimizer
from torchkv.optim.groups import Settings, StoreKey, as_number, near, shown


class GradientOptions(TypedDict, total=False):
    """What is done to the summed gradient before the formula, in this order.

    All optimizers of :mod:`torchkv.optim` take these by keyword, and have attributes
    of these names, whose writes take effect at the next push.
    """

    accumulate: int
    """So many pushes of a key are added up to one step; 1 = each push is one."""
    rescale_grad: float
    """A factor, such as 1 / batch size."""
    clip_value: float | None
    """Each element is limited to [-clip_value, clip_value]; None = not."""
    max_norm: float | None
    """The 2-norm of all gradients of one push, of all its keys together, is limited as
    by ``torch.nn.utils.clip_grad_norm_``; None = not."""
    skip_nonfinite: bool
    """A push whose gradients' norm is not finite makes no step and is not kept."""


_GRADIENT_DEFAULTS: dict[str, Any] = {
    "accumulate": 1,
    "rescale_grad": 1.0,
    "clip_value": None,
    "max_norm": None,
    "skip_nonfinite": False,
}

# Torch's switches between its implementations; there is one here.
_IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")

# How messages call options; all numbers are at least 0 but dampening.
_WORDS = {"lr": "learning rate", "weight_decay": "weight decay", "eps": "epsilon"}
_SWITCHES = {
    "nesterov",
    "maximize",
    "amsgrad",
    "centered",
    "decoupled_weight_decay",
}

# By identity, for the store's other owners to find what one of them set.
on_stores: weakref.WeakValueDictionary[int, BuiltIn] = weakref.WeakValueDictionary()


def _checked_gradient(
    op: str, options: Mapping[str, Any], others: Iterable[str] = ()
) -> dict[str, Any]:
    """Options with defaults; `others` are an optimizer's own, for messages."""
    for name in options:
        if name not in _GRADIENT_DEFAULTS:
            known = [*others, *_GRADIENT_DEFAULTS]
            raise TypeError(
                f"{op}: expected an option out of {', '.join(known)}, but got "
                f"{name!r}{near(name, known)}"
            )
    checked = {**_GRADIENT_DEFAULTS, **options}
    count = as_number(op, "accumulate", checked["accumulate"])
    if not (count >= 1 and count.is_integer()):
        raise ValueError(
            f"{op}: expected an accumulate that is an int of at least 1, but got "
            f"{checked['accumulate']!r}"
        )
    checked["accumulate"] = int(count)
    if not math.isfinite(as_number(op, "rescale_grad", checked["rescale_grad"])):
        raise ValueError(
            f"{op}: expected a rescale_grad that is finite, but got "
            f"{checked['rescale_grad']!r}"
        )
    for name in ("clip_value", "max_norm"):
        if checked[name] is not None:
            limit = as_number(op, name, checked[name])
            if not (math.isfinite(limit) and limit > 0):
                raise ValueError(
                    f"{op}: expected a {name} greater than 0 that is finite, or None, "
                    f"but got {checked[name]!r}"
                )
    checked["skip_nonfinite"] = _as_switch(
        op, "skip_nonfinite", checked["skip_nonfinite"]
    )
    return checked


def _as_switch(op: str, name: str, value: Any) -> bool:
    if not isinstance(value, bool | int) or value not in (0, 1):
        raise TypeError(f"{op}: expected True or False as {name}, but got {value!r}")
    return bool(value)


def _number(op: str, name: str, value: Any) -> float:
    number = as_number(op, name, value)
    if math.isfinite(number) and (number >= 0 or name == "dampening"):
        return number
    least = "" if name == "dampening" else " of at least 0"
    raise ValueError(
        f"{op}: expected a {_WORDS.get(name, name)}{least} that is finite, but got "
        f"{value!r}"
    )


def _betas(op: str, betas: Any) -> tuple[float, float]:
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise ValueError(f"{op}: expected two numbers as betas, but got {betas!r}")
    for i, beta in enumerate(betas):
        if not 0 <= as_number(op, f"betas[{i}]", beta) < 1:
            raise ValueError(
                f"{op}: expected a beta parameter of at least 0 and less than 1 at "
                f"index {i}, but got {beta!r}"
            )
    return float(betas[0]), float(betas[1])


def _numbers(op: str, options: Mapping[str, Any]) -> dict[str, float]:
    """A group's options as the C++ rule's numbers; checked."""
    result: dict[str, float] = {}
    for name, value in options.items():
        if name == "betas":
            result["beta1"], result["beta2"] = _betas(op, value)
        elif name == "decoupled_weight_decay":
            result["decoupled"] = _as_switch(op, name, value)
        elif name in _SWITCHES:
            result[name] = _as_switch(op, name, value)
        else:
            result[name] = _number(op, name, value)
    if result.get("nesterov") and not (
        result["momentum"] > 0 and result["dampening"] == 0
    ):
        raise ValueError(
            f"{op}: expected a momentum greater than 0 and no dampening with Nesterov "
            f"momentum, but got momentum {options['momentum']!r} and dampening "
            f"{options['dampening']!r}"
        )
    return result


class BuiltIn(StoreOptimizer):
    """An optimizer that is a formula in C++.

    Values of fp16 and bf16 are kept in fp32 beside the stored ones, which are these
    rounded after each step.
    """

    _rule: ClassVar[str]

    accumulate: int
    rescale_grad: float
    clip_value: float | None
    max_norm: float | None
    skip_nonfinite: bool

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Makes one of what ``locals()`` is at the beginning of a class's own."""
        op = type(self).__name__
        no_options = ("self", "__class__", "gradient")
        options = {k: v for k, v in arguments.items() if k not in no_options}
        for name in _IMPLEMENTATIONS:
            if options.pop(name, None):
                raise ValueError(
                    f"{op}: expected {name} to be None or False, as a store's "
                    "optimizer has one implementation, but got True"
                )
        self._impl: _C.WeakKVStore | None = None
        self._identity = 0
        self._gradient = _checked_gradient(op, arguments["gradient"], options)
        _numbers(op, options)
        super().__init__(options)

    @classmethod
    def _of_defaults(
        cls, options: Mapping[str, Any], gradient: Mapping[str, Any]
    ) -> BuiltIn:
        """One of the options that another had as its defaults."""
        make: Any = cls
        result: BuiltIn = make(**options, **gradient)
        return result

    # -- the store

    def _is_store_gone(self) -> bool:
        return self._impl is not None and self._impl.lock() is None

    def _store(self) -> _C.KVStore | None:
        impl = None if self._impl is None else self._impl.lock()
        if impl is None:
            return None
        try:
            current = impl.optimizer()
        except RuntimeError:  # closed, or forked
            current = None
        if isinstance(current, tuple) and current[0] == self._identity:
            self._follow(current)
            return impl
        self._impl = None
        return None

    def _follow(self, described: tuple[Any, ...]) -> None:
        """Takes over numbers that were changed in the store itself.

        Loading a checkpoint does so. Groups are replaced where they differ.
        """
        _, _, numbers, by_key, gradient = described
        with self._lock:
            names = list(self.defaults)
            options = [options_of(names, group) for group in numbers]
            own = [
                options_of(names, _numbers(self._name(), {x: group[x] for x in names}))
                for group in self.param_groups
            ]
            current = Settings(self.param_groups, self._lr_mult, self._wd_mult)
            if (
                options == own
                and by_key == _by_key(current)
                and gradient == _gradient_numbers(self._gradient)
            ):
                return
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
            self._gradient = {
                "accumulate": int(gradient["accumulate"]),
                "rescale_grad": gradient["rescale_grad"],
                "clip_value": gradient["clip_value"] or None,
                "max_norm": gradient["max_norm"] or None,
                "skip_nonfinite": bool(gradient["skip_nonfinite"]),
            }
            self._keep(Settings(groups, lr_mult, wd_mult))
            self._add_extras(extras)

    def _go_on(
        self, impl: _C.KVStore, last_identity: int, described: tuple[Any, ...]
    ) -> None:
        """Becomes the face of what was loaded in place of the rule that it set."""
        with self._lock:
            if self._identity != last_identity:
                return  # another thread has set it on a store meanwhile
            self._impl, self._identity = impl.weak(), described[0]
            on_stores.pop(last_identity, None)
            on_stores[self._identity] = self
            self._follow(described)

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
        name = self._name()
        numbers = [
            _numbers(name, {option: group[option] for option in self.defaults})
            for group in settings.groups
        ]
        if impl is None:
            return 0
        return impl.set_optimizer(
            self._rule,
            numbers,
            _by_key(settings),
            _gradient_numbers(gradient or self._gradient),
            keep_state,
        )

    def _apply(self, settings: Settings) -> None:
        self._hand_over(self._store(), settings)

    # -- state

    def _more_state(self) -> dict[str, Any]:
        return {"gradient": dict(self._gradient)}

    def _state_names(self, group: Mapping[str, Any]) -> list[str]:
        """torch.optim's names of what a key of the group has."""
        raise NotImplementedError

    def _states(self) -> dict[StoreKey, dict[str, Any]]:
        impl = self._store()
        keys: Sequence[StoreKey] = [] if impl is None else impl.keys()
        if impl is None or not keys:
            return {}
        states = impl.optimizer_states(list(keys))
        group_of = self._settings().group_of()
        for key, state in zip(keys, states, strict=True):
            self._complete(impl, key, state, self.param_groups[group_of.get(key, 0)])
        return dict(zip(keys, states, strict=True))

    def _complete(
        self,
        impl: _C.KVStore,
        key: StoreKey,
        state: dict[str, Any],
        group: Mapping[str, Any],
    ) -> None:
        """Adds what the next step would make, as it would make it.

        So a state has the same names before the first step, which is when a
        distributed checkpoint asks what there is to load.
        """
        dtype = impl.dtype(key)
        if not (dtype.is_floating_point or dtype.is_complex):
            return
        kept = kept_dtype(dtype)
        fill = group.get("initial_accumulator_value", 0.0)
        names = self._state_names(group)
        if self._gradient["accumulate"] > 1:
            names = [*names, "accumulated"]
        for name in names:
            # A momentum that began after the first step has no buffer yet.
            if name not in state and not (self._rule == "sgd" and state["step"] > 0):
                value = torch.zeros(impl.shape(key), dtype=kept, device="cpu")
                if fill and name == "sum":
                    real = torch.view_as_real(value) if kept.is_complex else value
                    real.fill_(fill)
                state[name] = value
        if kept != dtype and "master" not in state:
            state["master"] = impl.pull(key, None, 0).to(kept)

    def _load(
        self, op: str, impl: _C.KVStore, settings: Settings, parts: Mapping[str, Any]
    ) -> None:
        gradient = parts.get("gradient", {})
        if not isinstance(gradient, Mapping):
            raise ValueError(
                f"{op}: expected a dict of options as 'gradient', but got "
                f"{type(gradient).__name__}"
            )
        gradient = _checked_gradient(op, gradient)
        states = {
            key: _plain_state(op, key, state) for key, state in parts["state"].items()
        }
        self._check(op, settings)
        group_of = settings.group_of()
        for key, state in states.items():
            for name in self._state_names(settings.groups[group_of.get(key, 0)]):
                # SGD's buffer is there after the first step with a momentum only.
                if state["step"] > 0 and name not in state and self._rule != "sgd":
                    raise ValueError(
                        f"{op}: expected the state {name!r} of {self._name()}, but got "
                        f"none (key {shown(key)})"
                    )
        before = self._settings()
        self._hand_over(impl, settings, gradient)
        try:
            if states:
                impl.set_optimizer_states(list(states), list(states.values()))
        except BaseException:
            self._hand_over(impl, before)
            raise
        self._gradient = gradient
        self._keep(settings)

    # -- copies

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, and copied, without a store and state: options alone.

        A copy of the store copies its optimizer, too, with its state.
        """
        with self._lock:
            options = dict(self.defaults), dict(self._gradient)
            return _unpickled, (type(self), *options, self._settings())

    def __deepcopy__(self, memo: dict[int, Any]) -> BuiltIn:
        """A copy without a store and state."""
        make, arguments = self.__reduce__()
        copied: BuiltIn = make(*arguments)
        return copied


def _gradient_property(name: str) -> property:
    def get(self: BuiltIn) -> Any:
        return self._gradient[name]

    def set_(self: BuiltIn, value: Any) -> None:
        with self._lock:
            settings = self._settings()
            gradient = _checked_gradient(self._name(), {**self._gradient, name: value})
            self._hand_over(self._store(), settings, gradient)
            self._gradient = gradient

    return property(get, set_, doc=f"The gradient option ``{name}``, live.")


for _option in _GRADIENT_DEFAULTS:
    setattr(BuiltIn, _option, _gradient_property(_option))


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the state of a value."""
    if dtype.is_complex:
        return torch.complex64 if dtype.itemsize <= 8 else dtype
    return torch.float32 if dtype.itemsize <= 4 else dtype


def _plain_state(op: str, key: StoreKey, state: Mapping[str, Any]) -> dict[str, Any]:
    """A key's state as C++ takes it; without what a first step makes anew."""
    result: dict[str, Any] = {}
    for name in ("step", "num_accumulated"):
        value = state.get(name)
        if not isinstance(value, int):
            raise ValueError(
                f"{op}: expected an int as {name!r}, but got "
                f"{type(value).__name__} (key {shown(key)})"
            )
        result[name] = value
    for name, value in state.items():
        if name in result:
            continue
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{op}: expected a tensor as {name!r}, but got "
                f"{type(value).__name__} (key {shown(key)})"
            )
        if not (value.is_floating_point() or value.is_complex()):
            raise ValueError(
                f"{op}: expected a floating-point or complex tensor as {name!r}, but "
                f"got {value.dtype} (key {shown(key)})"
            )
        # What is there before a first step, or push, is nothing yet.
        count = result["num_accumulated" if name == "accumulated" else "step"]
        if count > 0:
            result[name] = value
    return result


def _unpickled(
    cls: type[BuiltIn],
    options: Mapping[str, Any],
    gradient: Mapping[str, Any],
    settings: Settings,
) -> BuiltIn:
    optimizer = cls._of_defaults(options, gradient)
    optimizer._adopt("load", settings)
    return optimizer


def _by_key(settings: Settings) -> dict[StoreKey, tuple[int, float, float]]:
    """Group and multipliers of the keys that have options of their own."""
    _, lr_mult, wd_mult = settings
    group_of = settings.group_of()
    return {
        key: (group_of.get(key, 0), lr_mult.get(key, 1.0), wd_mult.get(key, 1.0))
        for key in {**group_of, **lr_mult, **wd_mult}
    }


def _gradient_numbers(gradient: Mapping[str, Any]) -> dict[str, float]:
    return {option: float(value or 0) for option, value in gradient.items()}


def options_of(names: Sequence[str], numbers: Mapping[str, float]) -> dict[str, Any]:
    """A group's options out of the C++ rule's numbers."""
    result: dict[str, Any] = {}
    for name in names:
        if name == "betas":
            result[name] = (numbers["beta1"], numbers["beta2"])
        elif name == "decoupled_weight_decay":
            result[name] = bool(numbers["decoupled"])
        elif name in _SWITCHES:
            result[name] = bool(numbers[name])
        else:
            result[name] = numbers[name]
    return result
