"""Nested inputs and outputs of modules: dicts, lists, tuples, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torchkv.arguments import shown


def map_nests(function: Callable[..., Any], nests: Sequence[Any], path: str) -> Any:
    """Calls a function for each leaf, and returns the results in the same structure.

    Mappings, lists, tuples, named tuples and dataclass instances are nests. Anything
    else is a leaf, including ``PackedSequence``, whose rows are not its tensors'.

    Args:
        function: called as ``function(path, *leaves)`` with the leaves at one position,
            one from each nest.
        nests: at least one, all of the same structure.
        path: the name of the nests in messages.

    Raises:
        ValueError: nests of different structures.
        TypeError: a dataclass with a tensor in an attribute that is not a field.
    """
    first, *others = nests
    children = _children(first)
    if children is None:
        return function(path, *nests)
    _check_fields(first, path)
    columns = {name: [child] for name, child in children.items()}
    for other in others:
        same = _children(other) if type(other) is type(first) else None
        if same is None or same.keys() != children.keys():
            raise ValueError(
                f"{path}: expected the same structure, but got {_described(first)} and "
                f"{_described(other)}"
            )
        for name, child in same.items():
            columns[name].append(child)
    mapped = [
        map_nests(function, column, path + _label(first, name))
        for name, column in columns.items()
    ]
    return _rebuilt(first, mapped)


def _children(nest: Any) -> dict[Any, Any] | None:
    """The children of a nest by key, field or position; None for a leaf."""
    if isinstance(nest, PackedSequence):
        return None
    if isinstance(nest, Mapping):
        return dict(nest.items())
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return dict(zip(nest._fields, nest, strict=True))
    if isinstance(nest, list | tuple):
        return dict(enumerate(nest))
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        return {name: getattr(nest, name) for name in _fields(nest)}
    return None


def _fields(nest: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(nest)]


def _label(nest: Any, name: Any) -> str:
    """A child's component of the path."""
    has_fields = not isinstance(nest, Mapping) and (
        hasattr(nest, "_fields") or dataclasses.is_dataclass(nest)
    )
    return f".{name}" if has_fields else f"[{shown(name)}]"


def _check_fields(nest: Any, path: str) -> None:
    """TypeError if a copy of a dataclass would share a tensor with it."""
    if not dataclasses.is_dataclass(nest) or isinstance(nest, Mapping):
        return
    for name, value in getattr(nest, "__dict__", {}).items():
        if name not in _fields(nest) and _has_tensor(value):
            raise TypeError(
                f"{path.removeprefix('.')}: expected a dataclass with tensors only in "
                f"fields, but got one in {name!r}, which is not a field"
            )


def _has_tensor(nest: Any) -> bool:
    children = _children(nest)
    if children is None:
        return isinstance(nest, Tensor | PackedSequence)
    return any(map(_has_tensor, children.values()))


def _rebuilt(nest: Any, children: Sequence[Any]) -> Any:
    """A copy of a nest with other children."""
    if isinstance(nest, Mapping):
        items = dict(zip(nest, children, strict=True))
        if dataclasses.is_dataclass(nest):  # such as the outputs of transformers
            return type(nest)(**items)
        try:
            return type(nest)(items)  # type: ignore[call-arg]
        except TypeError:  # such as a defaultdict, which takes a factory first
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
    for name, child in zip(_fields(nest), children, strict=True):
        object.__setattr__(result, name, child)  # even if frozen
    return result


def _described(nest: Any) -> str:
    children = _children(nest)
    name = type(nest).__name__
    return name if children is None else f"{name} of {len(children)}"
