"""Names of parameters with and without the ``_orig_mod.`` that torch.compile adds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torchkv.arguments import StoreKey, shown

T = TypeVar("T")


def plain_name(name: str) -> str:
    """A parameter's name without what ``torch.compile`` adds to it."""
    return name.replace("_orig_mod.", "")


def name_among(names: Iterable[Any]) -> Callable[[Any], Any]:
    """Maps a parameter's name to that one of `names` which is the same but for this.

    All other objects are returned as they are, and so are names of which there are
    several.
    """
    exact = {name for name in names if isinstance(name, str)}
    counts = Counter(map(plain_name, exact))
    by_plain_name = {
        plain: name for name in exact if counts[plain := plain_name(name)] == 1
    }

    def find(name: Any) -> Any:
        if not isinstance(name, str) or name in exact:
            return name
        return by_plain_name.get(plain_name(name), name)

    return find


def with_keys(
    op: str, items: Mapping[StoreKey, T], find: Callable[[StoreKey], StoreKey]
) -> dict[StoreKey, T]:
    """Items by the keys that `find` returns; ValueError if one would have two."""
    result: dict[StoreKey, T] = {}
    for name, item in items.items():
        key = find(name)
        if key in result:
            raise ValueError(
                f"{op}: expected a parameter once, but got it with and without "
                f"'_orig_mod.' (key {shown(key)})"
            )
        result[key] = item
    return result


def renamed_rows(rows: Any, rename: Callable[[str], str]) -> Any:
    """Rows of a saved state that begin with a key, as lists with other str keys.

    What has another form is returned as it is, for others to refuse.
    """

    def renamed(row: Any) -> Any:
        is_row = isinstance(row, list | tuple) and row and isinstance(row[0], str)
        return [rename(row[0]), *row[1:]] if is_row else row

    return [renamed(row) for row in rows] if isinstance(rows, list | tuple) else rows
