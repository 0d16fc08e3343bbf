"""A store as a dict that PyTorch's own tools save and load.

    {"format": 1, "type": "local", "key_kind": "int",
     "updater": None or the TorchScript module as base64,
     "optimizer": None or {"name", "groups": [[["lr", 0.1], ...]],
                           "gradient": [["accumulate", 1.0], ...], "options", "extras"},
     "compression": None or {"groups": [[["type", "2bit"], ...]], "keys"},
     "keys": {"3": {"value": tensor, "version": 4,
                    "step": 4, "num_accumulated": 0, "state": {"exp_avg": tensor},
                    "residuals": [tensor], "num_compressed": 4}},
     "absent": [[3, "momentum_buffer"]],
     "torch_optimizer": None or a class of torch.optim's state_dict()}

It consists of dicts, lists, tensors, numbers and str, and the keys of its dicts are
str, because torch.distributed.checkpoint converts all others. Of a dict, that tool
loads the names that the store already has, so options are lists of pairs, which it
loads as a whole. It fills the tensors that are there, so each key has tensors for
everything that its optimizer will keep, zeros before the first step. "absent" names
the zeros that a key has after its first step, such as for a momentum that was switched
on later.

The last two items of a key are there if the store compresses. A row-sparse key also
has "rows": {"ids", "num_rows", "init", "numbers", "seed"}; its value and state are of
the rows with these ids. torch.distributed.checkpoint loads them into a store whose key
keeps as many rows.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchkv import _C
from torchkv.arguments import listed, shown
from torchkv.gathering import checked_together, gather
from torchkv.parameter_names import renamed_rows
from torchkv.state.content import Compression, Content, Rows, wrapped_of
from torchkv.state.parsing import (
    FORMAT,
    KEY_FORM,
    OF_COMPRESSED,
    ROWS_FORM,
    has_begun,
    names_of_states,
    parse_key,
    parse_state,
)
from torchkv.state.tensor_files import memory_of

if TYPE_CHECKING:
    from torchkv.optim import StoreOptimizer


def state_dict(impl: _C.KVStore) -> dict[str, Any]:
    """A snapshot; TypeError for a Python callable, but for classes of torch.optim."""
    _check_updater("state_dict", impl)
    content = Content.of(impl)
    states = _states(content)
    compressed = () if content.compression is None else tuple(OF_COMPRESSED)
    state = {
        "format": FORMAT,
        # Always there: torch.distributed.checkpoint fails on a name that a checkpoint
        # lacks, but skips one that only the checkpoint has.
        **{"compression": None, "torch_optimizer": None},
        **_with_pairs(content.fields()),
        "updater": None if content.updater is None else _as_text(content.updater),
        "keys": {
            str(key): {
                **{name: getattr(item, name) for name in KEY_FORM},
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
            if name not in item.state and has_begun(item, name)
        ],
    }
    if (saved := content.torch_optimizer) is not None:
        states_by_text = {
            str(key): x for key, x in saved["state"].items() if key in content.keys
        }
        state["torch_optimizer"] = {**saved, "state": states_by_text}
    return state


def load_state_dict(
    impl: _C.KVStore, state: dict[str, Any], strict: bool
) -> StoreOptimizer | None:
    """Replaces a store's content by that of a state dict, or changes nothing.

    Returns:
        The store's optimizer, for the store to hold.
    """
    op, is_dist = "load_state_dict", impl.type.startswith("dist")
    with checked_together(impl, op):
        wrapped = wrapped_of(impl)
        _check_updater(op, impl)
        if is_dist and impl.num_workers() > 1:
            state = _with_keys_of_rank_0(impl, op, state)
        content = _fitted(impl, parse_state(state), strict)
        made = content.made_for(impl)
    if wrapped is None or content.torch_optimizer is None:
        return content.replace(impl, made)
    wrapped._load_saved(content.torch_optimizer, strict)
    if not is_dist:
        impl.take(made, keeps_updater=True)
    elif content.keys:
        values = [
            item.value
            if item.rows is None
            else torch.sparse_coo_tensor(
                item.rows.ids[None],
                item.value,
                impl.shape(key),
                check_invariants=False,
            )
            for key, item in content.keys.items()
        ]
        impl.assign(list(content.keys), values, False)
        content.replace_compression(impl)
    return wrapped


def _with_keys_of_rank_0(
    impl: _C.KVStore, op: str, state: dict[str, Any]
) -> dict[str, Any]:
    """The state, or rank 0's if this one is another rank's, which has no keys.

    So that each rank can load what its own :meth:`state_dict` returned, as
    torch.distributed.checkpoint does.
    """
    has_keys = isinstance(state, dict) and bool(state.get("keys"))
    of_ranks = gather(impl, op, 0, b"1" if has_keys else b"0", to_all=True)
    if of_ranks[0] == b"0" or b"0" not in of_ranks:
        return state
    data = io.BytesIO()
    if impl.rank() == 0:
        torch.save(state, data)
    gathered = gather(impl, op, 1, data.getvalue(), to_all=True)[0]
    if has_keys:
        return state
    whole: dict[str, Any] = torch.load(
        io.BytesIO(gathered), map_location="cpu", weights_only=True
    )
    return whole


def _fitted(impl: _C.KVStore, content: Content, strict: bool) -> Content:
    """A content with the keys of a store that has some, and which takes it."""
    current = Content.of(impl, with_keys=False)
    keys: list[int | str] = list(impl.keys())
    updaters = current.optimizer, current.updater, current.torch_optimizer
    # A class of torch.optim must be set before: a state has only its name.
    if (
        keys
        or any(updater is not None for updater in updaters)
        or content.torch_optimizer is not None
    ):
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
    return content


# The dicts of options in a content's fields.
_OPTIONS = {"optimizer": ("groups", "gradient"), "compression": ("groups",)}


def _with_pairs(fields: dict[str, Any]) -> dict[str, Any]:
    """A content's fields with lists of pairs as options."""

    def pairs(part: Any) -> Any:
        if isinstance(part, dict):
            return [list(item) for item in part.items()]
        return [pairs(item) for item in part]

    result = dict(fields)
    for part, names in _OPTIONS.items():
        if (options := fields.get(part)) is not None:
            result[part] = {**options, **{name: pairs(options[name]) for name in names}}
    return result


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
            and has_feedback(parse_key(text, state["key_kind"]))
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
        key: {k: v for k, v in item.items() if k not in OF_COMPRESSED}
        if isinstance(item, dict)
        else item
        for key, item in state["keys"].items()
    }
    return plain


