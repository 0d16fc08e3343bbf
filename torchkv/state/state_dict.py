"""A store as a dict that PyTorch's own tools save and load.

    {"format": 1, "type": "local", "key_kind": "int",
     "updater": None or the TorchScript module as base64,
     "optimizer": None or {"name", "groups", "gradient", "options", "extras"},
     "compression": {"groups", "keys"},
     "keys": {"3": {"value": tensor, "version": 4,
                    "step": 4, "num_accumulated": 0, "state": {"exp_avg": tensor},
                    "residuals": [tensor], "num_compressed": 4}},
     "absent": [[3, "momentum_buffer"]],
     "torch_optimizer": {"optimizer", "param_groups", ..., "state": {"3": {...}}}}

It consists of dicts, lists, tensors, numbers and str, and the keys of its dicts are
str, because torch.distributed.checkpoint converts all others. That tool fills the
tensors of a dict that it is given, so each key has tensors for everything that its
optimizer will keep, zeros before the first step. "absent" names the zeros that a key
has after its first step, such as for a momentum that was switched on later.
"compression", and the last two items of a key, are there if the store compresses;
"torch_optimizer" is there if the updater is a class of torch.optim: its state. A
row-sparse key also has "rows": {"ids", "num_rows", "init", "numbers", "seed"}; its
value and state are of the rows with these ids. torch.distributed.checkpoint loads them
into a store whose key keeps as many rows.
"""

from __future__ import annotations

import base64
import contextlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchkv import _C
from torchkv.arguments import listed, shown
from torchkv.optim.adaptor import TorchOptimizer
from torchkv.parameter_names import renamed_rows
from torchkv.state.content import (
    Compression,
    Content,
    KeyContent,
    Rows,
    wrapped_of,
)
from torchkv.state.form import KEY_TYPES, parse
from torchkv.state.tensor_files import memory_of

if TYPE_CHECKING:
    from torchkv.optim import StoreOptimizer

FORMAT = 1
_NONE = "no optimizer"

_KEY_FORM = {
    **{"value": Tensor, "version": int, "step": int, "num_accumulated": int},
    "state": {str: Tensor},
}
_OF_COMPRESSED = {"residuals": [Tensor], "num_compressed": int}
_ROWS_FORM = {
    **{"ids": Tensor, "num_rows": int, "init": str},
    **{"numbers": {str: float}, "seed": int},
}
_FORM = {
    **{"format": int, "type": str, "key_kind": str},
    **{"updater": str | None, "optimizer": object, "compression": object},
    **{"keys": dict, "absent": [(int | str, str)], "torch_optimizer": dict | None},
}


def state_dict(impl: _C.KVStore) -> dict[str, Any]:
    """A snapshot; TypeError for a Python callable, but for classes of torch.optim."""
    _check_updater("state_dict", impl)
    content = Content.of(impl)
    states = _states(content)
    compressed = () if content.compression is None else tuple(_OF_COMPRESSED)
    state = {
        "format": FORMAT,
        **content.fields(),
        "updater": None if content.updater is None else _as_text(content.updater),
        "keys": {
            str(key): {
                **{name: getattr(item, name) for name in _KEY_FORM},
                "state": states[key],
                **{name: getattr(item, name) for name in compressed},
                **({} if item.rows is None else {"rows": _fields_of(item.rows)}),
            }
            for key, item in content.keys.items()
        },
        "absent": [
            [key, name]
            for key, item in content.keys.items()
            for name in states[key]
            if name not in item.state and _has_begun(item, name)
        ],
    }
    if (saved := content.torch_optimizer) is not None:
        states_by_text = {str(key): x for key, x in saved["state"].items()}
        state["torch_optimizer"] = {**saved, "state": states_by_text}
    return state


def load_state_dict(
    impl: _C.KVStore, state: dict[str, Any], strict: bool
) -> StoreOptimizer | None:
    """Replaces a store's content by that of a state dict, or changes nothing.

    Returns:
        The store's optimizer, for the store to hold.
    """
    impl.barrier()  # a store that cannot be used is an error before anything else
    _check_updater("load_state_dict", impl)
    content = _parse(state)
    current = Content.of(impl, with_keys=False)
    keys: list[int | str] = list(impl.keys())
    # A class of torch.optim must be there: its name alone makes none.
    if keys or _updater_of(current) != _NONE or content.torch_optimizer is not None:
        _check_fits(impl, keys, current, content, strict)
        # The keys of this store, in its order; those that the state lacks unchanged.
        missing = [key for key in keys if key not in content.keys]
        if missing and impl.type.startswith("dist"):
            # Rank 0 alone would know their state.
            raise ValueError(
                "load_state_dict: expected a state with all keys of a store of several "
                f"processes, but got one without {len(missing)} (key "
                f"{listed(missing, 10)})"
            )
        kept = Content.of(impl).keys if missing else {}
        content.keys = {key: content.keys.get(key) or kept[key] for key in keys}
        content.key_kind = current.key_kind
    if content.compression is None:  # which does not say that there is to be none
        content.compression = current.compression
    if content.torch_optimizer is None:
        return content.replace(impl)
    made = content.make(impl.type)  # or raises, before the optimizer changes
    wrapped = wrapped_of(impl)
    assert wrapped is not None
    wrapped._load_saved(content.torch_optimizer, strict)
    impl.take(made, keeps_updater=True)
    return wrapped


