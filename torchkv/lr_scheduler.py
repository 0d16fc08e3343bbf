"""Learning rates that depend on the number of updates, with MXNet's names.

An optimizer with MXNet's formula takes one: ``store.set_optimizer("sgd",
lr_scheduler=FactorScheduler(1000, 0.5))``. The store computes the rate at each step, on
several machines on the servers. Schedulers of :mod:`torch.optim.lr_scheduler`, which a
training loop steps, are another way: they take the store's optimizer.

The formulas are in ``csrc/update/schedule.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torchkv import _C
from torchkv.arguments import as_number

_PREFIX = "lr_scheduler"
_MODES = ("linear", "constant")


class LRScheduler:
    """Base class of the schedulers: a function of the number of updates.

    All have the arguments ``base_lr``, the first learning rate after the warm-up;
    ``warmup_steps``, the number of updates of the warm-up; ``warmup_begin_lr``, the
    rate at its beginning; and ``warmup_mode``, ``"linear"``, up to `base_lr`, or
    ``"constant"``. They raise ValueError for a number that is out of range, and
    TypeError for an argument of the wrong type.

    Objects do not change: an optimizer with a ``learning_rate`` of its own uses a copy.
    """

    _kind: ClassVar[int]
    _names: ClassVar[tuple[str, ...]]

    def __new__(cls, *args: Any, **options: Any) -> LRScheduler:
        """Refuses this class itself.

        Raises:
            TypeError: it is not one of the subclasses.
        """
        if cls is LRScheduler:
            raise TypeError(
                "LRScheduler: expected one of its subclasses, such as FactorScheduler"
            )
        return super().__new__(cls)

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Takes the ``locals()`` at the beginning of a subclass's ``__init__``."""
        op = type(self).__name__
        options = {k: v for k, v in arguments.items() if k not in ("self", "__class__")}
        mode = options.pop("warmup_mode")
        if mode not in _MODES:
            raise ValueError(
                f"{op}: expected 'linear' or 'constant' as warmup_mode, but got "
                f"{mode!r}"
            )
        options["warmup_final_lr"] = options["base_lr"]
        numbers = {name: as_number(op, name, x) for name, x in options.items()}
        numbers["warmup_mode"] = float(_MODES.index(mode))
        self._numbers = {f"{_PREFIX}.{name}": x for name, x in numbers.items()}
        self._numbers[_PREFIX] = float(self._kind)
        self(0)

    @property
    def base_lr(self) -> float:
        """The first learning rate, after the warm-up."""
        return self._numbers[f"{_PREFIX}.base_lr"]

    def __call__(self, num_update: int) -> float:
        """The learning rate of the update with this number, from 0."""
        if num_update < 0:
            raise ValueError(
                f"{type(self).__name__}: expected a num_update of at least 0, but got "
                f"{num_update}"
            )
        return _C.KVStore.scheduled_rate(type(self).__name__, self._numbers, num_update)

    def _starting_at(self, rate: float) -> LRScheduler:
        """One with another rate, where MXNet's optimizers change it."""
        return self

    def __eq__(self, other: object) -> bool:
        """Whether it is the same function."""
        return isinstance(other, LRScheduler) and self._numbers == other._numbers

    def __hash__(self) -> int:
        """Of equal schedulers the same."""
        return hash(tuple(sorted(self._numbers.items())))

    def __repr__(self) -> str:
        """``FactorScheduler(step=1000, factor=0.5, base_lr=0.1)``, for example."""
        numbers = self._numbers
        shown = {name: numbers[f"{_PREFIX}.{name}"] for name in self._names}
        return f"{type(self).__name__}({_listed(shown, self.base_lr)})"


def _listed(options: Mapping[str, Any], base_lr: float) -> str:
    return ", ".join(f"{k}={v!r}" for k, v in {**options, "base_lr": base_lr}.items())


class _Factors(LRScheduler):
    def _starting_at(self, rate: float) -> LRScheduler:
        copy = object.__new__(type(self))
        copy._numbers = {**self._numbers, f"{_PREFIX}.base_lr": rate}
        return copy


class FactorScheduler(_Factors):
    """Multiplies the rate by `factor` after each `step` updates."""

    _kind = 1
    _names = ("step", "factor", "stop_factor_lr")

    def __init__(
        self,
        step: int,
        factor: float = 1,
        stop_factor_lr: float = 1e-8,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        """As :class:`LRScheduler`.

        `step` is the number of updates between two changes, `factor` is at most 1, and
        `stop_factor_lr` is the least rate that it is changed to.
        """
        super().__init__(locals())


class MultiFactorScheduler(_Factors):
    """Multiplies the rate by `factor` after each of the updates of `step`."""

    _kind = 2
    _names = ("factor",)

    def __init__(
        self,
        step: Sequence[int],
        factor: float = 1,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        """As :class:`LRScheduler`.

        `step` are numbers of updates in ascending order, and `factor` is at most 1.
        """
        options = dict(locals())
        del options["step"]
        if not isinstance(step, list | tuple) or not step:
            raise TypeError(
                "MultiFactorScheduler: expected a list of at least one number as step, "
                f"but got {step!r}"
            )
        options |= {f"step.{i}": number for i, number in enumerate(step)}
        super().__init__(options)


class PolyScheduler(LRScheduler):
    """Goes down to `final_lr` at `max_update`, as a power of what is left."""

    _kind = 3
    _names = ("max_update", "pwr", "final_lr")

    def __init__(
        self,
        max_update: int,
        base_lr: float = 0.01,
        pwr: float = 2,
        final_lr: float = 0,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        """As :class:`LRScheduler`.

        `max_update` is the update from which the rate is `final_lr`, greater than
        `warmup_steps`, and `pwr` is the power. The ``learning_rate`` of an optimizer
        does not change `base_lr`, as in MXNet.
        """
        super().__init__(locals())


class CosineScheduler(LRScheduler):
    """Goes down to `final_lr` at `max_update` as half a period of the cosine."""

    _kind = 4
    _names = ("max_update", "final_lr")

    def __init__(
        self,
        max_update: int,
        base_lr: float = 0.01,
        final_lr: float = 0,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        """Arguments as :class:`PolyScheduler`'s."""
        super().__init__(locals())


_CLASSES = (FactorScheduler, MultiFactorScheduler, PolyScheduler, CosineScheduler)


def is_name(name: str) -> bool:
    """Whether it is a name of one of a schedule's numbers."""
    return name.startswith(_PREFIX)


def from_numbers(numbers: Mapping[str, float]) -> LRScheduler | None:
    """The scheduler with these numbers; None if there are none. They are checked."""
    if not numbers:
        return None
    _C.KVStore.scheduled_rate("lr_scheduler", dict(numbers), 0)
    scheduler = object.__new__(_CLASSES[int(numbers[_PREFIX]) - 1])
    scheduler._numbers = dict(numbers)
    return scheduler


__all__ = ["LRScheduler", *(cls.__name__ for cls in _CLASSES)]
