"""Groups of keys whose options can be written, and the checks of their contents.

A write to an option (``param_groups[0]["lr"] = 0.1``) is checked and applied to the
store before the group itself changes, so a rejected write changes nothing.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import (
    Callable,
    Collection,
    ItemsView,
    Iterator,
    Mapping,
    Sequence,
    ValuesView,
)
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from torchkv import _C
from torchkv.arguments import (
    StoreKey,
    as_keys,
    as_number,
    expect,
    near,
    shown,
)
from torchkv.parameter_names import with_keys

if TYPE_CHECKING:
    from torchkv.optim.base import StoreOptimizer

# Items of a group that are not options. "params" exists for code that reads it: the
# parameters are the store's values, so it lists their keys. Stored as an empty list.
RESERVED = ("keys", "params")


def as_multipliers(op: str, multipliers: Mapping[Any, float]) -> dict[StoreKey, float]:
    """Multipliers by key; ValueError if one is negative, infinite or NaN."""
    expect(op, multipliers, Mapping, "a dict of multipliers by key")
    result: dict[StoreKey, float] = {}
    for name, value in multipliers.items():
        key = _C.KVStore.key_of(op, name)
        result[key] = as_number(op, "multiplier", value)
        if not (math.isfinite(result[key]) and result[key] >= 0):
            raise ValueError(
                f"{op}: expected a finite multiplier of at least 0, but got "
                f"{value!r} (key {shown(key)})"
            )
    return result


def as_group(
    op: str, group: Any, first: Mapping[str, Any], options: Collection[str]
) -> dict[str, Any]:
    """A group as given by a caller; its missing options are those of `first`."""
    expect(op, group, Mapping, "a dict as group")
    keys = as_keys(op, group.get("keys", []))
    if not keys:
        raise ValueError(f"{op}: missing 'keys' in a group")
    for name in group:
        if name not in options and name != "keys":
            raise ValueError(
                f"{op}: unknown option {name!r}; expected one of {', '.join(options)}"
                f"{near(str(name), options)}"
            )
    defaults = {name: first[name] for name in options}
    return {**defaults, **group, "keys": keys, "params": []}


class Settings(NamedTuple):
    """The options of an optimizer's keys: groups, and multipliers by key.

    The first group, whose ``"keys"`` is None, has all keys that are in no other.
    """

    groups: Sequence[dict[str, Any]]
    lr_mult: Mapping[StoreKey, float]
    wd_mult: Mapping[StoreKey, float]

    def group_of(self) -> dict[StoreKey, int]:
        """The index of each key's group, for keys that are not in the first group."""
        return {
            key: i for i, group in enumerate(self.groups) for key in group["keys"] or ()
        }

    def renamed(self, op: str, find: Callable[[StoreKey], StoreKey]) -> Settings:
        """With other keys; ValueError if two multipliers would be of one key."""
        groups = [
            {**group, "keys": group["keys"] and [*map(find, group["keys"])]}
            for group in self.groups
        ]
        lr_mult, wd_mult = (
            with_keys(op, multipliers, find)
            for multipliers in (self.lr_mult, self.wd_mult)
        )
        return Settings(groups, lr_mult, wd_mult)

    def check(self, op: str, impl: _C.KVStore | None) -> None:
        """ValueError for a key in two groups, TypeError for a kind the store lacks."""
        keys = [key for group in self.groups for key in group["keys"] or ()]
        if len(set(keys)) != len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"{op}: key in more than one group (key {shown(twice)})")
        if impl is not None:
            for key in self.names():
                try:
                    impl.contains(key)
                except TypeError as error:
                    text = str(error).replace("in: ", f"{op}: ", 1)
                    raise TypeError(text) from None

    def names(self) -> list[StoreKey]:
        """The keys that have their own options."""
        return list({**self.group_of(), **self.lr_mult, **self.wd_mult})


class Groups(list["Group"]):
    """``param_groups``: a list that only the optimizer's methods change."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(
            "param_groups: the list cannot be modified; call set_param_groups or "
            "add_param_group"
        )

    append = clear = extend = insert = pop = remove = reverse = sort = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def assign(
        self, optimizer: StoreOptimizer, groups: Sequence[dict[str, Any]]
    ) -> None:
        """Makes these the groups of an optimizer, with unchecked contents.

        In place: programs keep references to ``param_groups`` and its first group.
        """
        super().__delitem__(slice(len(groups), None))
        for i, group in enumerate(groups):
            if i == len(self):
                super().append(Group(optimizer, group))
            elif i == 0:
                dict.clear(self[0])
                dict.update(self[0], group)
            elif self[i].stored() != group:
                super().__setitem__(i, Group(optimizer, group))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles as a plain list."""
        return list, (list(self),)


