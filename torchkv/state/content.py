"""The content of a store, which every saved form is made from and parsed into.

`folder` and `state_dict` read and write a :class:`Content`. The C++ store hands it out
as a tuple, which is also what TorchScript's archives, pickles and copies hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from torchkv import _C
from torchkv.optim.built_in import BuiltIn
from torchkv.optim.groups import shown
from torchkv.optim.rules import after_load
from torchkv.state.optimizer import Optimizer, extras_of

_FORMAT = 2  # of the C++ store's tuple


@dataclass(slots=True)
class KeyContent:
    """One key: its value, and the optimizer's state of it."""

    value: Tensor
    version: int = 0
    step: int = 0
    num_accumulated: int = 0
    states: dict[str, Tensor] = field(default_factory=dict)


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
                extras_of(impl),
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
        """A new store of a type; ValueError if the parts are inconsistent."""
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
            # Such as a repeated key, or an updater that TorchScript cannot read.
            text = str(error).partition("\n")[0]
            raise ValueError(f"load: inconsistent parts: {text}") from error

    def replace(self, impl: _C.KVStore) -> BuiltIn | None:
        """Replaces the content of a store, or raises and changes nothing.

        Returns:
            The store's optimizer, for the store to hold.
        """
        # Before the work: a closed, forked or updating store cannot be used.
        impl.barrier()
        before = impl.optimizer()
        impl.take(self.make(impl.type))
        return after_load(impl, before, self.extras)

    @property
    def extras(self) -> list[dict[str, float]]:
        """What schedulers have added to the optimizer's groups."""
        return [] if self.optimizer is None else self.optimizer.extras

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


def _by_kind(keys: Iterable[int | str]) -> tuple[list[int], list[str]]:
    ints = [key for key in keys if isinstance(key, int)]
    return ints, [key for key in keys if isinstance(key, str)]
