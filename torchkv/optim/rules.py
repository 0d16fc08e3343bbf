"""The built-in optimizers: torch.optim's arguments and defaults.

The formulas are in ``csrc/kernels/rules.h``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

from torchkv import _C
from torchkv.optim import mxnet
from torchkv.optim.built_in import BuiltIn, on_stores
from torchkv.optim.options import GradientOptions, options_of


class SGD(BuiltIn):
    """:class:`torch.optim.SGD`, with momentum, Nesterov's and weight decay."""

    _rule = "sgd"

    def __init__(
        self,
        lr: float = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **gradient: Unpack[GradientOptions],
    ) -> None:
        """Arguments as torch's, and :class:`GradientOptions`.

        Raises:
            ValueError: an option that is out of range.
            TypeError: an unknown option, or one of the wrong type.
        """
        super().__init__(locals())


class Adam(BuiltIn):
    """:class:`torch.optim.Adam`, with AMSGrad."""

    _rule = "adam"

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **gradient: Unpack[GradientOptions],
    ) -> None:
        """Arguments as torch's, and gradient options; errors as :class:`SGD`."""
        super().__init__(locals())

    def _name(self) -> str:
        # A loaded store only knows the formula, not the class that was set.
        return "AdamW" if self.defaults["decoupled_weight_decay"] else "Adam"


class AdamW(Adam):
    """:class:`torch.optim.AdamW`: Adam with decoupled weight decay."""

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **gradient: Unpack[GradientOptions],
    ) -> None:
        """Arguments as torch's, and gradient options; errors as :class:`SGD`."""
        BuiltIn.__init__(self, {**locals(), "decoupled_weight_decay": True})


class Adagrad(BuiltIn):
    """:class:`torch.optim.Adagrad`."""

    _rule = "adagrad"

    def __init__(
        self,
        lr: float = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **gradient: Unpack[GradientOptions],
    ) -> None:
        """Arguments as torch's, and gradient options; errors as :class:`SGD`."""
        super().__init__(locals())


class RMSprop(BuiltIn):
    """:class:`torch.optim.RMSprop`, centered or not, with momentum."""

    _rule = "rmsprop"

    def __init__(
        self,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **gradient: Unpack[GradientOptions],
    ) -> None:
        """Arguments as torch's, and gradient options; errors as :class:`SGD`."""
        super().__init__(locals())


class Lion(BuiltIn):
    """Lion: the sign of an interpolated momentum.

    Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2,
    with decoupled weight decay. A complex value is treated as two real ones.
    """

    _rule = "lion"

    def __init__(
        self,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        **gradient: Unpack[GradientOptions],
    ) -> None:
        """Errors as :class:`SGD`.

        Args:
            lr: the learning rate, the size of each step of each element.
            betas: the weight of the momentum in the step, and in the new momentum.
            weight_decay: decoupled, so it is multiplied by the learning rate.
            maximize: maximize instead of minimize.
            **gradient: see :class:`GradientOptions`.
        """
        super().__init__(locals())


class LAMB(BuiltIn):
    """LAMB: Adam whose steps are scaled, key by key, by the norm of the weights.

    You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76
    minutes", 2020, algorithm 2, with the identity as scaling function. A key of the
    store is a layer. If the norm of the weights or of the step is 0, the step is not
    scaled. A complex value is treated as two real ones.
    """

    _rule = "lamb"

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        **gradient: Unpack[GradientOptions],
    ) -> None:
        """Errors as :class:`SGD`.

        Args:
            lr: the learning rate.
            betas: of the running averages of the gradient and its square.
            eps: added to the denominator.
            weight_decay: added to the step before it is scaled.
            maximize: maximize instead of minimize.
            **gradient: see :class:`GradientOptions`.
        """
        super().__init__(locals())


_CLASSES: dict[str, Callable[[], BuiltIn]] = {
    "adamw": AdamW,
    **{cls._rule: cls for cls in (SGD, Adam, Adagrad, RMSprop, Lion, LAMB)},
    **{cls._rule: cls for cls in mxnet.ALL},
}


def on_store(impl: _C.KVStore, described: tuple[Any, ...]) -> BuiltIn:
    """The object that was set on a store with this ``optimizer()``, or a new one."""
    identity, rule, numbers, _, _ = described
    optimizer = on_stores.get(identity)
    if optimizer is None:
        optimizer = _CLASSES[rule]()
        optimizer.defaults.update(options_of(optimizer.defaults, numbers[0]))
        optimizer._impl, optimizer._identity = impl.weak(), identity
        # Another thread may have made one in the meantime.
        optimizer = on_stores.setdefault(identity, optimizer)
    optimizer._follow(described)
    return optimizer


def after_load(
    impl: _C.KVStore, before: Any, extras: Sequence[Sequence[Any]]
) -> BuiltIn | None:
    """The optimizer of a store whose content was replaced, if it is needed already.

    If the loaded rule is of the same kind as the one of the ``optimizer()`` before, the
    object that was set is kept. `extras` is what schedulers had added to the groups.
    """
    described = impl.optimizer()
    if not isinstance(described, tuple):
        return None
    last = on_stores.get(before[0]) if isinstance(before, tuple) else None
    if last is not None and before[1] == described[1]:
        with last._lock:
            if last._identity == before[0]:  # no other thread has set it on a store
                last._impl, last._identity = impl.weak(), described[0]
                on_stores.pop(before[0], None)
                on_stores[described[0]] = last
    elif not extras:
        return None  # on_store makes one when needed
    optimizer = on_store(impl, described)
    optimizer._add_extras(extras)
    return optimizer
