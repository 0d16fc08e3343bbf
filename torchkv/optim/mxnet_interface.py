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
        self._set_in_groups("lr", lr)

    def _set_in_groups(self, name: str, value: float) -> None:
        """Writes an option of the first group, and of those that have the same."""
        groups = cast("StoreOptimizer", self).param_groups
        before = groups[0][name]
        for group in groups:
            if group[name] == before:
                group[name] = value

    @property
    def wd(self) -> float:
        """The weight decay of the first group, its ``weight_decay``.

        Writing it also changes the groups that have the same.

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
        self._set_in_groups("weight_decay", value)
