"""The forms in which a Trainer accepts the parameters of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from torchkv.arguments import StoreKey, shown
from torchkv.trainer.replicas import Replicas, existing

Params: TypeAlias = (
    nn.Module
    | Mapping[str, Tensor]
    | Iterable[Tensor]
    | Iterable[tuple[str, Tensor]]
    | Iterable[nn.Module]
)
"""A module, its ``parameters()`` or ``named_parameters()``, a dict by name, or replicas
from :func:`torchkv.replicate` or as a list or tuple of modules."""


def modules_of(params: Any) -> list[nn.Module]:
    """The replicas, if `params` is a module or some of them; else none."""
    if isinstance(params, nn.Module):
        return [params]
    if not isinstance(params, list | tuple | Replicas):
        return []
    return [item for item in params if isinstance(item, nn.Module)]


def collected(params: Any, may_be_none: bool) -> dict[StoreKey, list[Tensor]]:
    """The copies of each parameter, one per replica, by key.

    Keys are names or, if there are no names, positions. A repeated tensor has one key.
    There must be at least one parameter, unless there `may_be_none`.
    For its errors, see :class:`torchkv.Trainer`.
    """
    replicas = [_distinct(named) for named in _named_parameters(params)]
    first = replicas[0]
    if not first and not may_be_none:
        raise ValueError("Trainer: expected at least one parameter, but got none")
    for i, replica in enumerate(replicas[1:], 1):
        for key in {**first, **replica}:
            expected, actual = _described(first.get(key)), _described(replica.get(key))
            if expected != actual:
                raise ValueError(
                    "Trainer: expected replicas of the same parameters, but got "
                    f"{actual} and {expected} (key {shown(key)}, replica {i})"
                )
    result = {key: [replica[key] for replica in replicas] for key in first}
    for key, copies in result.items():
        if len({id(parameter) for parameter in copies}) < len(copies):
            raise ValueError(
                "Trainer: expected replicas with their own parameters, but got two "
                f"that share one (key {shown(key)}); torchkv.replicate makes copies"
            )
    _check_memory(result)
    _check_all_replicas(result)
    return result


def _named_parameters(params: Any) -> list[list[tuple[StoreKey, Tensor]]]:
    """Keys and parameters of each replica."""
    if isinstance(params, nn.Module):
        params = [params]
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise _wrong_form(type(params).__name__)
    items = list(params.items() if isinstance(params, Mapping) else params)
    if items and all(isinstance(item, nn.Module) for item in items):
        # Other iterables are more likely to be over layers, such as children().
        if not isinstance(params, list | tuple | Replicas):
            raise _wrong_form(f"modules in a {type(params).__name__}")
        return [list(module.named_parameters()) for module in items]
    if all(isinstance(item, Tensor) for item in items):
        return [list(enumerate(items))]
    for item in items:
        if not (
            isinstance(item, tuple)
            and len(item) == 2
            and isinstance(item[0], str)
            and isinstance(item[1], Tensor)
        ):
            raise _wrong_form(f"one with an item of type {type(item).__name__}")
    return [items]


def _wrong_form(actual: str) -> TypeError:
    return TypeError(
        "Trainer: expected a module, parameters(), named_parameters(), a dict of "
        "parameters by name, or replicas (of torchkv.replicate, or a list of modules), "
        f"but got {actual}"
    )


def _check_memory(parameters: dict[StoreKey, list[Tensor]]) -> None:
    """ValueError if two begin at the same address: one step would undo the other."""
    key_at: dict[int, StoreKey] = {}
    for key, copies in parameters.items():
        for parameter in copies:
            address = parameter.data_ptr() if parameter.numel() else 0
            other = key_at.setdefault(address, key)
            if address and other is not key:
                raise ValueError(
                    "Trainer: expected parameters with memory of their own, but got "
                    f"two that share it (keys {shown(other)} and {shown(key)}); tied "
                    "weights need to be one nn.Parameter"
                )


def _check_all_replicas(parameters: dict[StoreKey, list[Tensor]]) -> None:
    """ValueError if replicas are left out, as they would no longer be kept equal."""
    key_of = {id(p): key for key, copies in parameters.items() for p in copies}
    whole: set[int] = set()
    left_out: dict[int, int] = {}  # the number of replicas, by parameter
    for replicas in list(existing):
        for copies in zip(*(module.parameters() for module in replicas), strict=False):
            given = [id(p) for p in copies if id(p) in key_of]
            if len(given) == len(copies) and len({key_of[p] for p in given}) == 1:
                whole.update(given)
            else:
                left_out.update((p, len(copies)) for p in given)
    for parameter, count in left_out.items():
        if parameter not in whole:
            raise ValueError(
                f"Trainer: expected all {count} replicas of a parameter, but got only "
                "some of them; pass the Replicas that torchkv.replicate returned "
                f"(key {shown(key_of[parameter])})"
            )


def _distinct(items: Iterable[tuple[StoreKey, Tensor]]) -> dict[StoreKey, Tensor]:
    result: dict[StoreKey, Tensor] = {}
    seen: set[int] = set()
    for key, parameter in items:
        if nn.parameter.is_lazy(parameter):
            raise ValueError(
                "Trainer: expected initialised parameters, but got one of a lazy "
                f"module; run a batch through the model first (key {shown(key)})"
            )
        if not parameter.is_leaf:
            raise ValueError(
                "Trainer: expected parameters, but got the result of an operation "
                f"(key {shown(key)})"
            )
        if id(parameter) in seen:
            continue
        if key in result:
            raise ValueError(f"Trainer: repeated name (key {shown(key)})")
        seen.add(id(parameter))
        result[key] = parameter
    return result


def _described(tensor: Tensor | None) -> str:
    if tensor is None:
        return "none"
    return f"one of {tensor.dtype} and shape {list(tensor.shape)}"