def renamed(state: dict[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """A state dict of a store with other str keys, if it has the form of one.

    What is invalid is left as it is, for :func:`load_state_dict` to refuse.
    """
    if not isinstance(state, dict) or state.get("key_kind") != "str":
        return state
    keys, optimizer = state.get("keys"), state.get("optimizer")
    compression = state.get("compression")
    result = {**state, "absent": renamed_rows(state.get("absent"), rename)}
    if isinstance(keys, dict):
        names = {key: rename(key) if isinstance(key, str) else key for key in keys}
        if len(set(names.values())) < len(names):
            return state
        result["keys"] = {names[key]: item for key, item in keys.items()}
    if isinstance(optimizer, dict) and "options" in optimizer:
        options = renamed_rows(optimizer["options"], rename)
        result["optimizer"] = {**optimizer, "options": options}
    if isinstance(compression, dict) and "keys" in compression:
        of_keys = renamed_rows(compression["keys"], rename)
        result["compression"] = {**compression, "keys": of_keys}
    return result


def with_residuals(state: dict[str, Any], num_positions: int) -> dict[str, Any]:
    """The state dict with zeros as residuals of positions that have none yet.

    As for the optimizer's state: torch.distributed.checkpoint fills what is there.
    """
    compression = Compression.parse(state.get("compression"), state["key_kind"])
    if compression is None:
        return state
    has_feedback = compression.with_feedback()
    for text, item in state["keys"].items():
        value = item["value"]
        if (
            value.is_floating_point()
            and "rows" not in item  # which are pushed as they are
            and has_feedback(_parse_key(text, state["key_kind"]))
        ):
            dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
            item["residuals"] += [
                torch.zeros_like(value, dtype=dtype, device="cpu")
                for _ in range(num_positions - len(item["residuals"]))
            ]
    return state


def without_compression(state: dict[str, Any]) -> dict[str, Any]:
    """The state dict as of a store that does not compress.

    What is invalid is left as it is, for :func:`load_state_dict` to refuse.
    """
    if not isinstance(state, dict) or not isinstance(state.get("keys"), dict):
        return state
    plain = {name: part for name, part in state.items() if name != "compression"}
    plain["keys"] = {
        key: {k: v for k, v in item.items() if k not in _OF_COMPRESSED}
        if isinstance(item, dict)
        else item
        for key, item in state["keys"].items()
    }
    return plain


def _fields_of(rows: Rows) -> dict[str, Any]:
    return {name: getattr(rows, name) for name in _ROWS_FORM}


def _check_updater(op: str, impl: _C.KVStore) -> None:
    updater = impl.optimizer()
    if wrapped_of(impl) is not None:
        return
    if isinstance(updater, TorchOptimizer):
        raise TypeError(
            f"{op}: expected an updater whose state is on one machine, but got the "
            f"class {updater._name()} of torch.optim in a {impl.type} store; "
            "save_optimizer_states() writes what a process has of it"
        )
    if callable(updater):
        raise TypeError(
            f"{op}: expected an updater that can be copied (None, an optimizer of "
            "torchkv.optim, a TorchScript function or module), but got a Python "
            f"callable of type {type(updater).__name__}; call set_updater(None) first"
        )


def _as_text(updater: Tensor) -> str:
    return base64.b64encode(memory_of(updater)).decode()


def _has_begun(item: KeyContent, state: str) -> bool:
    """Whether a tensor is state; before the first step or push it stands in for it."""
    return (item.num_accumulated if state == "accumulated" else item.step) != 0


def _states(content: Content) -> dict[int | str, dict[str, Tensor]]:
    """By key, the tensors of everything that the optimizer will keep."""
    result = {key: dict(item.state) for key, item in content.keys.items()}
    optimizer = content.optimizer
    if optimizer is None:
        return result
    names_of = [_C.KVStore.state_names(optimizer.name, x) for x in optimizer.groups]
    group_of = {key: group for key, group, *_ in optimizer.options}
    for key, states in result.items():
        value = content.keys[key].value
        if not (value.is_floating_point() or value.is_complex()):
            continue
        dtype = _C.KVStore.state_dtype(value.dtype)
        names = [*names_of[group_of.get(key, 0)]]
        if dtype != value.dtype:
            names.append("master")
        if optimizer.gradient["accumulate"] > 1:
            names.append("accumulated")
        for name in names:
            if name not in states:
                states[name] = torch.zeros_like(value, dtype=dtype)
    return result


# -- loading


def _parse(state: object) -> Content:
    absent = {"compression": None, "torch_optimizer": None}
    fields = parse({**absent, **parse(state, dict, "the state")}, _FORM, "the state")
    if fields["format"] != FORMAT:
        raise ValueError(
            f"load_state_dict: expected a state of format {FORMAT}, but got format "
            f"{fields['format']!r}; a newer torchkv may read it"
        )
    content = Content.parse(fields)
    keys, kind = content.keys, content.key_kind
    for text, saved in fields["keys"].items():
        key = _parse_key(text, kind)
        what = f"key {shown(key)}"
        saved = {"residuals": [], "num_compressed": 0, **parse(saved, dict, what)}
        rows = saved.pop("rows", None)
        item = KeyContent(**parse(saved, {**_KEY_FORM, **_OF_COMPRESSED}, what))
        if rows is not None:
            item.rows = Rows(**parse(rows, _ROWS_FORM, f"the rows of {what}"))
        item.state = {k: v for k, v in item.state.items() if _has_begun(item, k)}
        keys[key] = item
    for key, state_name in fields["absent"]:
        if type(key) is not KEY_TYPES[kind]:
            raise ValueError(f"load: expected {kind} keys in 'absent', but got {key!r}")
        if key in keys:
            keys[key].state.pop(state_name, None)
    content.updater = _parse_updater(fields["updater"])
    content.torch_optimizer = fields["torch_optimizer"]
    return content


def _parse_updater(text: str | None) -> Tensor | None:
    if text is None:
        return None
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError(
            f"load: expected the updater in base64, but got other text: {error}"
        ) from error
    if not data:  # which frombuffer refuses
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _parse_key(name: object, kind: str) -> int | str:
    key = name
    if kind == "int" and isinstance(name, str):
        with contextlib.suppress(ValueError):
            key = int(name) if str(int(name)) == name else name  # not of "03"
    parsed: int | str = parse(key, KEY_TYPES[kind], "a name in 'keys'")
    return parsed


def _check_fits(
    impl: _C.KVStore,
    keys: list[int | str],
    current: Content,
    content: Content,
    strict: bool,
) -> None:
    """Refuses a state of other keys, values or updaters than the store has."""
    if current.key_kind and content.key_kind not in ("", current.key_kind):
        raise ValueError(
            f"load_state_dict: expected {current.key_kind} keys, as the store has, "
            f"but got keys of kind {content.key_kind!r}"
        )
    updaters = _updater_of(current), _updater_of(content)
    if updaters[0] != updaters[1]:
        raise ValueError(
            f"load_state_dict: expected a state of {updaters[0]}, as the store has, "
            f"but got one of {updaters[1]}"
        )
    if strict:
        known = set(keys)
        missing = [key for key in keys if key not in content.keys]
        unexpected = [key for key in content.keys if key not in known]
        for what, names in [("missing", missing), ("unexpected", unexpected)]:
            if names:
                raise ValueError(
                    "load_state_dict: expected the keys of the store, but got a state "
                    f"with {len(names)} {what} (key {listed(names, 10)}); "
                    "strict=False takes the keys that both have"
                )
    for key in keys:
        if key not in content.keys:
            continue
        item = content.keys[key]
        value, shape = item.value, tuple(item.value.shape)
        expected = (impl.dtype(key), impl.shape(key))
        if item.rows is not None:
            num_rows = item.rows.num_rows
            if num_rows == -1:
                num_rows = (2**63 - 1) // math.prod(max(n, 1) for n in shape[1:])
            shape = (num_rows, *shape[1:])
        kinds = impl.is_row_sparse(key), item.rows is not None
        if kinds[0] != kinds[1]:
            names = ["dense", "row-sparse"]
            raise ValueError(
                f"load_state_dict: expected a {names[kinds[0]]} value, as the store "
                f"has, but got a {names[kinds[1]]} one (key {shown(key)})"
            )
        if (value.dtype, shape) != expected:
            raise ValueError(
                f"load_state_dict: expected a value of {expected[0]} and shape "
                f"{list(expected[1])}, but got {value.dtype} and {list(shape)} "
                f"(key {shown(key)})"
            )


def _updater_of(content: Content) -> str:
    if content.torch_optimizer is not None:
        return f"the class {content.torch_optimizer.get('optimizer')} of torch.optim"
    if content.optimizer is not None:
        return f"the optimizer {content.optimizer.name!r}"
    return _NONE if content.updater is None else "a TorchScript updater"
