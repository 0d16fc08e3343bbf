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

        :meth:`torchkv.Trainer.step` calls it, so torch's step hooks run there: one that
        runs before the step may change or replace gradients.

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

    def state_dict(self) -> dict[str, Any]:
        """Returns a snapshot of options and state, of tensors, numbers and strings.

        ``torch.load(weights_only=True)`` reads what ``torch.save`` writes of it, and
        the optimizer is a ``Stateful`` of ``torch.distributed.checkpoint``.

        Returns:
            A dict with ``"optimizer"``, the name; ``"param_groups"``; ``"lr_mult"`` and
            ``"wd_mult"``, pairs of key and multiplier; for built-in optimizers
            ``"gradient"``, the gradient options; and ``"state"``, by key: the number of
            steps, and tensors of the stored value's shape under torch.optim's names.
            They share no memory with the store. If no store is set, the state is empty.
            It includes what the first step of a key would create, as a distributed
            checkpoint looks up there what to load. For classes of torch.optim,
            ``"state_names"`` has pairs of a key that has made a step and its states'
            names. torch's hooks run as for an optimizer of torch.optim.

        Raises:
            RuntimeError: its store was freed, and the state with it.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state_dict = cast("StoreOptimizer", self)._saved()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Loads what :meth:`state_dict` returned. Stored values do not change.

        Args:
            state_dict: of an optimizer of the same name, only read during the call; or
                of torch.optim's, as :meth:`torch_state_dict`.
            strict: whether its keys must be those of the store. If False, keys that
                only one of them has are skipped.

        Raises:
            ValueError: the state of another optimizer; missing or unexpected keys; a
                state that is missing, unexpected or of the wrong shape. The message
                names the option or key. Nothing has changed.
            RuntimeError: it is not set on a store.
        """
        # Which a hook may change in place.
        if self._optimizer_load_state_dict_pre_hooks and isinstance(state_dict, dict):
            state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        cast("StoreOptimizer", self)._load_saved(state_dict, strict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def torch_state_dict(self) -> dict[str, Any]:
        """The state as torch.optim's optimizer of the same name returns and loads it.

        That optimizer has the same groups, with parameters in the order of
        ``group["params"]``: for a trainer with one group, ``model.parameters()``.
        :meth:`load_state_dict` takes what it saves: parameters by name if it was made
        from ``model.named_parameters()``, else in that order. Of a built-in optimizer,
        options of torch's implementations, such as ``fused``, are left out, and so is
        what a store does with a gradient before the step, and the training loop with
        torch.optim: ``max_norm``, ``clip_value``, ``skip_nonfinite``, ``rescale_grad``.

        Raises:
            TypeError: the optimizer has MXNet's formula.
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
        return cast("StoreOptimizer", self)._saved()["state"]

    @state.setter
    def state(self, value: Any) -> None:
        """For torch's constructor, which sets an empty dict."""
        if value:
            raise ValueError("state: the dict cannot be replaced; call load_state_dict")
