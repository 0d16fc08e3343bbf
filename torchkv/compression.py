"""Gradient compression: what of a pushed value is sent, and what is kept for later.

::

    kv.set_gradient_compression(torchkv.compression.TwoBit(threshold=0.5))
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})  # as in MXNet

A scheme with error feedback adds the *residual*, what earlier pushes have not sent, to
each value before it chooses what to send, so that nothing is lost in the long run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeAlias

from torchkv import _C
from torchkv.arguments import StoreKey, as_keys, as_number, expect, shown

__all__ = ["BF16", "FP8", "FP16", "Codec", "Int4", "OneBit", "TopK", "TwoBit"]

_OP = "set_gradient_compression"


@dataclass(frozen=True)
class Codec:
    """A scheme of compression: the base of all."""

    type: ClassVar[str] = ""
    """The name in a dict."""

    def __post_init__(self) -> None:
        """ValueError or TypeError for an option that is not valid."""
        _C.KVStore.check_codec(self.type, self._numbers())

    def _numbers(self) -> dict[str, float]:
        return {
            field.name: as_number(_OP, field.name, value)
            for field in fields(self)
            if (value := getattr(self, field.name)) is not None
            or field.default is not None
        }


@dataclass(frozen=True)
class OneBit(Codec):
    """Sends 1 where value + residual > threshold, else -1. With error feedback.

    MXNet's ``1bit``: 32 elements take 32 bits. A number that is not finite stays in the
    residual.
    """

    type = "1bit"
    threshold: float = 0.5


@dataclass(frozen=True)
class TwoBit(Codec):
    """Sends ±threshold where value + residual is at least as far from 0, else 0.

    MXNet's ``2bit``, with error feedback: 16 elements take 32 bits. A number that is
    not finite stays in the residual.
    """

    type = "2bit"
    threshold: float = 0.5


@dataclass(frozen=True)
class FP16(Codec):
    """Sends half precision; values beyond its range as ±65504. With error feedback."""

    type = "fp16"


@dataclass(frozen=True)
class BF16(Codec):
    """Sends bfloat16. With error feedback."""

    type = "bf16"


@dataclass(frozen=True)
class FP8(Codec):
    """Sends ``float8_e4m3fn`` with a scale for each 1,024 elements.

    The scale is the block's greatest magnitude / 448. With error feedback.
    """

    type = "fp8"


@dataclass(frozen=True)
class Int4(Codec):
    """Sends integers from -7 to 7 with a scale for each 128 elements.

    The scale is the block's greatest magnitude / 7. Values are rounded up or down at
    random so that the mean of what is sent is the value, without error feedback. The
    random numbers follow from the seed, the key, the position in the list and the
    number of pushes: the same program gets the same ones.
    """

    type = "int4"
    seed: int = 0


@dataclass(frozen=True)
class TopK(Codec):
    """Sends the elements of greatest magnitude of each value, the others as 0.

    With error feedback. Of equal magnitudes, those that come first in the memory of the
    stored value are sent.

    Args:
        k: the number of elements.
        ratio: the share of the elements, rounded up; 0.01 if neither is given.
    """

    type = "topk"
    k: int | None = None
    ratio: float | None = None


Compression: TypeAlias = (
    Codec | Mapping[str, Any] | Sequence[Codec | Mapping[str, Any]] | None
)
"""A scheme of all keys, which is None, a :class:`Codec`, or a dict of its ``"type"``
and options. Or a list of such dicts, of which those with ``"keys"`` are for these, and
one without for all others, which are not compressed if there is none. In a dict, the
``"type"`` may be a :class:`Codec` itself."""

_TYPES: dict[str, type[Codec]] = {
    cls.type: cls for cls in (OneBit, TwoBit, FP16, BF16, FP8, Int4, TopK)
}

Groups: TypeAlias = list[tuple[str, dict[str, float]]]


def parse(compression: Compression) -> tuple[Groups, dict[StoreKey, int]]:
    """The codec of each group, the first for keys of no other, and groups by key."""
    if isinstance(compression, Mapping) and "keys" in compression:
        raise ValueError(f"{_OP}: expected a list of groups, but got one with 'keys'")
    if compression is None or isinstance(compression, Codec | Mapping):
        return [_codec(compression)], {}
    expect(
        _OP,
        compression,
        list | tuple,
        "None, a torchkv.compression.Codec, a dict or a list of dicts",
    )
    groups: Groups = [("none", {})]
    keys: dict[StoreKey, int] = {}
    has_others = False
    for group in compression:
        if not isinstance(group, Mapping) or "keys" not in group:
            if has_others:
                raise ValueError(f"{_OP}: expected one group without 'keys', but got 2")
            has_others = True
            groups[0] = _codec(group)
            continue
        for key in as_keys(_OP, group["keys"]):
            if key in keys:
                raise ValueError(
                    f"{_OP}: key in more than one group (key {shown(key)})"
                )
            keys[key] = len(groups)
        rest = {name: value for name, value in group.items() if name != "keys"}
        groups.append(_codec(rest))
    return groups, keys


def shown_as(groups: Groups, keys: Mapping[StoreKey, int]) -> Compression:
    """What :func:`parse` takes, of what it returned or the store has."""
    made = [_made(name, numbers) for name, numbers in groups] or [None]
    if not keys:
        return made[0]
    result: list[Codec | Mapping[str, Any]] = []
    for i, codec in enumerate(made):
        own = [key for key, group in keys.items() if group == i]
        kind = "none" if codec is None else codec
        if i == 0:
            result.append({"type": kind})
        elif own:
            result.append({"keys": own, "type": kind})
    return result


def _codec(given: object) -> tuple[str, dict[str, float]]:
    if given is None:
        return "none", {}
    if isinstance(given, Codec):
        return given.type, given._numbers()
    expect(_OP, given, Mapping, "a torchkv.compression.Codec or a dict")
    assert isinstance(given, Mapping)
    options = dict(given)
    if "type" not in options:
        raise ValueError(
            f"{_OP}: missing 'type'; expected one of 'none', "
            f"{', '.join(map(repr, _TYPES))}"
        )
    name = options.pop("type")
    if isinstance(name, Codec):
        if options:
            raise ValueError(
                f"{_OP}: unexpected option {next(iter(options))!r} beside "
                f"{name!r}, which has its own"
            )
        return name.type, name._numbers()
    if name is None and not options:
        return "none", {}
    expect(_OP, name, str, "a str or a torchkv.compression.Codec as 'type'")
    for option in options:
        expect(_OP, option, str, "the names of options as str")
    numbers = {key: as_number(_OP, str(key), value) for key, value in options.items()}
    return name, _C.KVStore.check_codec(name, numbers)


def _made(name: str, numbers: Mapping[str, float]) -> Codec | None:
    whole = {"k", "seed"}
    options = {k: int(v) if k in whole else v for k, v in numbers.items()}
    return None if name == "none" else _TYPES[name](**options)
