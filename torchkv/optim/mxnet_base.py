"""What MXNet's optimizers have in common: their options, and multipliers by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torchkv.optim.built_in import BuiltIn
from torchkv.optim.groups import expect
from torchkv.optim.options import GradientOptions


class OptionsBesidesRate(GradientOptions, total=False):
    """Options of all optimizers of :mod:`torchkv.optim.mxnet`, with MXNet's names.

    They also have those of :class:`torchkv.optim.GradientOptions`.
    """

    wd: float
    """The weight decay."""
    clip_gradient: float | None
    """Clamps each element of the gradient, in some formulas after the weight decay was
    added, as in MXNet; None, or a number that is not greater than 0, for no limit."""
    param_idx2name: Mapping[Any, str] | None
    """Names of keys, for :meth:`~torchkv.optim.StoreOptimizer.set_lr_mult` and
    ``set_wd_mult``. Keys whose name ends in neither ``_weight`` nor ``_gamma`` have no
    weight decay."""
    param_dict: Mapping[Any, Any] | None
    """Objects by key whose ``lr_mult`` and ``wd_mult`` are used, as they are when the
    optimizer is made or multipliers are set."""
    multi_precision: bool
    """Ignored, since values of fp16 and bf16 always have an fp32 master."""
    sym: None
    """MXNet's symbols; only None."""


class MXNetOptions(OptionsBesidesRate, total=False):
    """:class:`OptionsBesidesRate` and the learning rate.

    Classes with another default have the rate as an argument of their own.
    """

    learning_rate: float | None
    """The learning rate; MXNet's default is 0.01, if nothing else is said."""


# Ignored as multi_precision; dense gradients update all rows.
_IGNORED = ("multi_precision", "lazy_update")


class MXNetOptimizer(BuiltIn):
    """Base class of the optimizers with MXNet's formulas."""

    # MXNet's default, and the endings of names that have weight decay.
    _learning_rate: ClassVar[float] = 0.01
    _decayed: ClassVar[tuple[str, ...]] = ("_weight", "_gamma")

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Takes the ``locals()`` at the beginning of a subclass's ``__init__``."""
        op = type(self).__name__
        given = {k: v for k, v in arguments.items() if k not in ("self", "__class__")}
        given.update(given.pop("options"))
        for name in _IGNORED:
            given.pop(name, None)
        if given.pop("sym", None) is not None:
            raise ValueError(f"{op}: expected None as sym; torchkv has no symbols")
        self._key_names = dict(_mapping(op, given, "param_idx2name"))
        self._parameters = dict(_mapping(op, given, "param_dict"))
        rate = given.pop("learning_rate", None)
        limit = given.pop("clip_gradient", None)
        if isinstance(limit, float | int) and limit <= 0:
            limit = None
        options = {
            "lr": self._learning_rate if rate is None else rate,
            "weight_decay": given.pop("wd", 0.0),
            "clip_gradient": limit,
            **{name: given.pop(name) for name in arguments if name in given},
        }
        super().__init__({**options, "gradient": given})
        if self._key_names or self._parameters:
            self.set_lr_mult({})
            self.set_wd_mult({})

    def _name(self) -> str:
        return f"mxnet.{type(self).__name__}"

    def _numbers_of(self, group: Mapping[str, Any]) -> dict[str, float]:
        # All rules of the store have this switch.
        return {**super()._numbers_of(group), "maximize": 0.0}

    def set_lr_mult(self, multipliers: Mapping[Any, float]) -> None:
        """As :meth:`torchkv.optim.StoreOptimizer.set_lr_mult`, of keys or names."""
        super().set_lr_mult(self._by_key("lr_mult", multipliers))

    def set_wd_mult(self, multipliers: Mapping[Any, float]) -> None:
        """As :meth:`torchkv.optim.StoreOptimizer.set_wd_mult`, of keys or names.

        Keys that ``param_idx2name`` has named have a multiplier of 0 unless they are
        weights.
        """
        super().set_wd_mult(self._by_key("wd_mult", multipliers))

    def __reduce__(self) -> tuple[Any, ...]:
        """As :class:`BuiltIn`'s, with the names of keys, but not `param_dict`."""
        make, arguments = super().__reduce__()
        return _with_names, (make, arguments, self._key_names)

    def _by_key(self, field: str, multipliers: Mapping[Any, float]) -> dict[Any, Any]:
        """MXNet's order: param_dict, then keys, then names."""
        expect(f"set_{field}", multipliers, Mapping, "a dict of multipliers by key")
        by_name: dict[Any, Any] = {}
        others = dict(multipliers)
        for key, name in self._key_names.items():
            if name in multipliers:
                by_name[key] = others.pop(name, multipliers[name])
            elif field == "wd_mult" and not name.endswith(self._decayed):
                by_name[key] = 0.0
        of_parameters = {
            key: getattr(parameter, field)
            for key, parameter in self._parameters.items()
        }
        return {**by_name, **others, **of_parameters}


def _with_names(
    make: Callable[..., MXNetOptimizer],
    arguments: tuple[Any, ...],
    names: dict[Any, str],
) -> MXNetOptimizer:
    optimizer = make(*arguments)
    optimizer._key_names = names
    return optimizer


def _mapping(op: str, options: dict[str, Any], name: str) -> Mapping[Any, Any]:
    value = options.pop(name, None)
    if value is None:
        return {}
    expect(op, value, Mapping, f"a dict by key as {name}")
    checked: Mapping[Any, Any] = value
    return checked
