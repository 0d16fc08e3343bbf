"""Nested inputs and outputs of modules: dicts, lists, tuples, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from torch.nn.utils.rnn import PackedSequence


def map_nests(
    function: Callable[[str, Sequence[Any]], Any], nests: Sequence[Any], path: str
) -> Any:
    """Calls a function for each leaf, and returns a nest of the results.

    Mappings, lists, tuples, named tuples and instances of dataclasses are nests. All
    else is a leaf; so is a ``PackedSequence``, whose rows are not those of its tensors.

    Args:
        function: called as ``function(path, leaves)`` with the leaves that are at one
            position, one of each nest.
        nests: at least one, all of one structure.
        path: what the nests are called in messages.

    Raises:
        ValueError: nests of different structure.
    """
    first, *others = nests
    children = _children(first)
    if children is None:
        return function(path, nests)
    columns = {label: [child] for label, child in children.items()}
    for other in others:
        same = _children(other) if type(other) is type(first) else None
        if same is None or same.keys() != children.keys():
            raise ValueError(
                f"{path}: expected one structure everywhere, but got {_told(first)} "
                f"and {_told(other)}"
            )
        for label, child in same.items():
            columns[label].append(child)
    mapped = {
        label: map_nests(function, column, path + label)
        for label, column in columns.items()
    }
    return _rebuilt(first, list(mapped.values()))


def _children(nest: Any) -> dict[str, Any] | None:
    """What a nest holds, by the end of its path; None for a leaf."""
    if isinstance(nest, PackedSequence):
        return None
    if isinstance(nest, Mapping):
        return {f"[{key!r}]": child for key, child in nest.items()}
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return {f".{name}": x for name, x in zip(nest._fields, nest, strict=True)}
    if isinstance(nest, list | tuple):
        return {f"[{i}]": child for i, child in enumerate(nest)}
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        names = [field.name for field in dataclasses.fields(nest)]
        return {f".{name}": getattr(nest, name) for name in names}
    return None


def _rebuilt(nest: Any, children: Sequence[Any]) -> Any:
    """A nest like another one, with other children."""
    if isinstance(nest, Mapping):
        items = dict(zip(nest, children, strict=True))
        try:
            return type(nest)(items)  # type: ignore[call-arg]
        except TypeError:  # as of a defaultdict, whose first argument is another
            if not isinstance(nest, MutableMapping):
                raise
        mapping = copy.copy(nest)
        mapping.update(items)
        return mapping
    if isinstance(nest, tuple) and hasattr(nest, "_make"):
        return nest._make(children)
    if isinstance(nest, list | tuple):
        return type(nest)(children)
    result = copy.copy(nest)
    for field, child in zip(dataclasses.fields(nest), children, strict=True):
        object.__setattr__(result, field.name, child)  # of a frozen one, too
    return result


def _told(nest: Any) -> str:
    children = _children(nest)
    name = type(nest).__name__
    return name if children is None else f"{name} of {len(children)}"
