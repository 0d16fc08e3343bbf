"""A store as a dict that PyTorch's own tools save and load.

    {"format": 1, "type": "local", "key_kind": "int",
     "updater": None or the TorchScript module as base64,
     "optimizer": None or {"name", "groups", "gradient", "options", "extras"},
     "keys": {"3": {"value": tensor, "version": 4,
                    "step": 4, "num_accumulated": 0, "state": {"exp_avg": tensor}}},
     "absent": [[3, "momentum_buffer"]]}

Only dicts, lists, tensors, numbers and str, and only str as keys of dicts, because
torch.distributed.checkpoint makes str of all others. It fills the tensors of a dict
that it is handed, so a key has tensors for all that its optimizer will keep, zeros
before the first step. "absent" names the zeros that there are after it, such as for a
momentum that was switched on later.
"""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor

from torchkv import _C
from torchkv.optim.built_in import BuiltIn
from torchkv.optim.groups import listed, shown
from torchkv.state.content import (
    Content,
    KeyContent,
    Optimizer,
    expect,
    expect_fields,
    expect_key,
    expect_kind,
    expect_type,
    optimizer_as_dict,
    optimizer_from_dict,
    state_dtype,
    state_names,
    take,
)
from torchkv.state.tensor_files import memory_of

FORMAT = 1

_FIELDS = ("format", "type", "key_kind", "updater", "optimizer", "keys", "absent")
_KEY_FIELDS = ("value", "version", "step", "num_accumulated", "state")


def state_dict(impl: _C.KVStore) -> dict[str, Any]:
    """A snapshot of a store; TypeError where the updater is a Python callable."""
    _check_updater("state_dict", impl)
    content = Content.of(impl)
    optimizer = content.optimizer
    states = {key: _states(optimizer, key, item) for key, item in content.keys.items()}
    return {
        "format": FORMAT,
        "type": content.type,
        "key_kind": content.key_kind,
        "updater": None if content.updater is None else _as_text(content.updater),
        "optimizer": optimizer_as_dict(optimizer),
        "keys": {
            str(key): {
                "value": item.value,
                "version": item.version,
                "step": item.step,
                "num_accumulated": item.num_accumulated,
                "state": states[key],
            }
            for key, item in content.keys.items()
        },
        "absent": [
            [key, name]
            for key, item in content.keys.items()
            for name in states[key]
            if name not in item.states and _has_begun(item, name)
        ],
    }


def load_state_dict(
    impl: _C.KVStore, state: dict[str, Any], strict: bool
) -> BuiltIn | None:
    """Replaces a store's content by that of a state dict, or changes nothing.

    Returns:
        As :func:`torchkv.state.content.take`.
    """
    impl.barrier()  # a store that cannot be used says so first
    _check_updater("load_state_dict", impl)
    content = _parse(state)
    current = Content.of(impl, with_keys=False)
    keys: list[int | str] = list(impl.keys())
    if not keys and current.optimizer is None and current.updater is None:
        return take(impl, content)  # an empty store takes all there is
    _check_kinds(current, content)
    _check_optimizers(current, content)
    missing = [key for key in keys if key not in content.keys]
    _check_names(keys, missing, content, strict)
    for key in keys:
        if key in content.keys:
            _check_like(impl, key, content.keys[key].value)
    # In the order of this store, and what the state does not have as it is.
    kept = Content.of(impl).keys if missing else {}
    content.keys = {key: content.keys.get(key) or kept[key] for key in keys}
    content.key_kind = current.key_kind
    return take(impl, content)


def _check_updater(op: str, impl: _C.KVStore) -> None:
    updater = impl.optimizer()
    if callable(updater):
        raise TypeError(
            f"{op}: expected an updater that can be copied (None, an optimizer of "
            "torchkv.optim, a TorchScript function or module), but got a Python "
            f"callable of type {type(updater).__name__}; call set_updater(None) first"
        )


def _as_text(updater: Tensor) -> str:
    return base64.b64encode(memory_of(updater)).decode()


def _has_begun(item: KeyContent, state: str) -> bool:
    """Whether zeros may be real: before the first step, or push, they stand in."""
    return (item.num_accumulated if state == "accumulated" else item.step) != 0


