"""Reading of what an optimizer's ``state_dict()`` returned, which may be damaged."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchkv import _C
from torchkv.arguments import StoreKey, as_keys, expect, listed, shown
from torchkv.files import read_state
from torchkv.optim.groups import Settings, as_multipliers
from torchkv.optim.torch_states import from_torch, is_torch_state
from torchkv.parameter_names import name_among, renamed_rows

if TYPE_CHECKING:
    from torchkv.optim.base import StoreOptimizer

_NO_OPTIONS = ("optimizer", "state", "state_names")


def without_options(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a state dict that are not options."""
    return {name: state_dict[name] for name in _NO_OPTIONS if name in state_dict}


def read_saved(
    op: str, path: str | os.PathLike[str], optimizer: StoreOptimizer
) -> dict[str, Any]:
    """A state dict from a file; one without options gets those of `optimizer`.

    Raises:
        ValueError, OSError: as :func:`torchkv.files.read_state`.
    """
    state = read_state(op, path)
    if "optimizer" in state and state.keys() <= {*_NO_OPTIONS}:
        state = {**optimizer._saved_options(), **state}
    return state


def check_parts(
    op: str,
    state_dict: Any,
    name: str,
    options: Collection[str],
    known: Iterable[StoreKey],
) -> dict[str, Any]:
    """The parts of a state dict of the optimizer `name`, whose groups have `options`.

    Keys are those of `known` where only ``torch.compile`` makes the difference.

    Raises:
        ValueError, TypeError: another structure, or the state of another optimizer.
    """
    parts = {"lr_mult": [], "wd_mult": [], **state_dict}
    for part in ("optimizer", "param_groups", "state"):
        if part not in parts:
            raise ValueError(
                f"{op}: expected the state_dict() of a store's optimizer, but got a "
                f"dict without {part!r}"
            )
    if parts["optimizer"] != name:
        raise ValueError(
            f"{op}: expected the state of the optimizer {name}, but got that of "
            f"{parts['optimizer']}"
        )
    groups = parts["param_groups"]
    if not isinstance(groups, list | tuple) or not groups:
        raise ValueError(f"{op}: expected at least one parameter group")
    for i, group in enumerate(groups):
        expect(op, group, Mapping, f"a dict as param_groups[{i}]")
        for option in ("keys", *options):
            if option not in group:
                raise ValueError(
                    f"{op}: missing option {option!r} in param_groups[{i}]"
                )
        if (group["keys"] is None) != (i == 0):
            raise ValueError(
                f"{op}: expected a list of keys in each of param_groups except the "
                f"first, but got {group['keys']!r} in param_groups[{i}]"
            )
    expect(op, parts["state"], Mapping, "a dict by key as 'state'")
    for key, state in parts["state"].items():
        expect(op, state, Mapping, f"a dict by name as the state of key {shown(key)}")
    return renamed(parts, name_among(known))


def renamed(parts: Mapping[str, Any], rename: Callable[[Any], Any]) -> dict[str, Any]:
    """A state dict, whose structure has been checked, with other str keys.

    Unchanged if two keys would become one, which are those of two models.
    """

    def new(key: Any) -> Any:
        return rename(key) if isinstance(key, str) else key

    def keys_of(group: Mapping[str, Any]) -> Any:
        keys = group["keys"]
        return [new(key) for key in keys] if isinstance(keys, list | tuple) else keys

    states = {new(key): state for key, state in parts["state"].items()}
    if len(states) < len(parts["state"]):
        return dict(parts)
    rows = {
        name: tuple(renamed_rows(parts[name], rename))
        for name in ("lr_mult", "wd_mult", "state_names")
        if isinstance(parts.get(name), list | tuple)
    }
    groups = tuple({**x, "keys": keys_of(x)} for x in parts["param_groups"])
    return {**parts, **rows, "param_groups": groups, "state": states}


def fitted(
    op: str,
    optimizer: StoreOptimizer,
    impl: _C.KVStore | None,
    state_dict: Mapping[str, Any],
    strict: bool,
) -> tuple[_C.KVStore, Settings, dict[str, Any]]:
    """The options and other parts of a state dict for an optimizer on a store.

    Raises:
        ValueError, TypeError: as :func:`check_parts`, or of other keys.
        RuntimeError: the optimizer is not set on a store.
    """
    if impl is not None and is_torch_state(state_dict):
        state_dict = from_torch(op, optimizer, state_dict, impl.keys())
    known = {*optimizer._later_keys, *(impl.keys() if impl else ())}
    parts = check_parts(op, state_dict, optimizer._name(), optimizer.defaults, known)
    if impl is None:
        raise RuntimeError(
            f"{op}: the optimizer is not set on a store; call store.set_optimizer(...) "
            "first"
        )
    states = states_of(op, parts, impl.keys(), strict)
    return impl, settings_of(op, parts), {**parts, "state": states}


def settings_of(op: str, parts: Mapping[str, Any]) -> Settings:
    """The groups and multipliers of a state dict."""
    groups = [{**dict(group), "params": []} for group in parts["param_groups"]]
    for group in groups:
        if group["keys"] is not None:
            group["keys"] = as_keys(op, group["keys"])
    multipliers = []
    for name in ("lr_mult", "wd_mult"):
        try:
            pairs = dict(parts[name])
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{op}: expected pairs of key and multiplier as {name}, but got "
                f"{parts[name]!r}"
            ) from error
        multipliers.append(as_multipliers(op, pairs))
    return Settings(groups, *multipliers)


def states_of(
    op: str, parts: Mapping[str, Any], present: Sequence[StoreKey], strict: bool
) -> dict[StoreKey, dict[str, Any]]:
    """The states of a state dict, of the keys that the store has."""
    # A distributed checkpoint loads tensors into the state of the int 3, but adds
    # numbers under the str "3".
    states: dict[StoreKey, dict[str, Any]] = {}
    for key, state in parts["state"].items():
        states.setdefault(_as_present(op, key, present), {}).update(state)
    missing, unexpected = set(present) - states.keys(), states.keys() - set(present)
    for what, keys in (("missing", missing), ("unexpected", unexpected)):
        if strict and keys:
            raise ValueError(
                f"{op}: expected the state of the store's keys, but {len(keys)} are "
                f"{what} (key {listed(sorted(keys, key=str))}); strict=False skips "
                "them"
            )
    return {key: states[key] for key in present if key in states}


def _as_present(op: str, key: Any, present: Sequence[StoreKey]) -> StoreKey:
    """A saved key, as an int if the store has int keys."""
    if isinstance(key, str) and present and isinstance(present[0], int):
        try:
            return int(key)
        except ValueError:
            pass
    return _C.KVStore.key_of(op, key)
