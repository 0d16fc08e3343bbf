"""States of torch.optim's optimizers from and to those of the built-in ones.

The names and formulas of the tensors are the same. torch.optim numbers parameters in
the order of its groups, and keeps no step number in SGD.
"""

from __future__ import annotations

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


def from_torch(
    op: str,
    optimizer: StoreOptimizer,
    state_dict: Mapping[str, Any],
    present: Sequence[StoreKey],
) -> dict[str, Any]:
    """What the optimizer's ``state_dict()`` would return in torch.optim's state.

    Args:
        op: what messages begin with.
        optimizer: built-in; its gradient options are in the result.
        state_dict: of the same optimizer of torch.optim.
        present: the store's keys, in order.
    """
    own = optimizer._shared_options()
    if "gradient" not in own or _is_mxnet(optimizer):
        raise ValueError(
            f"{op}: expected the state_dict() of a store's optimizer, but got "
            "torch.optim's, which built-in optimizers with its formulas load"
        )
    theirs, state = state_dict["param_groups"], state_dict["state"]
    expect(op, theirs, list | tuple, "a list as 'param_groups'")
    expect(op, state, Mapping, "a dict as 'state'")
    for i, group in enumerate(theirs):
        expect(op, group, Mapping, f"a dict as param_groups[{i}]")
        expect(op, group.get("params"), list | tuple, f"numbers in param_groups[{i}]")
        for name in optimizer.defaults:
            if name not in group and name not in _OPTIONAL:
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
            name: value.item() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name not in (*_OF_IMPLEMENTATIONS, "params", "param_names")
        }
        # All keys that no group has are in the first, as the store has them.
        groups.append(
            {**optimizer.defaults, **ours, "keys": list(keys) if groups else None}
        )
        for key, number in zip(keys, group["params"], strict=True):
            if number in state or key in present:
                states[key] = _state_from_torch(op, state.get(number, {}))
    return {
        "optimizer": optimizer._name(),
        "param_groups": groups,
        **own,
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


def _state_from_torch(op: str, state: Any) -> dict[str, Any]:
    expect(op, state, Mapping, "a dict by name as a parameter's state")
    tensors = {
        name: value
        for name, value in state.items()
        if name != "step" and value is not None
    }
    # SGD counts no steps: its first one makes the momentum.
    step = int(state.get("step", 1 if tensors else 0))
    return {"step": step, "num_accumulated": 0, **tensors}


def to_torch(op: str, optimizer: StoreOptimizer) -> dict[str, Any]:
    """The optimizer's state as torch.optim's ``state_dict()`` returns it."""
    own = optimizer._saved()
    if "gradient" not in own:
        raise TypeError(
            f"{op}: expected a built-in optimizer, but got the class "
            f"{own['optimizer']} of torch.optim"
        )
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
    counts_steps = own["optimizer"] != "SGD"
    groups: list[dict[str, Any]] = []
    states: dict[int, dict[str, Any]] = {}
    number = 0
    for group in optimizer.param_groups:
        keys = group["params"]
        numbers = list(range(number, number + len(keys)))
        number += len(keys)
        options = {k: v for k, v in group.items() if k not in ("keys", "params")}
        if all(isinstance(key, str) for key in keys):
            options["param_names"] = keys
        groups.append({**options, "params": numbers})
        for index, key in zip(numbers, keys, strict=True):
            state = dict(own["state"].get(key, {"step": 0, "num_accumulated": 0}))
            step, accumulated = state.pop("step"), state.pop("num_accumulated")
            if accumulated:
                raise ValueError(
                    f"{op}: torch.optim accumulates no gradients, but {accumulated} "
                    f"are waiting for a step (key {listed([key])})"
                )
            if step and counts_steps:
                state["step"] = torch.tensor(float(step), dtype=torch.float32)
            if step and state:
                states[index] = state
    return {"state": states, "param_groups": groups}
