"""What MXNet's optimizers have in common: their options, and multipliers by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torchkv import lr_scheduler
from torchkv.arguments import as_number, expect
from torchkv.lr_scheduler import LRScheduler
from torchkv.optim.built_in import BuiltIn
from torchkv.optim.groups import Settings
from torchkv.optim.options import GradientOptions


class OptionsBesidesRate(GradientOptions, total=False):
    """Options of all optimizers of :mod:`torchkv.optim.mxnet`, with MXNet's names.

    They also have those of :class:`torchkv.optim.GradientOptions`.
    """

    wd: float
    """The weight decay."""
    lr_scheduler: LRScheduler | None
    """One of :mod:`torchkv.lr_scheduler`, of all keys. A ``learning_rate`` that is also
    given, or a class's default such as Adam's 0.001, replaces the scheduler's
    ``base_lr``, as in MXNet, but for Ftrl."""
    begin_num_update: int
    """The number from which updates of each key are counted, by schedulers and by
    formulas such as Adam's."""
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


class MXNetOptimizer(BuiltIn):
    """Base class of the optimizers with MXNet's formulas."""

    # The endings of names that have weight decay.
    _decayed: ClassVar[tuple[str, ...]] = ("_weight", "_gamma")
    # Whether MXNet steps the rows of a sparse gradient only.
    _is_lazy: ClassVar[bool] = False
    # Whether a rate replaces the scheduler's base_lr.
    _starts_scheduler: ClassVar[bool] = True

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Takes the ``locals()`` at the beginning of a subclass's ``__init__``."""
        op = type(self).__name__
        given = {k: v for k, v in arguments.items() if k not in ("self", "__class__")}
        given.update(given.pop("options"))
        given.pop("multi_precision", None)
        lazy_update = given.pop("lazy_update", self._is_lazy)
        if "lazy" in given and lazy_update is not self._is_lazy:
            raise ValueError(
                f"{op}: expected 'lazy' or 'lazy_update', which are the same option, "
                "but got both"
            )
        given.setdefault("lazy", lazy_update)
        if given.pop("sym", None) is not None:
            raise ValueError(f"{op}: expected None as sym; torchkv has no symbols")
        self._key_names = dict(_mapping(op, given, "param_idx2name"))
        self._parameters = dict(_mapping(op, given, "param_dict"))
        rate = given.pop("learning_rate", None)
        self._scheduler = _as_scheduler(op, given.pop("lr_scheduler", None))
        self._begin_num_update = given.pop("begin_num_update", 0)
        if self._scheduler is not None:
            if rate is not None and self._starts_scheduler:
                rate = as_number(op, "learning_rate", rate)
                self._scheduler = self._scheduler._starting_at(rate)
            rate = self._scheduler.base_lr
        limit = given.pop("clip_gradient", None)
        if isinstance(limit, float | int) and limit <= 0:
            limit = None
        options = {
            "lr": 0.01 if rate is None else rate,
            "weight_decay": given.pop("wd", 0.0),
            "clip_gradient": limit,
            **{name: given.pop(name) for name in arguments if name in given},
        }
        super().__init__({**options, "gradient": given})
        if self._key_names or self._parameters:
            self.set_lr_mult({})
            self.set_wd_mult({})

    def __setattr__(self, name: str, value: Any) -> None:
        """AttributeError for attributes of MXNet's that would change nothing here."""
        if not name.startswith("_") and not hasattr(type(self), name):
            instead = {
                "lr_mult": "call set_lr_mult",
                "wd_mult": "call set_wd_mult",
                "lazy_update": "write lazy",
            }
            if name in self.__dict__.get("defaults", ()):
                instead[name] = f"write param_groups[0][{name!r}]"
            if name in instead:
                raise AttributeError(
                    f"{self._name()}: {name!r} cannot be written; {instead[name]}"
                )
        super().__setattr__(name, value)

    def _name(self) -> str:
        return f"mxnet.{type(self).__name__}"

    def _numbers_of(self, group: Mapping[str, Any]) -> dict[str, float]:
        # All rules of the store have this switch.
        return {**super()._numbers_of(group), "maximize": 0.0}

    def _shared_numbers(self) -> dict[str, float]:
        scheduler, begin = self._scheduler, self._begin_num_update
        numbers = {} if scheduler is None else dict(scheduler._numbers)
        begin = as_number(self._name(), "begin_num_update", begin)
        return {**numbers, "begin_num_update": begin} if begin != 0 else numbers

    def _is_shared(self, name: str) -> bool:
        return lr_scheduler.is_name(name) or name == "begin_num_update"

    def _take_shared(self, numbers: Mapping[str, float]) -> None:
        of_schedule = {k: x for k, x in numbers.items() if lr_scheduler.is_name(k)}
        self._scheduler = lr_scheduler.from_numbers(of_schedule)
        self._begin_num_update = int(numbers.get("begin_num_update", 0))

    def _apply(self, settings: Settings) -> None:
        if self._scheduler is not None:
            for group in settings.groups:
                if group["lr"] != self._scheduler.base_lr:
                    raise ValueError(
                        f"{self._name()}: unexpected learning rate {group['lr']!r}, as "
                        "lr_scheduler sets it; call set_lr_mult for other rates of "
                        "some keys, or set lr_scheduler to None"
                    )
        super()._apply(settings)

    @property
    def lr_scheduler(self) -> LRScheduler | None:
        """What sets the learning rate; writing it takes effect at the next push.

        With one, the groups' ``lr`` cannot be written.

        Raises:
            TypeError: on writing anything but a scheduler of
                :mod:`torchkv.lr_scheduler` or None.
        """
        self._store()  # may take over what was loaded
        return self._scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, value: LRScheduler | None) -> None:
        with self._lock:
            settings = self._settings()
            before = self._scheduler
            self._scheduler = _as_scheduler(self._name(), value)
            try:
                if self._scheduler is not None:
                    for group in settings.groups:
                        group["lr"] = self._scheduler.base_lr
                self._apply(settings)
            except BaseException:
                self._scheduler = before
                raise
            self._keep(settings)

    @property
    def begin_num_update(self) -> int:
        """The number from which updates are counted."""
        self._store()
        return int(self._begin_num_update)

    @property
    def num_update(self) -> int:
        """How many updates the key has that has most, from ``begin_num_update``.

        In a ``dist`` store, of the keys on this rank's server: of large keys each
        server has a part.

        Raises:
            RuntimeError: its store was freed, and the state with it.
        """
        impl = self._store_with_state("num_update")
        steps = 0 if impl is None else impl.num_steps()
        # LBSGD sums so many pushes to a step.
        per_step = self.param_groups[0].get("batch_scale", 1)
        return self.begin_num_update + steps * int(per_step)

    @property
    def learning_rate(self) -> float:
        """With a scheduler, that of ``num_update``; else that of the first group.

        With a scheduler, raises as ``num_update``.
        """
        scheduler = self.lr_scheduler
        return self.lr if scheduler is None else scheduler(self.num_update)

    def set_learning_rate(self, lr: float) -> None:
        """As :meth:`torchkv.optim.StoreOptimizer.set_learning_rate`.

        Raises:
            UserWarning: there is a scheduler, as in MXNet. Nothing has changed.
        """
        if self.lr_scheduler is not None:
            raise UserWarning(
                "set_learning_rate: lr_scheduler sets the learning rate; set "
                "lr_scheduler to None first"
            )
        super().set_learning_rate(lr)

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
        others = self._key_names, self._scheduler, self._begin_num_update
        return _restored, (make, arguments, *others)

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


def _restored(
    make: Callable[..., MXNetOptimizer],
    arguments: tuple[Any, ...],
    names: dict[Any, str],
    scheduler: LRScheduler | None,
    begin_num_update: int,
) -> MXNetOptimizer:
    optimizer = make(*arguments)
    optimizer._key_names = names
    optimizer._scheduler = scheduler
    optimizer._begin_num_update = begin_num_update
    return optimizer


def _as_scheduler(op: str, value: Any) -> LRScheduler | None:
    if value is None or isinstance(value, LRScheduler):
        return value
    raise TypeError(
        f"{op}: expected a scheduler of torchkv.lr_scheduler or None as lr_scheduler, "
        f"but got {type(value).__name__}; for a function of your own, pass the store's "
        "optimizer to torch.optim.lr_scheduler.LambdaLR"
    )


def _mapping(op: str, options: dict[str, Any], name: str) -> Mapping[Any, Any]:
    value = options.pop(name, None)
    if value is None:
        return {}
    expect(op, value, Mapping, f"a dict by key as {name}")
    checked: Mapping[Any, Any] = value
    return checked
