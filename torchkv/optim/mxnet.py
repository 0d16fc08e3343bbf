"""Optimizers with the formulas, options and defaults of MXNet 1.9.1.

``store.set_optimizer("sgd", learning_rate=0.1)`` makes one by its name in MXNet, which
is that of its class in lower case. The formulas are in ``csrc/kernels/mxnet_rules.h``.

Groups of ``param_groups`` call the learning rate ``lr`` and the weight decay
``weight_decay``, as schedulers of :mod:`torch.optim.lr_scheduler` expect.
"""

from __future__ import annotations

from typing import Unpack

import torch

from torchkv.optim.mxnet_base import MXNetOptimizer, MXNetOptions, OptionsBesidesRate


class SGD(MXNetOptimizer):
    """SGD whose momentum contains the learning rate."""

    _rule = "mxnet_sgd"
    _is_lazy = True

    def __init__(
        self,
        momentum: float = 0.0,
        lazy_update: bool = True,
        **options: Unpack[MXNetOptions],
    ) -> None:
        """Arguments as MXNet's; see :class:`MXNetOptions`.

        Raises:
            ValueError: an option that is out of range.
            TypeError: an unknown option, or one of the wrong type.
        """
        super().__init__(locals())


class NAG(MXNetOptimizer):
    """Nesterov's accelerated SGD."""

    _rule = "mxnet_nag"

    def __init__(self, momentum: float = 0.0, **options: Unpack[MXNetOptions]) -> None:
        """Arguments as MXNet's; errors as :class:`SGD`."""
        super().__init__(locals())


class Signum(MXNetOptimizer):
    """Signum: the sign of the momentum; without momentum, signSGD."""

    _rule = "mxnet_signum"

    def __init__(
        self,
        learning_rate: float | None = 0.01,
        momentum: float = 0.9,
        wd_lh: float = 0.0,
        **options: Unpack[OptionsBesidesRate],
    ) -> None:
        """Arguments as MXNet's; errors as :class:`SGD`."""
        super().__init__(locals())


class Adam(MXNetOptimizer):
    """Adam, whose epsilon is not divided by the correction of the bias."""

    _rule = "mxnet_adam"
    _is_lazy = True

    def __init__(
        self,
        learning_rate: float | None = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        lazy_update: bool = True,
        **options: Unpack[OptionsBesidesRate],
    ) -> None:
        """Arguments as MXNet's; errors as :class:`SGD`."""
        super().__init__(locals())


class Adamax(MXNetOptimizer):
    """AdaMax, without an epsilon. An element without any gradient stays as it is."""

    _rule = "mxnet_adamax"

    def __init__(
        self,
        learning_rate: float | None = 0.002,
        beta1: float = 0.9,
        beta2: float = 0.999,
        **options: Unpack[OptionsBesidesRate],
    ) -> None:
        """Arguments as MXNet's; errors as :class:`SGD`."""
        super().__init__(locals())


class Nadam(MXNetOptimizer):
    """Nadam. Each key has its own schedule of the momentum; in MXNet all share one."""

    _rule = "mxnet_nadam"

    def __init__(
        self,
        learning_rate: float | None = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        schedule_decay: float = 0.004,
        **options: Unpack[OptionsBesidesRate],
    ) -> None:
        """Arguments as MXNet's; errors as :class:`SGD`."""
        super().__init__(locals())


class AdaGrad(MXNetOptimizer):
    """AdaGrad with `eps` inside of the root, and decoupled weight decay."""

    _rule = "mxnet_adagrad"
    _is_lazy = True

    def __init__(self, eps: float = 1e-7, **options: Unpack[MXNetOptions]) -> None:
        """Arguments as MXNet's; errors as :class:`SGD`."""
        super().__init__(locals())


