"""Copies of a module on several devices, for data-parallel training in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor, nn

Device: TypeAlias = torch.device | str | int


class Replicas(Sequence[nn.Module]):
    """A module on several devices: a list of modules, the replicas.

    ::

        replicas = torchkv.replicate(model, ["cuda:0", "cuda:1"])
        trainer = torchkv.Trainer(replicas, "adamw", {"learning_rate": 1e-3})
        for images, labels in loader:
            F.cross_entropy(replicas(images), labels.to(replicas.devices[0])).backward()
            trainer.step()

    Different devices work at the same time, each in a thread of its own; replicas on
    one device, one after the other, so that random numbers (dropout) are drawn in the
    same order every time.

    Parameters are kept equal by :class:`torchkv.Trainer`. Buffers are not: each
    replica's BatchNorm counts its own shards, and the first replica's buffers, which
    are the module's, are those that :meth:`state_dict` has.
    """

    def __init__(self, modules: Sequence[nn.Module], devices: Sequence[Device]) -> None:
        """Holds modules that are on `devices` already; see :func:`replicate`."""
        self._modules = list(modules)
        self._devices = [torch.device(device) for device in devices]

    @property
    def devices(self) -> list[torch.device]:
        """Where the replicas are, one device each."""
        return list(self._devices)

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[nn.Module]: ...
    def __getitem__(self, index: int | slice) -> nn.Module | Sequence[nn.Module]:
        """A replica; the first is the module that was replicated."""
        return self._modules[index]

    def __len__(self) -> int:
        """The number of replicas."""
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        """The replicas, in order."""
        return iter(self._modules)

    # -- data

    def scatter(self, *inputs: Any) -> list[tuple[Any, ...]]:
        """Cuts tensors along dimension 0, into a shard for each replica's device.

        Shards differ by one row at most, and may have none. What is no tensor goes to
        each replica as it is. Autograd knows of it all.

        Returns:
            For each replica its shards of the inputs.

        Raises:
            ValueError: a tensor without dimensions, or tensors of different length.
        """
        lengths = set()
        for x in inputs:
            if isinstance(x, Tensor):
                if x.dim() == 0:
                    raise ValueError(
                        "scatter: expected tensors with a dimension to cut, but got "
                        "one of shape []"
                    )
                lengths.add(len(x))
        if len(lengths) > 1:
            raise ValueError(
                "scatter: expected tensors of one length, but got "
                f"{', '.join(map(str, sorted(lengths)))}"
            )
        count = len(self)
        columns = [
            [
                shard.to(device, non_blocking=True)
                for shard, device in zip(
                    x.tensor_split(count), self._devices, strict=True
                )
            ]
            if isinstance(x, Tensor)
            else [x] * count
            for x in inputs
        ]
        return [tuple(column[i] for column in columns) for i in range(count)]

    def gather(self, outputs: Sequence[Tensor]) -> Tensor:
        """Joins tensors along dimension 0, on the first replica's device.

        Tensors without dimensions (losses) become a vector. Autograd knows of it.

        Raises:
            ValueError: no tensors.
            TypeError: something else than tensors.
        """
        if not outputs:
            raise ValueError("gather: expected at least one tensor, but got none")
        for output in outputs:
            if not isinstance(output, Tensor):
                raise TypeError(
                    f"gather: expected tensors, but got {type(output).__name__}"
                )
        device = self._devices[0]
        moved = [output.to(device) for output in outputs]
        if all(output.dim() == 0 for output in moved):
            return torch.stack(moved)
        return torch.cat(moved)

    # -- work

    def __call__(self, *inputs: Any) -> Tensor:
        """Runs each replica on its shard of a batch, and joins the outputs.

        So one ``backward`` of a loss of the output leaves gradients in all replicas.

        Args:
            *inputs: as in :meth:`scatter`.

        Raises:
            Exception: what a module raises.
        """
        return self.gather(self._run(lambda module, *shard: module(*shard), inputs))

    def backward(self, loss: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Computes and differentiates each replica's loss on its shard of a batch.

        The gradients stay in the replicas, for :meth:`torchkv.Trainer.step`, which adds
        them up. So for the gradients of the whole batch's mean, sum in `loss` and
        divide in ``step(batch_size)``::

            def loss(model, images, labels):
                return F.cross_entropy(model(images), labels, reduction="sum")

            losses = replicas.backward(loss, images, labels)
            trainer.step(len(images))

        Args:
            loss: called as ``loss(replica, *shards)``; returns one number.
            *inputs: as in :meth:`scatter`.

        Returns:
            The losses, one per replica that had a row, without gradients, on the first
            replica's device.

        Raises:
            Exception: what `loss` or its ``backward`` raises. Some replicas may have
                gradients by then.
        """

        def work(module: nn.Module, *shard: Any) -> Tensor:
            value = loss(module, *shard)
            value.backward()  # type: ignore[no-untyped-call]
            return value.detach()

        return self.gather(self._run(work, inputs))

    def _run(
        self, function: Callable[..., Tensor], inputs: Sequence[Any]
    ) -> list[Tensor]:
        shards = self.scatter(*inputs)
        by_device: dict[torch.device, list[int]] = {}
        for i, shard in enumerate(shards):
            if i > 0 and any(isinstance(x, Tensor) and len(x) == 0 for x in shard):
                _leave_zeros(self._modules[i])
            else:
                by_device.setdefault(self._devices[i], []).append(i)

        def run_all(places: list[int]) -> list[Tensor]:
            return [function(self._modules[i], *shards[i]) for i in places]

        if len(by_device) == 1:
            (places,) = by_device.values()
            return run_all(places)
        modes = _Modes()
        with ThreadPoolExecutor(len(by_device)) as pool:
            futures = {
                pool.submit(modes.run, device, run_all, places): places
                for device, places in by_device.items()
            }
        outputs = {
            i: output
            for future, places in futures.items()
            for i, output in zip(places, future.result(), strict=True)
        }
        return [outputs[i] for i in sorted(outputs)]

    # -- as of one module

    def train(self, mode: bool = True) -> Replicas:
        """Sets all replicas to training, or with False to evaluation."""
        for module in self._modules:
            module.train(mode)
        return self

    def eval(self) -> Replicas:
        """Sets all replicas to evaluation."""
        return self.train(False)

    def state_dict(self) -> dict[str, Any]:
        """The first replica's state, that is, the module's."""
        return self._modules[0].state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a module's state into all replicas.

        Raises:
            RuntimeError: a state that does not fit the module.
        """
        for module in self._modules:
            module.load_state_dict(state_dict)

    def __repr__(self) -> str:
        """``Replicas(Sequential, devices=['cuda:0', 'cuda:1'])``."""
        names = [str(device) for device in self._devices]
        return f"Replicas({type(self._modules[0]).__name__}, devices={names})"


def replicate(module: nn.Module, devices: Sequence[Device] | None = None) -> Replicas:
    """Puts a module on several devices.

    Args:
        module: moved to the first device; it is the first replica. The others are deep
            copies, so that all start with the same values.
        devices: one for each replica; one may stand several times, as in
            ``["cpu", "cpu"]``. None: all GPUs or, where there are none, the CPU once.

    Raises:
        ValueError: no devices.
        TypeError: something else than a module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"replicate: expected a module, but got {type(module).__name__}"
        )
    if devices is None:
        count = torch.cuda.device_count()
        devices = [torch.device("cuda", i) for i in range(count)] or ["cpu"]
    if isinstance(devices, str | int | torch.device):
        devices = [devices]
    if not devices:
        raise ValueError("replicate: expected at least one device, but got none")
    first, *others = devices
    copies = [copy.deepcopy(module).to(device) for device in others]
    return Replicas([module.to(first), *copies], devices)


class _Modes:
    """What torch keeps per thread, from the caller's thread."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        ]
        self._cache = torch.is_autocast_cache_enabled()

    def run(
        self,
        device: torch.device,
        function: Callable[[list[int]], list[Tensor]],
        places: list[int],
    ) -> list[Tensor]:
        """Calls a function as the caller's thread would."""
        (cpu, cpu_on, cpu_dtype), (cuda, cuda_on, cuda_dtype) = self._autocast
        index = device.index if device.type == "cuda" else None
        with (
            torch.set_grad_enabled(self._grad),
            torch.autocast(cpu, cpu_dtype, cpu_on, self._cache),
            torch.cuda.device(-1 if index is None else index),
        ):
            if not cuda_on:
                return function(places)
            with torch.autocast(cuda, cuda_dtype, cuda_on, self._cache):
                return function(places)


def _leave_zeros(module: nn.Module) -> None:
    """Gradients of no rows, where the trainer expects some."""
    if torch.is_grad_enabled():
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
