"""Checks of callers' arguments, and their values as shown in error messages."""

from __future__ import annotations

import itertools
import math
import numbers
import operator
import reprlib
from collections.abc import Iterable, Set
from typing import Any, SupportsIndex, TypeAlias, TypeGuard

import torch

from torchkv import _C

StoreKey: TypeAlias = int | str
"""A key as the store returns it."""


def near(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'lr'?"`` if a known name is similar, else ``""``."""
    return _C.did_you_mean(name.encode(errors="replace").decode(), list(known))


_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxlong = _shortened.maxother = 200


def shown(key: Any) -> str:
    """A key as shown in messages: its repr, shortened above 200 characters."""
    return _shortened.repr(key)


def listed(keys: Iterable[Any], count: int = 5) -> str:
    """The first keys as shown in messages."""
    keys = list(itertools.islice(keys, count + 1))
    return ", ".join(map(shown, keys[:count])) + (", ..." * (len(keys) > count))


def expect(op: str, value: Any, types: Any, what: str, more: str = "") -> None:
    """TypeError unless a value is of the types that `what` describes."""
    if not isinstance(value, types):
        kind = type(value).__name__
        raise TypeError(f"{op}: expected {what}, but got {kind}{more}")


def as_number(op: str, name: str, value: Any) -> float:
    """A real number as fp64; TypeError for anything else, ValueError if too large."""
    if isinstance(value, torch.Tensor):
        raise TypeError(
            f"{op}: expected a number as {name}, but got a tensor, which a store's "
            f"optimizer does not support; pass float({name})"
        )
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{op}: expected a number as {name}, but got {type(value).__name__}"
        )
    try:
        return float(value)
    except OverflowError:
        raise ValueError(
            f"{op}: expected {name} to fit in fp64, but got a larger number"
        ) from None


def is_int(value: object) -> TypeGuard[SupportsIndex]:
    """Whether it is an int, or has ``__index__`` as NumPy's, and is no bool."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def as_size(op: str, name: str, value: Any) -> int:
    """What :func:`is_int` accepts, of 64 bits.

    Raises:
        TypeError: another object.
        ValueError: a larger number.
    """
    if not is_int(value):
        raise TypeError(
            f"{op}: expected an int in {name}, but got {type(value).__name__}"
        )
    size = operator.index(value)
    if not -(2**63) <= size < 2**63:
        raise ValueError(f"{op}: expected {name} to fit in 64 bits, but got {size}")
    return size


def as_batch_size(op: str, batch_size: Any) -> float:
    """A batch size; ValueError unless it is greater than 0 and finite."""
    number = as_number(op, "batch_size", batch_size)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(
            f"{op}: expected a finite batch_size greater than 0, but got {batch_size!r}"
        )
    return number


def as_keys(op: str, keys: Any) -> list[StoreKey]:
    """One key, or a list or tuple, as the store returns them; raises what it raises."""
    if not isinstance(keys, list | tuple):
        keys = [keys]
    return [_C.KVStore.key_of(op, key) for key in keys]


def check_known(op: str, keys: Iterable[StoreKey], known: Set[StoreKey]) -> None:
    """KeyError if one of the keys that have options is not a known one."""
    for key in keys:
        if key not in known:
            hint = near(key, map(str, known)) if isinstance(key, str) else ""
            raise KeyError(
                f"{op}: expected keys of the store, but got {shown(key)}, which was "
                f"never initialised{hint} (key {shown(key)})"
            )
