"""What a store is made of, as checkpoints and state dicts see it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchkv import _C
from torchkv.optim.built_in import BuiltIn, on_stores
from torchkv.optim.groups import shown
from torchkv.optim.rules import after_load

_FORMAT = 2  # of the C++ store's tuple
KINDS = {"": (), "int": (int,), "str": (str,)}

T = TypeVar("T")


@dataclass(slots=True)
class KeyContent:
    """One key: its value, and what the optimizer has made of it."""

    value: Tensor
    version: int = 0
    step: int = 0
    num_accumulated: int = 0
    states: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Optimizer:
    """A built-in optimizer's numbers; `options`: group, lr_mult, wd_mult by key."""

    name: str
    groups: list[dict[str, float]]
    gradient: dict[str, float]
    options: dict[int | str, tuple[int, float, float]]
    extras: list[dict[str, float]]  # by group: what schedulers have added there


@dataclass
class Content:
    """A store; in `keys` the order is that of ``init``."""

    type: str
    key_kind: str
    keys: dict[int | str, KeyContent]
    updater: Tensor | None  # a TorchScript module, as bytes
    optimizer: Optimizer | None

    @staticmethod
    def of(impl: _C.KVStore, with_keys: bool = True) -> Content:
        """A snapshot; TypeError where the updater is a Python callable."""
        state = impl.state(with_keys)
        format, type, kind, int_keys, str_keys, values, versions, updater, rest = state
        assert format == _FORMAT
        name, groups, gradient, *keyed, steps, accumulated, states = rest
        optimizer = None
        if name:
            option_ints, option_strs, group_of, multipliers = keyed
            options = zip(group_of, multipliers[::2], multipliers[1::2], strict=True)
            optimizer = Optimizer(
                name,
                [dict(group) for group in groups],
                dict(gradient),
                dict(zip([*option_ints, *option_strs], options, strict=True)),
                _extras(impl),
            )
        else:
            steps, accumulated = [0] * len(values), [0] * len(values)
            states = [{} for _ in values]
        parts = zip(values, versions, steps, accumulated, states, strict=True)
        keys = {
            key: KeyContent(*part)
            for key, part in zip([*int_keys, *str_keys], parts, strict=True)
        }
        return Content(type, kind, keys, updater[0] if updater else None, optimizer)

    def make(self, type: str) -> _C.KVStore:
        """A new store of a type.

        Raises:
            ValueError: the parts do not fit together.
        """
        for key, item in self.keys.items():
            for name, state in item.states.items():
                if not (state.is_floating_point() or state.is_complex()):
                    raise ValueError(
                        f"load: expected a floating-point or complex tensor as "
                        f"{name!r}, but got {state.dtype} (key {shown(key)})"
                    )
        try:
            return _C.KVStore.from_state(self._as_tuple(type))
        except (ValueError, TypeError, RuntimeError) as error:
            # Such as a key that stands twice, an updater that TorchScript cannot read.
            text = str(error).partition("\n")[0]
            raise ValueError(f"load: the parts do not fit together: {text}") from error

    def _as_tuple(self, type: str) -> tuple[Any, ...]:
        optimizer: tuple[Any, ...] = ("", [], {}, [], [], [], [], [], [], [])
        keys = list(self.keys.values())
        if self.optimizer is not None:
            options = self.optimizer.options
            optimizer = (
                self.optimizer.name,
                self.optimizer.groups,
                self.optimizer.gradient,
                *_by_kind(options),
                [group for group, _, _ in options.values()],
                [number for _, *pair in options.values() for number in pair],
                [key.step for key in keys],
                [key.num_accumulated for key in keys],
                [key.states for key in keys],
            )
        return (
            _FORMAT,
            type,
            self.key_kind,
            *_by_kind(self.keys),
            [key.value for key in keys],
            [key.version for key in keys],
            [] if self.updater is None else [self.updater],
            optimizer,
        )


def state_names(optimizer: Optimizer, key: int | str) -> list[str]:
    """The names of what the optimizer keeps for a key."""
    group = optimizer.options.get(key, (0,))[0]
    return _C.KVStore.state_names(optimizer.name, optimizer.groups[group])


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """What an optimizer's state of a value has as dtype, and its copy of the value."""
    if dtype.is_complex:
        return torch.complex128 if dtype.itemsize == 16 else torch.complex64
    return torch.float64 if dtype.itemsize == 8 else torch.float32


def take(impl: _C.KVStore, content: Content) -> BuiltIn | None:
    """Replaces what a store holds, or raises and changes nothing.

    Returns:
        The store's optimizer, for the store to hold.
    """
    # First of all a store that cannot be used says so: forked, closed, updating.
    impl.barrier()
    before = impl.optimizer()
    optimizer = content.optimizer
    impl.take(content.make(impl.type))
    return after_load(impl, before, [] if optimizer is None else optimizer.extras)


