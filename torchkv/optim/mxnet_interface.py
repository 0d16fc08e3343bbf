"""What MXNet's optimizers have as attributes and methods, for all of a store's."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from torchkv.optim.base import StoreOptimizer


class MXNetInterface:
    """A part of :class:`torchkv.optim.StoreOptimizer`."""

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first group, as ``lr``."""
        return cast("StoreOptimizer", self).lr

    def set_learning_rate(self, lr: float) -> None:
        """Sets the learning rate of all groups that have that of the first one.

        Raises:
            ValueError: a value that is negative, infinite or NaN. Nothing has changed.
            TypeError: a value that is not a number.
        """
        groups = cast("StoreOptimizer", self).param_groups
        before = groups[0]["lr"]
        for group in groups:
            if group["lr"] == before:
                group["lr"] = lr

    @property
    def wd(self) -> float:
        """The weight decay of the first group, its ``weight_decay``; writable.

        Raises:
            AttributeError: it is a class of torch.optim without weight decay.
        """
        group = cast("StoreOptimizer", self).param_groups[0]
        if "weight_decay" not in group:
            raise AttributeError(f"wd: {self!r} has no weight decay")
        decay: float = group["weight_decay"]
        return decay

    @wd.setter
    def wd(self, value: float) -> None:
        cast("StoreOptimizer", self).param_groups[0]["weight_decay"] = value
