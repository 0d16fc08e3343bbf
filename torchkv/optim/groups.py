"""Groups of keys whose writes reach the store, and what goes into them.

A write to an option (``param_groups[0]["lr"] = 0.1``) is checked and handed to the
store before it stands in the group, so a refused one has changed nothing.
"""

from __future__ import annotations

import itertools
import math
import numbers
import reprlib
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import torch

from torchkv import _C

if TYPE_CHECKING:
    from torchkv.optim.base import StoreOptimizer

StoreKey: TypeAlias = int | str
"""A key as the store gives it back."""

# Of a group, and no option: which keys it holds. Torch's word is there for code
# that looks for it; the parameters are the store's values.
PLACES = ("keys", "params")


def near(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'lr'?"`` where a known name is near, else nothing."""
    return _C.did_you_mean(name.encode(errors="replace").decode(), list(known))


_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxlong = _shortened.maxother = 200


def shown(key: Any) -> str:
    """A key as messages show it: its repr, shortened above 200 characters."""
    return _shortened.repr(key)


def listed(keys: Iterable[Any], count: int = 5) -> str:
    """The first keys as messages show them."""
    keys = list(itertools.islice(keys, count + 1))
    return ", ".join(map(shown, keys[:count])) + (", ..." * (len(keys) > count))


def as_key(op: str, key: Any) -> StoreKey:
    """A key as the store gives it back; errors as of its methods."""
    return _C.KVStore.key_of(op, key)


def as_keys(op: str, keys: Any) -> list[StoreKey]:
    """One key, or a list or tuple of them, as a list."""
    if isinstance(keys, list | tuple):
        return [as_key(op, key) for key in keys]
    return [as_key(op, keys)]


def as_number(op: str, name: str, value: Any) -> float:
    """A real number; TypeError for anything else, a tensor too."""
    if isinstance(value, torch.Tensor):
        raise TypeError(
            f"{op}: expected a number as {name}, but got a tensor, which a store's "
            f"optimizer does not take; hand over float({name})"
        )
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{op}: expected a number as {name}, but got {type(value).__name__}"
        )
    return as_float(op, name, value)


def as_float(op: str, name: str, value: float | numbers.Real) -> float:
    """A number as fp64; ValueError where it is larger."""
    try:
        return float(value)
    except OverflowError:
        raise ValueError(
            f"{op}: expected {name} to be a number of fp64, but got a larger one"
        ) from None


def as_multipliers(op: str, multipliers: Mapping[Any, float]) -> dict[StoreKey, float]:
    """Factors by key; ValueError for one that is negative, infinite or NaN."""
    if not isinstance(multipliers, Mapping):
        raise TypeError(
            f"{op}: expected a dict of multipliers by key, but got "
            f"{type(multipliers).__name__}"
        )
    result: dict[StoreKey, float] = {}
    for name, value in multipliers.items():
        key = as_key(op, name)
        result[key] = as_number(op, "multiplier", value)
        if not (math.isfinite(result[key]) and result[key] >= 0):
            raise ValueError(
                f"{op}: expected a multiplier of at least 0 that is finite, but got "
                f"{value!r} (key {shown(key)})"
            )
    return result


class Settings(NamedTuple):
    """What an optimizer's keys have as options: groups, and factors by key.

    All keys that are in no other group are in the first one, whose ``"keys"`` is None.
    """

    groups: Sequence[dict[str, Any]]
    lr_mult: Mapping[StoreKey, float]
    wd_mult: Mapping[StoreKey, float]

    def group_of(self) -> dict[StoreKey, int]:
        """The groups of the keys that are not in the first one."""
        return {
            key: i for i, group in enumerate(self.groups) for key in group["keys"] or ()
        }

    def check_distinct(self, op: str) -> None:
        """ValueError where a key is in two groups."""
        keys = [key for group in self.groups for key in group["keys"] or ()]
        if len(set(keys)) != len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(
                f"{op}: expected each key in one group, but got one twice "
                f"(key {shown(twice)})"
            )

    def names(self) -> list[StoreKey]:
        """The keys that have options of their own."""
        return list({**self.group_of(), **self.lr_mult, **self.wd_mult})

    def check_kind(self, impl: _C.KVStore) -> None:
        """TypeError where a key is of the kind that a store does not take."""
        for key in self.names():
            impl.contains(key)


class Groups(list["Group"]):
    """``param_groups``: a list that only methods of the optimizer make longer."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(
            "param_groups: expected set_param_groups or add_param_group to change "
            "which groups there are, but got a change of the list itself"
        )

    append = clear = extend = insert = pop = remove = reverse = sort = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def replace(self, begin: int, end: int, groups: Iterable[Group]) -> None:
        """Replaces the groups [begin, end), for the optimizer."""
        super().__setitem__(slice(begin, end), groups)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled as a plain list."""
        return list, (list(self),)


class Group(dict[str, Any]):
    """One of ``param_groups``: a dict whose options are those of its keys.

    A write to an option takes effect at the next push; ValueError or TypeError where
    it makes no sense, and then nothing has changed. Other names, such as a
    scheduler's ``initial_lr``, are kept beside. ``"keys"`` is the list of its keys,
    or None in the first group, which all other keys belong to.
    """

    def __init__(self, optimizer: StoreOptimizer, items: Mapping[str, Any]) -> None:
        """Makes a group of `items`, which are checked already."""
        super().__init__(items)
        # Weak: a cycle would keep a store's memory until a garbage collection.
        self._optimizer = weakref.ref(optimizer)

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

    def __ior__(self, other: Any) -> Group:  # type: ignore[override,misc]
        """Sets several options at once."""
        self._write(dict(other))
        return self

    def setdefault(self, name: str, default: Any = None) -> Any:
        """The value of a name, which is set where it is missing."""
        if name not in self:
            self._write({name: default})
        return self[name]

    def _check_extra(self, name: str) -> None:
        optimizer = self._optimizer()
        if name in PLACES or (optimizer is not None and name in optimizer.defaults):
            raise ValueError(
                f"param_groups: expected an option to stay, but {name!r} was taken out"
            )

    def __delitem__(self, name: str) -> None:
        """Takes out what is no option."""
        self._check_extra(name)
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        """Takes out what is no option."""
        self._check_extra(name)
        return super().pop(name, *default)

    def popitem(self) -> NoReturn:
        """Refused: it might take out an option."""
        raise ValueError("param_groups: expected options to stay, but got popitem()")

    def clear(self) -> NoReturn:
        """Refused: it would take out all options."""
        raise ValueError("param_groups: expected options to stay, but got clear()")

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        """A plain dict."""
        return dict(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as a plain dict."""
        return dict, (dict(self),)