def _fields_of(rows: Rows) -> dict[str, Any]:
    fields = {name: getattr(rows, name) for name in ROWS_FORM}
    return {**fields, "numbers": [list(item) for item in rows.numbers.items()]}


def _check_updater(op: str, impl: _C.KVStore) -> None:
    updater = impl.optimizer()
    if callable(updater) and wrapped_of(impl) is None:
        raise TypeError(
            f"{op}: expected an updater that can be copied (None, an optimizer of "
            "torchkv.optim, a TorchScript function or module), but got a Python "
            f"callable of type {type(updater).__name__}; call set_updater(None) first"
        )


def _as_text(updater: Tensor) -> str:
    return base64.b64encode(memory_of(updater)).decode()


def _states(content: Content) -> dict[int | str, dict[str, Tensor]]:
    """By key, the tensors of everything that the optimizer will keep."""
    result = {key: dict(item.state) for key, item in content.keys.items()}
    optimizer = content.optimizer
    if optimizer is None:
        return result
    names_of = names_of_states(optimizer)
    for key, states in result.items():
        value = content.keys[key].value
        if not (value.is_floating_point() or value.is_complex()):
            continue
        dtype = _C.KVStore.state_dtype(value.dtype)
        names = names_of(key)
        if dtype != value.dtype:
            names.append("master")
        if optimizer.gradient["accumulate"] > 1:
            names.append("accumulated")
        for name in names:
            if name not in states:
                states[name] = torch.zeros_like(value, dtype=dtype)
    return result


# -- what fits


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
                # A store of several processes needs a state with all of its keys.
                is_needed = missing and impl.type.startswith("dist")
                hint = (
                    "" if is_needed else "; strict=False takes the keys that both have"
                )
                raise ValueError(
                    "load_state_dict: expected the keys of the store, but got a state "
                    f"with {len(names)} {what} (key {listed(names, 10)}){hint}"
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
    return "no optimizer" if content.updater is None else "a TorchScript updater"
