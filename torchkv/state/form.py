"""Checks of what a saved store consists of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any

from torchkv import _C
from torchkv.arguments import shown

KEY_TYPES: dict[str, type] = {"": type(None), "int": int, "str": str}
"""The type of a store's keys by its kind of keys, which is "" before any ``init``."""


@dataclass(frozen=True)
class Options:
    """The form of a dict of any names that may be given as a list of pairs."""

    values: Any


def parse(value: Any, form: Any, what: str) -> Any:
    """The value, if it is of a form; ints where floats are expected become floats.

    Args:
        value: from JSON, or from a dict of the caller's.
        form: a type or a union of types; ``[form]`` for a list; a tuple of forms for a
            list of as many items; ``{str: form}`` for a dict of any names, and
            :class:`Options`; another dict of forms for a dict of exactly these names.
        what: names the value in messages.

    Raises:
        ValueError: it is of another form.
    """
    if isinstance(form, type | UnionType):
        return _parse_leaf(value, form, what)
    if isinstance(form, Options):
        if isinstance(value, list):
            pairs = parse(value, [(str, object)], what)
            check_distinct([name for name, _ in pairs], f"name in {what}")
            value = dict(pairs)
        return parse(value, {str: form.values}, what)
    _parse_leaf(value, dict if isinstance(form, dict) else list, what)
    item_name = f"an item of {what}"
    if isinstance(form, list):
        if form in ([int], [str]) and {*map(type, value)} == {*form}:
            # All at once: a store may have millions of keys.
            for item in (min(value), max(value)):
                _parse_leaf(item, form[0], item_name)
            return value
        return [parse(item, form[0], item_name) for item in value]
    if isinstance(form, tuple):
        if len(value) != len(form):
            raise ValueError(
                f"load: expected a list of {len(form)} as {what}, but got "
                f"{_short(value)}"
            )
        return [parse(*pair, what) for pair in zip(value, form, strict=True)]
    if str in form:
        for name in value:
            _parse_leaf(name, str, f"a name in {what}")
        return {k: parse(v, form[str], f"{k!r} in {what}") for k, v in value.items()}
    for name in form:
        if name not in value:
            raise ValueError(f"load: missing {name!r} in {what}")
    for name in value:
        if name not in form:
            raise ValueError(f"load: unexpected {name!r} in {what}")
    return {k: parse(v, form[k], f"{k!r} in {what}") for k, v in value.items()}


def parse_type(value: str) -> str:
    """The value, a store type."""
    try:
        return _C.KVStore.canonical_type(value)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"load: expected a store type, but {error}") from error


def parse_kind(value: str) -> str:
    """The value, a kind of keys."""
    if value not in KEY_TYPES:
        raise ValueError(f"load: expected 'int' or 'str' keys, but got {value!r}")
    return value


def check_distinct(items: Sequence[int | str], what: str) -> None:
    """ValueError for an item that comes more than once."""
    if len(set(items)) != len(items):
        ((item, _),) = Counter(items).most_common(1)
        raise ValueError(f"load: repeated {what} {shown(item)}")


def _parse_leaf(value: Any, form: Any, what: str) -> Any:
    if form is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    if isinstance(value, form) and (
        # C++ would refuse an int of more than 64 bits without naming it.
        not isinstance(value, int)
        or (type(value) is not bool and -(2**63) <= value < 2**63)
        or form is object
    ):
        return value
    expected = getattr(form, "__name__", str(form))
    raise ValueError(f"load: expected {what} as {expected}, but got {_short(value)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 50 else f"{text[:50]}..."
