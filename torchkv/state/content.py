"""The content of a store, which every saved form is made from and parsed into.

`folder` and `state_dict` read and write a :class:`Content`. The C++ store hands it out
as a tuple, which is also what TorchScript's archives, pickles and copies hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from torchkv import _C
from torchkv.arguments import shown
from torchkv.optim.adaptor import TorchOptimizer
from torchkv.optim.built_in import BuiltIn, on_stores
from torchkv.optim.rules import after_load
from torchkv.state.form import (
    KEY_TYPES,
    Options,
    check_distinct,
    parse,
    parse_kind,
    parse_type,
)

_FORMAT = 4  # of the C++ store's tuple

_OPTIMIZER_FORM = {
    "name": str,
    "groups": [Options(float)],
    "gradient": Options(float),
    "options": [(int | str, int, float, float)],
    "extras": [(int, str, float)],
}


_COMPRESSION_FORM = {"groups": [Options(str | float)], "keys": [(int | str, int)]}


def _check_keys_of(rows: list[list[Any]], kind: str, what: str) -> None:
    """ValueError unless rows begin with distinct keys of the store's kind."""
    keys = [key for key, *_ in rows]
    check_distinct(keys, f"{what} of the key")
    # A store that has had no keys may have options of keys to come.
    types = {*map(type, keys)}
    if len(types) > 1 or (kind and not types <= {KEY_TYPES[kind]}):
        raise ValueError(f"load: expected {kind or 'one kind of'} keys in {what!r}")


@dataclass(slots=True)
class Rows:
    """What a row-sparse key has besides its value, the rows."""

    ids: Tensor  # of these rows, in their order
    num_rows: int  # that there may be; -1 if any number
    init: str
    numbers: dict[str, float]  # of the initial value
    seed: int


@dataclass(slots=True)
class KeyContent:
    """One key: its value, the optimizer's state of it, and residuals by position."""

    value: Tensor
    version: int = 0
    step: int = 0
    num_accumulated: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)
    residuals: list[Tensor] = field(default_factory=list)
    num_compressed: int = 0
    rows: Rows | None = None


@dataclass
class Optimizer:
    """The numbers of a built-in optimizer, in the form in which they are saved.

    Lists instead of dicts by key: of a dict, torch.distributed.checkpoint loads only
    the names that the store already has.
    """

    name: str
    groups: list[dict[str, float]]
    gradient: dict[str, float]
    options: list[list[Any]]  # key, group, lr_mult, wd_mult
    extras: list[list[Any]]  # group, name, number: what schedulers have added

    @staticmethod
    def parse(saved: object, kind: str) -> Optimizer | None:
        """The fields of an optimizer as saved, or None; ValueError if invalid."""
        if saved is None:
            return None
        optimizer = Optimizer(**parse(saved, _OPTIMIZER_FORM, "'optimizer'"))
        groups = optimizer.groups
        if optimizer.name == "adam" and groups and groups[0].get("decoupled"):
            optimizer.name = "adamw"  # which at first had no separate name
        _check_keys_of(optimizer.options, kind, "options")
        for group, *_ in optimizer.extras:
            if not 0 <= group < len(groups):
                raise ValueError(
                    f"load: expected a group less than {len(groups)}, but got {group}"
                )
        return optimizer


@dataclass
class Compression:
    """The gradient compression, in the form in which it is saved."""

    groups: list[dict[str, Any]]  # "type", and the options of this codec
    keys: list[list[Any]]  # key, group

    @staticmethod
    def parse(saved: object, kind: str) -> Compression | None:
        """The fields as saved, or None; ValueError if invalid."""
        if saved is None:
            return None
        compression = Compression(**parse(saved, _COMPRESSION_FORM, "'compression'"))
        if not compression.groups:
            raise ValueError("load: expected at least one group in 'compression'")
        for group in compression.groups:
            for name, value in group.items():
                parse(value, str if name == "type" else float, repr(name))
            if "type" not in group:
                raise ValueError("load: missing 'type' in 'compression'")
        _check_keys_of(compression.keys, kind, "compression")
        return compression

    def with_feedback(self) -> Callable[[int | str], bool]:
        """Tells of a key whether it has residuals."""
        group_of = {key: group for key, group in self.keys}
        have = [group["type"] not in ("none", "int4") for group in self.groups]
        return lambda key: have[group_of.get(key, 0)]