def _states(
    optimizer: Optimizer | None, key: int | str, item: KeyContent
) -> dict[str, Tensor]:
    value = item.value
    if optimizer is None or not (value.is_floating_point() or value.is_complex()):
        return item.states
    dtype = state_dtype(value.dtype)
    names = [*state_names(optimizer, key)]
    if dtype != value.dtype:
        names.append("master")
    if optimizer.gradient["accumulate"] > 1:
        names.append("accumulated")
    states = dict(item.states)
    for name in names:
        if name not in states:
            states[name] = torch.zeros_like(value, dtype=dtype)
    return states


# -- loading


def _parse(state: object) -> Content:
    fields = expect_fields(state, _FIELDS, "the state")
    if fields["format"] != FORMAT:
        raise ValueError(
            f"load_state_dict: expected a state of format {FORMAT}, but got format "
            f"{fields['format']!r}; a newer torchkv may read it"
        )
    kind = expect_kind(fields["key_kind"])
    optimizer = optimizer_from_dict(fields["optimizer"], kind)
    keys = {}
    for text, item in expect(fields["keys"], dict, "'keys'").items():
        key = _parse_key(text, kind)
        keys[key] = _parse_item(key, item)
    for pair in expect(fields["absent"], list, "'absent'"):
        if len(expect(pair, list, "an item of 'absent'")) != 2:
            raise ValueError(f"load: expected two parts of 'absent', but got {pair}")
        key = expect_key(pair[0], kind)
        if key in keys:
            keys[key].states.pop(expect(pair[1], str, "a state's name"), None)
    return Content(
        expect_type(fields["type"]),
        kind,
        keys,
        _parse_updater(fields["updater"]),
        optimizer,
    )


def _parse_updater(text: object) -> Tensor | None:
    if text is None:
        return None
    try:
        data = base64.b64decode(expect(text, str, "'updater'"), validate=True)
    except ValueError as error:
        raise ValueError(
            f"load: expected the updater in base64, but got other text: {error}"
        ) from error
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def _parse_key(text: object, kind: str) -> int | str:
    key = expect(text, str, "a key")
    if kind == "str":
        return key
    try:
        number = int(key) if kind == "int" else None
    except ValueError:
        number = None
    if number is None or str(number) != key:
        raise ValueError(f"load: expected keys of kind {kind!r}, but got {shown(key)}")
    return expect(number, int, "a key")


def _parse_item(key: int | str, item: object) -> KeyContent:
    where = f"(key {shown(key)})"
    fields = expect_fields(item, _KEY_FIELDS, f"the state {where}")
    version, step, num_accumulated = (
        expect(fields[name], int, f"{name!r} {where}")
        for name in ("version", "step", "num_accumulated")
    )
    states = expect(fields["state"], dict, f"'state' {where}")
    for name, tensor in {"value": fields["value"], **states}.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"load: expected a tensor as {name!r}, but got "
                f"{type(tensor).__name__} {where}"
            )
    result = KeyContent(fields["value"], version, step, num_accumulated)
    result.states = {
        name: tensor for name, tensor in states.items() if _has_begun(result, name)
    }
    return result


def _check_kinds(current: Content, content: Content) -> None:
    if content.key_kind not in ("", current.key_kind) and current.key_kind:
        raise ValueError(
            f"load_state_dict: expected {current.key_kind} keys, as the store has, "
            f"but got keys of kind {content.key_kind!r}"
        )


def _check_optimizers(current: Content, content: Content) -> None:
    def told(content: Content) -> str:
        if content.optimizer is not None:
            return f"the optimizer {content.optimizer.name!r}"
        return "no optimizer" if content.updater is None else "a TorchScript updater"

    if told(current) != told(content):
        raise ValueError(
            f"load_state_dict: expected a state of {told(current)}, as the store has, "
            f"but got one of {told(content)}"
        )


def _check_names(
    keys: list[int | str], missing: list[int | str], content: Content, strict: bool
) -> None:
    if not strict:
        return
    known = set(keys)
    unexpected = [key for key in content.keys if key not in known]
    for what, names in [("missing", missing), ("unexpected", unexpected)]:
        if names:
            some = listed(names, 10)
            raise ValueError(
                "load_state_dict: expected the keys of the store, but got a state with "
                f"{len(names)} {what} (key {some}); strict=False takes those that both "
                "have"
            )


def _check_like(impl: _C.KVStore, key: int | str, value: Tensor) -> None:
    expected = (impl.dtype(key), impl.shape(key))
    if (value.dtype, tuple(value.shape)) != expected:
        raise ValueError(
            f"load_state_dict: expected a value of {expected[0]} and shape "
            f"{list(expected[1])}, but got {value.dtype} and {list(value.shape)} "
            f"(key {shown(key)})"
        )