class AdaDelta(MXNetOptimizer):
    """AdaDelta, which has no learning rate, not even for the weight decay."""

    _rule = "mxnet_adadelta"

    def __init__(
        self,
        rho: float = 0.90,
        epsilon: float = 1e-5,
        **options: Unpack[MXNetOptions],
    ) -> None:
        """Arguments as MXNet's; errors as :class:`SGD`."""
        super().__init__(locals())


class RMSProp(MXNetOptimizer):
    """RMSProp; if `centered`, with the momentum `gamma2`."""

    _rule = "mxnet_rmsprop"

    def __init__(
        self,
        learning_rate: float | None = 0.001,
        gamma1: float = 0.9,
        gamma2: float = 0.9,
        epsilon: float = 1e-8,
        centered: bool = False,
        clip_weights: float | None = None,
        **options: Unpack[OptionsBesidesRate],
    ) -> None:
        """Arguments as MXNet's; errors as :class:`SGD`."""
        clip_weights = clip_weights or None  # 0 is no limit
        super().__init__(locals())


class Ftrl(MXNetOptimizer):
    """FTRL-proximal. The first step forgets the initial value, as in MXNet."""

    _rule = "mxnet_ftrl"
    _is_lazy = True
    _starts_scheduler = False

    def __init__(
        self,
        lamda1: float = 0.01,
        learning_rate: float | None = 0.1,
        beta: float = 1,
        **options: Unpack[OptionsBesidesRate],
    ) -> None:
        """Arguments as MXNet's; errors as :class:`SGD`."""
        super().__init__(locals())


class FTML(MXNetOptimizer):
    """FTML: follow the moving leader."""

    _rule = "mxnet_ftml"

    def __init__(
        self,
        beta1: float = 0.6,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        **options: Unpack[MXNetOptions],
    ) -> None:
        """Arguments as MXNet's; errors as :class:`SGD`."""
        super().__init__(locals())


class DCASGD(MXNetOptimizer):
    """SGD with compensation of delay; a momentum works, too, unlike in MXNet."""

    _rule = "mxnet_dcasgd"

    def __init__(
        self,
        momentum: float = 0.0,
        lamda: float = 0.04,
        **options: Unpack[MXNetOptions],
    ) -> None:
        """Arguments as MXNet's; errors as :class:`SGD`."""
        super().__init__(locals())


class Test(MXNetOptimizer):
    """Adds the gradient to the weight, for tests."""

    __test__ = False  # none of pytest's
    _rule = "mxnet_test"

    def __init__(self, **options: Unpack[MXNetOptions]) -> None:
        """Arguments as MXNet's; errors as :class:`SGD`."""
        super().__init__(locals())


class LAMB(MXNetOptimizer):
    """LAMB with bounds of the weight's norm, and a switch for the bias's correction."""

    _rule = "mxnet_lamb"

    def __init__(
        self,
        learning_rate: float | None = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        lower_bound: float | None = None,
        upper_bound: float | None = None,
        bias_correction: bool = True,
        **options: Unpack[OptionsBesidesRate],
    ) -> None:
        """Arguments as MXNet's; errors as :class:`SGD`."""
        lower_bound, upper_bound = lower_bound or None, upper_bound or None
        super().__init__(locals())


class LARS(MXNetOptimizer):
    """SGD whose learning rate is scaled by the norms of weight and gradient.

    Keys that ``param_idx2name`` names ``...gamma``, ``...beta`` or ``...bias`` are not
    scaled: they are in a group with an `eta` of 0. (In MXNet, str keys are names of
    their own; here, give ``param_idx2name={key: key}``.) Keys with other names than
    ``..._weight`` have no weight decay. With `momentum_correction`, each key's momentum
    follows the learning rate; in MXNet, that of the first key of an update does.
    """

    _rule = "mxnet_lars"
    _is_lazy = True
    _decayed = ("_weight",)

    def __init__(
        self,
        momentum: float = 0.0,
        lazy_update: bool = True,
        eta: float = 0.001,
        eps: float = 0,
        momentum_correction: bool = True,
        **options: Unpack[MXNetOptions],
    ) -> None:
        """Arguments as MXNet's; errors as :class:`SGD`."""
        super().__init__(locals())
        unscaled = [
            key
            for key, name in self._key_names.items()
            if name.endswith(("gamma", "beta", "bias"))
        ]
        if unscaled:
            self.set_param_groups([{"keys": unscaled, "eta": 0.0}])


