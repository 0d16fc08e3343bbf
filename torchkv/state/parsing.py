"""The parts of a state dict, in the form of ``torchkv.state.state_dict``."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from torchkv import _C
from torchkv.arguments import shown
from torchkv.state.content import Content, KeyContent, Optimizer, Rows
from torchkv.state.form import KEY_TYPES, Options, parse

FORMAT = 1

KEY_FORM = {
    **{"value": Tensor, "version": int, "step": int, "num_accumulated": int},
    "state": {str: Tensor},
}
OF_COMPRESSED = {"residuals": [Tensor], "num_compressed": int}
ROWS_FORM = {
    **{"ids": Tensor, "num_rows": int, "init": str},
    **{"numbers": Options(float), "seed": int},
}
_FORM = {
    **{"format": int, "type": str, "key_kind": str},
    **{"updater": str | None, "optimizer": object, "compression": object},
    **{"keys": dict, "absent": [(int | str, str)], "torch_optimizer": dict | None},
}


def parse_state(state: object) -> Content:
    """The content of which it is the state dict; ValueError if a part is invalid."""
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
        key = parse_key(text, kind)
        what = f"key {shown(key)}"
        saved = {"residuals": [], "num_compressed": 0, **parse(saved, dict, what)}
        rows = saved.pop("rows", None)
        item = KeyContent(**parse(saved, {**KEY_FORM, **OF_COMPRESSED}, what))
        if rows is not None:
            item.rows = Rows(**parse(rows, ROWS_FORM, f"the rows of {what}"))
        item.state = {k: v for k, v in item.state.items() if has_begun(item, k)}
        keys[key] = item
    for key, state_name in fields["absent"]:
        if type(key) is not KEY_TYPES[kind]:
            raise ValueError(f"load: expected {kind} keys in 'absent', but got {key!r}")
        if key in keys:
            keys[key].state.pop(state_name, None)
    _check_states(content, {(key, name) for key, name in fields["absent"]})
    content.updater = _parse_updater(fields["updater"])
    content.torch_optimizer = fields["torch_optimizer"]
    return content


def _check_states(content: Content, absent: set[tuple[int | str, str]]) -> None:
    """ValueError if a key that has made a step lacks one of its tensors."""
    if (optimizer := content.optimizer) is None:
        return
    try:
        names_of = names_of_states(optimizer)
        missing = [
            (key, name)
            for key, item in content.keys.items()
            if item.value.is_floating_point() or item.value.is_complex()
            for name in [*names_of(key), "accumulated"]
            if has_begun(item, name) and name not in item.state
        ]
    except (ValueError, IndexError):
        return  # options that the store will refuse
    for key, name in missing:
        if (key, name) not in absent:
            raise ValueError(
                f"load_state_dict: missing state {name!r} (key {shown(key)}); "
                "torch.distributed.checkpoint loads only tensors that the store has: "
                "before it, set the options with which the state was saved"
            )


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


def parse_key(name: object, kind: str) -> int | str:
    """A key from a name in ``"keys"``."""
    key = name
    if kind == "int" and isinstance(name, str):
        with contextlib.suppress(ValueError):
            key = int(name) if str(int(name)) == name else name  # not of "03"
    parsed: int | str = parse(key, KEY_TYPES[kind], "a name in 'keys'")
    return parsed


def has_begun(item: KeyContent, state: str) -> bool:
    """Whether a tensor is state; before the first step or push it stands in for it."""
    return (item.num_accumulated if state == "accumulated" else item.step) != 0


def names_of_states(optimizer: Optimizer) -> Callable[[int | str], list[str]]:
    """Tells the names of a key's states, as the formula has them."""
    names_of = [_C.KVStore.state_names(optimizer.name, x) for x in optimizer.groups]
    group_of = {key: group for key, group, *_ in optimizer.options}
    return lambda key: [*names_of[group_of.get(key, 0)]]