def _extras(impl: _C.KVStore) -> list[dict[str, float]]:
    """The numbers that schedulers have added to the optimizer's groups, by group."""
    described = impl.optimizer()
    found = on_stores.get(described[0]) if isinstance(described, tuple) else None
    return [
        {
            name: float(value)
            for name, value in group.items()
            # JSON has neither an infinity nor NaN.
            if isinstance(name, str)
            and type(value) in (int, float)
            and -(2**53) < value < 2**53
        }
        for group in (() if found is None else found._extras())
    ]


def expect(value: object, kind: type[T], what: str) -> T:
    """The value, of a type that JSON has; a bool is no int, an int is a float."""
    if kind is float and type(value) is int and abs(value) < 2**53:
        value = float(value)
    if type(value) is kind and (
        not isinstance(value, int) or -(2**63) <= value < 2**63
    ):
        return value
    raise ValueError(
        f"load: expected {what} as {kind.__name__}, but got {_short(value)}"
    )


def expect_fields(value: object, names: Iterable[str], what: str) -> dict[str, Any]:
    """The value, a dict of exactly these names."""
    fields: dict[str, Any] = expect(value, dict, what)
    names = list(names)
    for name in names:
        if name not in fields:
            raise ValueError(f"load: expected {name!r} in {what}, but it has none")
    for name in fields:
        if name not in names:
            raise ValueError(f"load: expected no {name!r} in {what}, but got one")
    return fields


def expect_numbers(value: object, what: str) -> dict[str, float]:
    """The value, a dict of numbers by name."""
    return {
        expect(name, str, f"a name of {what}"): expect(number, float, f"{name!r}")
        for name, number in expect(value, dict, what).items()
    }


def optimizer_as_dict(optimizer: Optimizer | None) -> dict[str, Any] | None:
    """As JSON and torch.distributed.checkpoint take it."""
    if optimizer is None:
        return None
    return {
        "name": optimizer.name,
        "groups": optimizer.groups,
        "gradient": optimizer.gradient,
        # A list: torch.distributed.checkpoint would only load those items of a dict
        # that the store has already.
        "options": [[key, *options] for key, options in optimizer.options.items()],
        "extras": [
            [i, name, number]
            for i, group in enumerate(optimizer.extras)
            for name, number in group.items()
        ],
    }


def optimizer_from_dict(saved: object, kind: str) -> Optimizer | None:
    """The other way; ValueError where it is none."""
    if saved is None:
        return None
    fields = expect_fields(
        saved, ["name", "groups", "gradient", "options", "extras"], "'optimizer'"
    )
    options = {}
    for item in expect(fields["options"], list, "'options'"):
        if len(expect(item, list, "a key's options")) != 4:
            raise ValueError(
                f"load: expected four options of a key, but got {_short(item)}"
            )
        if not kind:  # a store that has had no keys may have options of keys to come
            kind = "str" if isinstance(item[0], str) else "int"
        key = expect_key(item[0], kind)
        if key in options:
            raise ValueError(
                f"load: expected options of each key once, but got some twice (key "
                f"{shown(key)})"
            )
        options[key] = (
            expect(item[1], int, "a group"),
            expect(item[2], float, "'lr_mult'"),
            expect(item[3], float, "'wd_mult'"),
        )
    groups = [
        expect_numbers(group, "a parameter group")
        for group in expect(fields["groups"], list, "'groups'")
    ]
    extras: list[dict[str, float]] = [{} for _ in groups]
    for item in expect(fields["extras"], list, "'extras'"):
        if len(expect(item, list, "an extra number of a group")) != 3:
            raise ValueError(f"load: expected three parts of an extra, but got {item}")
        group, name, number = item
        if not 0 <= expect(group, int, "a group") < len(groups):
            raise ValueError(
                f"load: expected a group out of {len(groups)}, but got {group}"
            )
        text = expect(name, str, "a name of 'extras'")
        extras[group][text] = expect(number, float, repr(text))
    name = expect(fields["name"], str, "the optimizer's name")
    if name == "adam" and groups and groups[0].get("decoupled"):
        name = "adamw"  # which had no name of its own at first
    return Optimizer(
        name,
        groups,
        expect_numbers(fields["gradient"], "'gradient'"),
        options,
        extras,
    )


def expect_type(value: object) -> str:
    """The value, a store type."""
    type = expect(value, str, "'type'")
    try:
        return _C.KVStore.canonical_type(type)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"load: expected a store type, but {error}") from error


def expect_kind(value: object) -> str:
    """The value, a kind of keys."""
    kind = expect(value, str, "'key_kind'")
    if kind not in KINDS:
        raise ValueError(f"load: expected 'int' or 'str' keys, but got {kind!r}")
    return kind


def expect_key(key: object, kind: str) -> int | str:
    """The key, of the kind."""
    if type(key) not in KINDS[kind]:
        raise ValueError(f"load: expected keys of kind {kind!r}, but got {shown(key)}")
    return expect(key, int, "a key") if kind == "int" else expect(key, str, "a key")


def _by_kind(keys: Iterable[int | str]) -> tuple[list[int], list[str]]:
    ints = [key for key in keys if isinstance(key, int)]
    return ints, [key for key in keys if isinstance(key, str)]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 50 else f"{text[:50]}..."
