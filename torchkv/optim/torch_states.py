"""States of torch.optim's optimizers from and to those of a store.

The names and formulas of the tensors are the same. torch.optim numbers parameters in
the order of its groups; a built-in optimizer counts steps itself, also for SGD, where
torch.optim does not.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchkv.arguments import StoreKey, expect, listed
from torchkv.parameter_names import name_among

if TYPE_CHECKING:
    from torchkv.optim.base import StoreOptimizer

# Options that choose one of torch's implementations; a store has one.
_OF_IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")
# What some torch versions lack in Adam's groups; the class says the same.
_OPTIONAL = ("decoupled_weight_decay",)


def is_torch_state(state_dict: Mapping[str, Any]) -> bool:
    """Whether a state dict is one of torch.optim's."""
    return state_dict.keys() == {"state", "param_groups"}  # a store's has more


def _is_mxnet(optimizer: StoreOptimizer) -> bool:
    return optimizer._name().startswith("mxnet.")


def _is_built_in(parts: Mapping[str, Any]) -> bool:
    """Of saved parts; else they are those of a class of torch.optim."""
    return "gradient" in parts


def from_torch(
    op: str,
    optimizer: StoreOptimizer,
    state_dict: Mapping[str, Any],
    present: Sequence[StoreKey],
) -> dict[str, Any]:
    """What the optimizer's ``state_dict()`` would return in torch.optim's state.

    Args:
        op: what messages begin with.
        optimizer: of the store; its gradient options are in the result.
        state_dict: of the same optimizer of torch.optim.
        present: the store's keys, in order.
    """
    own = optimizer._shared_options()
    if _is_mxnet(optimizer):
        raise ValueError(
            f"{op}: expected the state_dict() of a store's optimizer, but got "
            "torch.optim's, which optimizers with its formulas load"
        )
    counts_steps = _is_built_in(own)
    optional = (*_OF_IMPLEMENTATIONS, *_OPTIONAL)
    theirs, state = state_dict["param_groups"], state_dict["state"]
    expect(op, theirs, list | tuple, "a list as 'param_groups'")
    expect(op, state, Mapping, "a dict as 'state'")
    for i, group in enumerate(theirs):
        expect(op, group, Mapping, f"a dict as param_groups[{i}]")
        expect(op, group.get("params"), list | tuple, f"numbers in param_groups[{i}]")
        for name in optimizer.defaults:
            if name not in group and name not in optional:
                raise ValueError(
                    f"{op}: expected the state of torch.optim.{optimizer._name()}, but "
                    f"got a state without {name!r} in param_groups[{i}]"
                )
    groups: list[dict[str, Any]] = []
    states: dict[StoreKey, dict[str, Any]] = {}
    for group, keys in zip(
        theirs, _keys_of(op, optimizer, theirs, present), strict=True
    ):
        ours = {
            name: _option(value, as_number=counts_steps)
            for name, value in group.items()
            if name not in (*_OF_IMPLEMENTATIONS, "params", "param_names")
        }
        # All keys that no group has are in the first, as the store has them.
        groups.append(
            {**optimizer.defaults, **ours, "keys": list(keys) if groups else None}
        )
        for key, number in zip(keys, group["params"], strict=True):
            if number in state or key in present:
                of_key = state.get(number, {})
                expect(op, of_key, Mapping, "a dict by name as a parameter's state")
                parts = {k: x for k, x in of_key.items() if x is not None}
                states[key] = _counted(parts) if counts_steps else parts
    names = tuple((key, tuple(state)) for key, state in states.items() if state)
    return {
        "optimizer": optimizer._name(),
        "param_groups": groups,
        **own,
        **({} if counts_steps else {"state_names": names}),
        "state": states,
    }


def _keys_of(
    op: str,
    optimizer: StoreOptimizer,
    theirs: Sequence[Mapping[str, Any]],
    present: Sequence[StoreKey],
) -> list[list[StoreKey]]:
    """The keys of each of torch.optim's groups."""
    counts = [len(group["params"]) for group in theirs]
    own = name_among(present)
    names = [[own(name) for name in group.get("param_names", ())] for group in theirs]
    if [len(group) for group in names] == counts and present and sum(counts):
        return names
    all_keys = [group["params"] for group in optimizer.param_groups]
    of_store = [[key for key in keys if key in present] for keys in all_keys]
    for ours in (all_keys, of_store):  # torch.optim may have the frozen ones, or not
        if [len(keys) for keys in ours] == counts:
            return ours
    raise ValueError(
        f"{op}: expected groups of {listed(map(len, all_keys))} parameters, in the "
        f"order of the store's keys, but got torch.optim's state with groups of "
        f"{listed(counts)}"
    )


def _option(value: Any, as_number: bool) -> Any:
    """A copy: schedulers write into tensors."""
    is_tensor = isinstance(value, torch.Tensor)
    return value.item() if as_number and is_tensor else copy.deepcopy(value)


def _counted(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a built-in optimizer."""
    tensors = {name: value for name, value in state.items() if name != "step"}
    # SGD counts no steps: its first one makes the momentum.
    step = int(state.get("step", 1 if tensors else 0))
    return {"step": step, "num_accumulated": 0, **tensors}


def to_torch(op: str, optimizer: StoreOptimizer) -> dict[str, Any]:
    """The optimizer's state as torch.optim's ``state_dict()`` returns it."""
    own = optimizer._saved()
    if _is_mxnet(optimizer):
        raise TypeError(
            f"{op}: expected an optimizer with torch.optim's formula, but got "
            f"{own['optimizer']}"
        )
    for name in ("lr_mult", "wd_mult"):
        if own[name]:
            keys = listed(key for key, _ in own[name])
            raise ValueError(
                f"{op}: torch.optim has groups, but no {name}; call set_param_groups "
                f"instead (key {keys})"
            )
    of_key = _uncounted(op, own) if _is_built_in(own) else _begun(own)
    groups: list[dict[str, Any]] = []
    states: dict[int, dict[str, Any]] = {}
    number = 0
    for group in optimizer.param_groups:
        keys = group["params"]
        numbers = list(range(number, number + len(keys)))
        number += len(keys)
        options = {
            name: _option(value, as_number=False)
            for name, value in group.items()
            if name not in ("keys", "params")
        }
        if all(isinstance(key, str) for key in keys):
            options["param_names"] = keys
        groups.append({**options, "params": numbers})
        states.update(
            (index, of_key[key])
            for index, key in zip(numbers, keys, strict=True)
            if key in of_key
        )
    return {"state": states, "param_groups": groups}


def _begun(parts: Mapping[str, Any]) -> dict[StoreKey, dict[str, Any]]:
    """By key, the states of a class of torch.optim that a step has made."""
    return {key: parts["state"][key] for key, _ in parts["state_names"]}


def _uncounted(op: str, parts: Mapping[str, Any]) -> dict[StoreKey, dict[str, Any]]:
    """The same of a built-in optimizer, without what torch.optim does not keep."""
    result: dict[StoreKey, dict[str, Any]] = {}
    for key, given in parts["state"].items():
        state = dict(given)
        step, accumulated = state.pop("step"), state.pop("num_accumulated")
        if accumulated:
            raise ValueError(
                f"{op}: torch.optim accumulates no gradients, but {accumulated} "
                f"are waiting for a step (key {listed([key])})"
            )
        if step and parts["optimizer"] != "SGD":
            state["step"] = torch.tensor(float(step), dtype=torch.float32)
        if step and state:
            result[key] = state
    return result