class Group(dict[str, Any]):
    """One of ``param_groups``: a dict with the options of its keys.

    Writing an option takes effect at the next push; an invalid value is a ValueError or
    TypeError, and nothing has changed. Other items, such as a scheduler's
    ``initial_lr``, are kept as well. ``"keys"`` is the list of its keys, or None in the
    first group, which has all other keys. ``group["params"]`` lists the keys in every
    group; in the first those that the store has now, or its trainer will give it.
    """

    def __init__(self, optimizer: StoreOptimizer, items: Mapping[str, Any]) -> None:
        """Makes a group of `items`, which are already checked."""
        super().__init__(items)
        # Weak: a cycle would keep a store's memory until a garbage collection.
        self._optimizer = weakref.ref(optimizer)

    def __getitem__(self, name: str) -> Any:
        """An item; a new list if it is ``"params"``."""
        item = super().__getitem__(name)
        if name != "params":
            return item
        keys, optimizer = super().__getitem__("keys"), self._optimizer()
        if keys is None and optimizer is not None:
            return optimizer._keys_of_first_group()
        return list(keys or ())

    def get(self, name: str, default: Any = None) -> Any:
        """An item, or `default` if it is missing."""
        return self[name] if name in self else default

    def __iter__(self) -> Iterator[str]:
        """The names; because of this method, ``dict(group)`` asks for each item."""
        return super().__iter__()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """All items as of now."""
        return dict(self).items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """The values of :meth:`items`."""
        return dict(self).values()

    def copy(self) -> dict[str, Any]:
        """A plain dict of :meth:`items`."""
        return dict(self)

    def __or__(self, other: Any) -> dict[str, Any]:  # type: ignore[override]
        """A plain dict with the items of both."""
        return dict(self).__or__(other)

    def __eq__(self, other: object) -> bool:
        """Whether a group has the same keys and options, or a dict the same items."""
        if isinstance(other, Group):
            return self.stored() == other.stored()
        return dict(self) == other

    def __ne__(self, other: object) -> bool:
        """Not ``==``; a dict's own would compare what is stored."""
        return not self == other

    def __repr__(self) -> str:
        """As a dict, with the keys as ``"params"``."""
        return repr(dict(self))

    def stored(self) -> dict[str, Any]:
        """A plain dict of the items as they are stored, without asking for keys."""
        return {name: super(Group, self).__getitem__(name) for name in self}

    def _write(self, changes: Mapping[str, Any]) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            dict.update(self, changes)
        else:
            optimizer._change(self, changes)

    def __setitem__(self, name: str, value: Any) -> None:
        """Sets one option."""
        self._write({name: value})

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Sets several options at once."""
        self._write(dict(*args, **kwargs))

    def __ior__(self, other: Any) -> Group:  # type: ignore[override]
        """Sets several options at once."""
        self._write(dict(other))
        return self

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Returns an item, which is set to `default` first if it is missing."""
        if name not in self:
            self._write({name: default})
        return self[name]

    def is_extra(self, name: str) -> bool:
        """Whether an item is one that others, such as schedulers, have added."""
        optimizer = self._optimizer()
        return name not in RESERVED and (
            optimizer is None or name not in optimizer.defaults
        )

    def _check_extra(self, name: str) -> None:
        if not self.is_extra(name):
            raise ValueError(f"param_groups: option {name!r} cannot be removed")

    def __delitem__(self, name: str) -> None:
        """Removes an item that is not an option."""
        self._check_extra(name)
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        """Removes an item that is not an option."""
        self._check_extra(name)
        return super().pop(name, *default)

    def popitem(self) -> NoReturn:
        """Not supported: it could remove an option."""
        raise ValueError("param_groups: popitem() could remove an option")

    def clear(self) -> NoReturn:
        """Not supported: it would remove all options."""
        raise ValueError("param_groups: clear() would remove options")

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles as a plain dict."""
        return dict, (dict(self),)
