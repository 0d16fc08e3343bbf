"""A built-in optimizer as part of a store's content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchkv import _C
from torchkv.optim.built_in import on_stores
from torchkv.state.form import KEY_TYPES, check_distinct, parse

_FORM = {
    "name": str,
    "groups": [{str: float}],
    "gradient": {str: float},
    "options": [(int | str, int, float, float)],
    "extras": [(int, str, float)],
}


@dataclass
class Optimizer:
    """The numbers of an optimizer, without its state of keys."""

    name: str
    groups: list[dict[str, float]]
    gradient: dict[str, float]
    options: dict[int | str, tuple[int, float, float]]  # group, lr_mult, wd_mult
    extras: list[dict[str, float]]  # by group: what schedulers have added

    def as_dict(self) -> dict[str, Any]:
        """The form of the manifest and of ``state_dict()``."""
        return {
            "name": self.name,
            "groups": self.groups,
            "gradient": self.gradient,
            # Lists: of a dict, torch.distributed.checkpoint loads only the names that
            # the store already has.
            "options": [[key, *options] for key, options in self.options.items()],
            "extras": [
                [i, name, number]
                for i, group in enumerate(self.extras)
                for name, number in group.items()
            ],
        }

    @staticmethod
    def from_dict(saved: object, kind: str) -> Optimizer | None:
        """What :meth:`as_dict` returned, or None; ValueError for anything else."""
        if saved is None:
            return None
        fields = parse(saved, _FORM, "'optimizer'")
        name, groups = fields["name"], fields["groups"]
        if name == "adam" and groups and groups[0].get("decoupled"):
            name = "adamw"  # which at first had no separate name
        check_distinct([key for key, *_ in fields["options"]], "options of the key")
        options = {key: tuple(rest) for key, *rest in fields["options"]}
        # A store that has had no keys may have options of keys to come.
        types = {KEY_TYPES[kind]} if kind else {type(key) for key in options}
        if len(types) > 1 or not all(type(key) in types for key in options):
            raise ValueError(
                f"load: expected {kind or 'one kind of'} keys in 'options'"
            )
        extras: list[dict[str, float]] = [{} for _ in groups]
        for group, text, number in fields["extras"]:
            if not 0 <= group < len(groups):
                raise ValueError(
                    f"load: expected a group less than {len(groups)}, but got {group}"
                )
            extras[group][text] = number
        return Optimizer(name, groups, fields["gradient"], options, extras)

    def state_names(self, key: int | str) -> list[str]:
        """The names of the tensors that the optimizer keeps for a key."""
        group = self.options.get(key, (0,))[0]
        return _C.KVStore.state_names(self.name, self.groups[group])


def extras_of(impl: _C.KVStore) -> list[dict[str, float]]:
    """The numbers that schedulers have added to the optimizer's groups, by group."""
    described = impl.optimizer()
    found = on_stores.get(described[0]) if isinstance(described, tuple) else None
    return [] if found is None else [_numbers_of(group) for group in found._extras()]


def _numbers_of(group: Mapping[Any, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in group.items()
        # JSON has neither an infinity nor NaN.
        if isinstance(name, str)
        and type(value) in (int, float)
        and -(2**53) < value < 2**53
    }
