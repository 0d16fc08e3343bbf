"""What programs expect of a torch.optim.Optimizer that is not a matter of the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from torchkv.optim.torch_states import to_torch

if TYPE_CHECKING:
    from torchkv.optim.base import StoreOptimizer


class Push(NamedTuple):
    """What a Trainer has :meth:`TorchInterface.step` do."""

    push: Callable[[], object]


class TorchInterface(torch.optim.Optimizer):
    """A base of :class:`torchkv.optim.StoreOptimizer`: a Trainer has the gradients."""

    # Of the trainer, if it exists.
    _zero_grad: Callable[[], Callable[[bool], None] | None] | None = None

    def step(self, closure: Callable[[], float] | Push | None = None) -> None:  # type: ignore[override]
        """Not supported: pushing gradients is a step.

        :meth:`torchkv.Trainer.step` calls it, so torch's step hooks run there.

        Raises:
            RuntimeError: always.
        """
        if not isinstance(closure, Push):
            raise RuntimeError(
                "step: an optimizer on a store steps when gradients are pushed; call "
                "trainer.step(batch_size) or store.push(keys, gradients) instead"
            )
        closure.push()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As :meth:`torchkv.Trainer.zero_grad`, if a trainer has the optimizer.

        Raises:
            RuntimeError: it has none: gradients belong to the model; call
                ``model.zero_grad()``.
        """
        zero_grad = self._zero_grad and self._zero_grad()
        if zero_grad is None:
            raise RuntimeError(
                "zero_grad: an optimizer on a store has no gradients; call "
                "model.zero_grad() instead"
            )
        zero_grad(set_to_none)

    def torch_state_dict(self) -> dict[str, Any]:
        """The state as torch.optim's optimizer of the same name returns and loads it.

        That optimizer has the same groups, with parameters in the order of
        ``group["params"]``: for a trainer with one group, ``model.parameters()``.
        :meth:`load_state_dict` takes what it saves: parameters by name if it was made
        from ``model.named_parameters()``, else in that order. Options of torch's
        implementations, such as ``fused``, are left out, and so is what a store does
        with a gradient before the step, and the training loop with torch.optim:
        ``max_norm``, ``clip_value``, ``skip_nonfinite`` and ``rescale_grad``.

        Raises:
            TypeError: the optimizer is a class of torch.optim, or has MXNet's formula.
            ValueError: what torch.optim does not have: multipliers of keys, or
                accumulated gradients that wait for a step.
        """
        return to_torch("torch_state_dict", cast("StoreOptimizer", self))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch.amp.GradScaler.step() asks first."""
        raise RuntimeError(
            "GradScaler: expected the trainer, which has the gradients, but got its "
            "optimizer; call scaler.step(trainer) and, before it, "
            "scaler.unscale_(trainer)"
        )

    @property
    def state(self) -> Any:
        """The state by key, a copy, as ``state_dict()["state"]``.

        In a store of several processes all of them read it, as with ``state_dict``.
        """
        return self.state_dict()["state"]

    @state.setter
    def state(self, value: Any) -> None:
        """For torch's constructor, which sets an empty dict."""
        if value:
            raise ValueError("state: the dict cannot be replaced; call load_state_dict")