@dataclass
class Content:
    """A store; in `keys` the order is that of ``init``."""

    type: str
    key_kind: str
    keys: dict[int | str, KeyContent]
    updater: Tensor | None  # a TorchScript module, as bytes
    optimizer: Optimizer | None
    compression: Compression | None = None
    # The state_dict() of a class of torch.optim; without keys, only its name.
    torch_optimizer: dict[str, Any] | None = None

    @staticmethod
    def of(impl: _C.KVStore, with_keys: bool = True) -> Content:
        """A snapshot; TypeError where the updater is another Python callable."""
        wrapped = wrapped_of(impl)
        with_updater = wrapped is None
        state = (
            impl.gather_state(with_updater)
            if with_keys
            else impl.state(with_keys, with_updater)
        )
        content = Content._of(impl, state)
        if wrapped is not None:
            name = {"optimizer": wrapped._name()}
            content.torch_optimizer = wrapped._saved() if with_keys else name
        return content

    @staticmethod
    def of_process(
        impl: _C.KVStore,
    ) -> tuple[Content, list[int], list[tuple[int | str, int, Tensor | None]]]:
        """What this process holds, and where in its value each key's tensors begin.

        All ranks of a ``dist`` store make the call. The position is -1 for whole ones.
        The last item is what this rank of a ``dist`` store has compressed, of all keys:
        how many pushes, and the residual; the content then has neither.
        """
        state, begins, compressed = impl.own_state()
        return Content._of(impl, state), begins, compressed

    @staticmethod
    def _of(impl: _C.KVStore, state: tuple[Any, ...]) -> Content:
        format, type, kind, int_keys, str_keys, values, versions, *rest = state
        assert format == _FORMAT
        updater, of_optimizer, of_compression, of_rows = rest
        name, groups, gradient, *keyed, steps, accumulated, states = of_optimizer
        optimizer = None
        columns = [values, versions]
        if name:
            option_ints, option_strs, group_of, multipliers = keyed
            pairs = multipliers[::2], multipliers[1::2]
            options = zip([*option_ints, *option_strs], group_of, *pairs, strict=True)
            optimizer = Optimizer(
                name,
                [dict(group) for group in groups],
                dict(gradient),
                [list(option) for option in options],
                _extras_of(impl),
            )
            columns += [steps, accumulated, states]
        keys = {
            key: KeyContent(*parts)
            for key, *parts in zip([*int_keys, *str_keys], *columns, strict=True)
        }
        compression = None
        names, numbers, ints, strs, group_of, residuals, counts = of_compression
        if names:
            compression = Compression(
                [{"type": x, **y} for x, y in zip(names, numbers, strict=True)],
                [[*pair] for pair in zip([*ints, *strs], group_of, strict=True)],
            )
            of_keys = zip(keys.values(), residuals, counts, strict=True)
            for item, tensors, count in of_keys:
                item.residuals, item.num_compressed = tensors, count
        items = list(keys.values())
        for index, *row_parts in zip(*of_rows, strict=True):
            items[index].rows = Rows(*row_parts)
        updater = updater[0] if updater else None
        return Content(type, kind, keys, updater, optimizer, compression)

    @staticmethod
    def parse(fields: dict[str, Any]) -> Content:
        """What :meth:`fields` returned, still without keys and updater."""
        kind = parse_kind(fields["key_kind"])
        optimizer = Optimizer.parse(fields["optimizer"], kind)
        compression = Compression.parse(fields.get("compression"), kind)
        type = parse_type(fields["type"])
        return Content(type, kind, {}, None, optimizer, compression)

    def fields(self) -> dict[str, Any]:
        """What all saved forms have in common: everything but keys and updater."""
        optimizer, compression = self.optimizer, self.compression
        fields: dict[str, Any] = {
            "type": self.type,
            "key_kind": self.key_kind,
            "optimizer": None if optimizer is None else vars(optimizer),
        }
        # Without compression the form is that of before there was any.
        if compression is not None:
            fields["compression"] = vars(compression)
        return fields

    def make(self, type: str) -> _C.KVStore:
        """A new store of a type; ValueError if the parts are inconsistent."""
        for key, item in self.keys.items():
            if item.residuals and self.compression is None:
                raise ValueError(
                    "load: unexpected residuals of a store without compression (key "
                    f"{shown(key)})"
                )
            for name, state in item.state.items():
                if not (state.is_floating_point() or state.is_complex()):
                    raise ValueError(
                        f"load: expected a floating-point or complex tensor as "
                        f"{name!r}, but got {state.dtype} (key {shown(key)})"
                    )
        try:
            return _C.KVStore.from_state(self._as_tuple(type))
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            # Such as a repeated key, a row that the value cannot have, or an updater
            # that TorchScript cannot read.
            text = str(error).partition("\n")[0].removeprefix("load: ")
            raise ValueError(f"load: inconsistent parts: {text}") from error

    def replace(self, impl: _C.KVStore, made: _C.KVStore) -> BuiltIn | None:
        """Replaces the content of a store by this, of which :meth:`made_for` made one.

        Returns:
            The store's optimizer, for the store to hold.
        """
        before = impl.optimizer()
        if impl.type.startswith("dist"):
            impl.load(self._as_tuple(impl.type))
        else:
            impl.take(made)
        return after_load(impl, before, self.extras)

    def replace_compression(self, impl: _C.KVStore) -> None:
        """Replaces the compression and the residuals of a ``dist`` store by these."""
        impl.restore_compression(self._as_tuple(impl.type))

    def made_for(self, impl: _C.KVStore) -> _C.KVStore:
        """A store with the content; of `impl`'s type, if that is one of one machine.

        Raises:
            ValueError: the parts are inconsistent.
        """
        if impl.type.startswith("dist"):
            for key, item in self.keys.items():
                if len(item.residuals) > impl.num_workers():
                    raise ValueError(
                        "load: expected at least as many ranks as there are residuals "
                        f"of compression, {len(item.residuals)}, but got "
                        f"{impl.num_workers()} (key {shown(key)}); a store that is "
                        "saved after set_gradient_compression(None) has none"
                    )
            compresses = self.compression is not None
            return replace(self, updater=None).make("device" if compresses else "local")
        return self.make(impl.type)

    @property
    def extras(self) -> list[list[Any]]:
        """What schedulers have added to the optimizer's groups."""
        return [] if self.optimizer is None else self.optimizer.extras

    def _as_tuple(self, type: str) -> tuple[Any, ...]:
        keys = list(self.keys.values())
        optimizer = self.optimizer or Optimizer("", [], {}, [], [])
        options = optimizer.options
        stepped = [] if self.optimizer is None else keys
        compression = self.compression or Compression([], [])
        compressed = [] if self.compression is None else keys
        of_rows = {i: key.rows for i, key in enumerate(keys) if key.rows is not None}
        rows = of_rows.values()
        return (
            _FORMAT,
            type,
            self.key_kind,
            *_by_kind(list(self.keys)),
            [key.value for key in keys],
            [key.version for key in keys],
            [] if self.updater is None else [self.updater],
            (
                optimizer.name,
                optimizer.groups,
                optimizer.gradient,
                *_by_kind([key for key, *_ in options]),
                [group for _, group, *_ in options],
                [number for _, _, *pair in options for number in pair],
                [key.step for key in stepped],
                [key.num_accumulated for key in stepped],
                [key.state for key in stepped],
            ),
            (
                [group["type"] for group in compression.groups],
                [
                    {name: value for name, value in group.items() if name != "type"}
                    for group in compression.groups
                ],
                *_by_kind([key for key, _ in compression.keys]),
                [group for _, group in compression.keys],
                [key.residuals for key in compressed],
                [key.num_compressed for key in compressed],
            ),
            (
                list(of_rows),
                [of_key.ids for of_key in rows],
                [of_key.num_rows for of_key in rows],
                [of_key.init for of_key in rows],
                [of_key.numbers for of_key in rows],
                [of_key.seed for of_key in rows],
            ),
        )


def wrapped_of(impl: _C.KVStore) -> TorchOptimizer | None:
    """The class of torch.optim that is the updater of a store."""
    updater = impl.optimizer()
    return updater if isinstance(updater, TorchOptimizer) else None


def _by_kind(keys: list[int | str]) -> tuple[list[int], list[str]]:
    ints = [key for key in keys if isinstance(key, int)]
    return ints, [key for key in keys if isinstance(key, str)]


def _extras_of(impl: _C.KVStore) -> list[list[Any]]:
    """The numbers that schedulers have added to the optimizer's groups."""
    described = impl.optimizer()
    found = on_stores.get(described[0]) if isinstance(described, tuple) else None
    return [
        [group, name, float(value)]
        for group, name, value in (found._extras() if found is not None else [])
        # JSON has neither an infinity nor NaN.
        if isinstance(name, str)
        and type(value) in (int, float)
        and -(2**53) < value < 2**53
    ]