class LBSGD(MXNetOptimizer):
    """SGD for large batches: sums `batch_scale` pushes of a key to one step.

    Multiplies the learning rate by a factor that grows up to `batch_scale` in the first
    `warmup_epochs`, or, with ``warmup_strategy="lars"``, by one of the norms of weight
    and gradient.
    """

    _rule = "mxnet_lbsgd"
    _is_lazy = True

    def __init__(  # type: ignore[misc]  # multi_precision has a place of its own
        self,
        momentum: float = 0.0,
        multi_precision: bool = False,
        warmup_strategy: str = "linear",
        warmup_epochs: int = 5,
        batch_scale: int = 1,
        updates_per_epoch: int = 32,
        begin_epoch: int = 0,
        num_epochs: int = 60,
        **options: Unpack[MXNetOptions],
    ) -> None:
        """Arguments as MXNet's; errors as :class:`SGD`.

        Its groups have ``warmup_updates`` and ``begin_update``, the products of
        `warmup_epochs` and `begin_epoch` with `updates_per_epoch`.
        """
        begin_update = begin_epoch * updates_per_epoch
        if batch_scale > 0 and begin_update % batch_scale != 0:
            raise ValueError(
                "LBSGD: expected begin_epoch * updates_per_epoch to be a multiple of "
                f"batch_scale, but got {begin_update} and {batch_scale}"
            )
        options.setdefault("accumulate", batch_scale)
        arguments = {
            "momentum": momentum,
            "warmup_strategy": warmup_strategy,
            "warmup_updates": warmup_epochs * updates_per_epoch,
            "begin_update": begin_update,
            "batch_scale": batch_scale,
            "options": options,
        }
        super().__init__(arguments)


class SGLD(MXNetOptimizer):
    """Stochastic gradient Langevin dynamics: half a step, and noise.

    The noise of an element is a function of the seed, the key, the step and its place
    in the value's memory; of a row-sparse key, in that of the rows in the order in
    which they came. So training that is resumed with the same seed continues as it
    would have, and the kernels of all devices make the same noise.
    """

    _rule = "mxnet_sgld"

    def __init__(
        self, *, seed: int | None = None, **options: Unpack[MXNetOptions]
    ) -> None:
        """Arguments as MXNet's, and a seed; errors as :class:`SGD`.

        Args:
            seed: of the noise, from 0 to 2**53 - 1; by default, drawn from PyTorch's
                default generator, which ``torch.manual_seed`` seeds.
            **options: those of all.
        """
        if seed is None:
            seed = int(torch.randint(2**53, ()))
        super().__init__(locals())


class GroupAdaGrad(MXNetOptimizer):
    """AdaGrad with one history for each row; without weight decay."""

    _rule = "mxnet_groupadagrad"
    _is_lazy = True

    def __init__(self, eps: float = 1e-5, **options: Unpack[MXNetOptions]) -> None:
        """Arguments as MXNet's; errors as :class:`SGD`."""
        super().__init__(locals())


ALL: tuple[type[MXNetOptimizer], ...] = (
    SGD,
    NAG,
    Signum,
    Adam,
    Adamax,
    Nadam,
    AdaGrad,
    AdaDelta,
    RMSProp,
    Ftrl,
    FTML,
    DCASGD,
    Test,
    LAMB,
    LARS,
    LBSGD,
    SGLD,
    GroupAdaGrad,
)

__all__ = ["MXNetOptions", "OptionsBesidesRate", *(cls.__name__ for cls in ALL)]
