"""Copies of a module on several devices, for data-parallel training in one process."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeAlias, overload
from weakref import WeakSet

import torch
from torch import Tensor, nn

from torchkv.arguments import expect
from torchkv.nn.embedding import embeddings_of
from torchkv.nn.row_gradients import sparse_rows
from torchkv.trainer.parallel_apply import parallel_apply
from torchkv.trainer.scatter_gather import gather, num_rows, repeat_on, scatter

Device: TypeAlias = torch.device | str | int

# All live objects, so that a Trainer recognizes replicas among its parameters.
existing: WeakSet[Replicas] = WeakSet()


class _Call(NamedTuple):
    """The arguments of a module, with the names they have in messages."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Replicas(Sequence[nn.Module]):
    """A module on several devices: a list of modules, the replicas.

    ::

        replicas = torchkv.replicate(model, ["cuda:0", "cuda:1"])
        trainer = torchkv.Trainer(replicas, "adamw", {"learning_rate": 1e-3})
        for images, labels in loader:
            F.cross_entropy(replicas(images), labels.to(replicas.devices[0])).backward()
            trainer.step()

    Devices run in parallel, each in its own thread. Replicas on one device run one
    after the other, so that the order of random numbers (dropout) is deterministic.

    A batch may be nested: dicts, lists, tuples, named tuples and dataclasses are
    scattered tensor by tensor, and outputs are gathered in the same way. Arguments that
    are not part of the batch, such as a flag, class weights or a mask for all rows, are
    passed by name in ``repeat``::

        output = replicas(**batch, repeat={"return_dict": True})

    :class:`torchkv.Trainer` keeps parameters equal. Buffers differ: each replica's
    BatchNorm sees its own shards, and :meth:`state_dict` returns the buffers of the
    first replica.
    """

    _modules: Sequence[nn.Module] = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Registers the object, also when it is copied or unpickled."""
        self = super().__new__(cls)
        existing.add(self)
        return self

    def __init__(self, modules: Sequence[nn.Module], devices: Sequence[Device]) -> None:
        """Wraps modules that are already on `devices`; see :func:`replicate`.

        Raises:
            ValueError: a number of devices that is not that of modules, or ``meta``.
        """
        self._devices = _checked_devices("Replicas", devices, len(modules))
        self._modules = list(modules)

    @property
    def module(self) -> nn.Module:
        """The first replica, which is the module that was replicated."""
        return self._modules[0]

    @property
    def devices(self) -> list[torch.device]:
        """The device of each replica."""
        return list(self._devices)

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[nn.Module]: ...
    def __getitem__(self, index: int | slice) -> nn.Module | Sequence[nn.Module]:
        """Returns a replica; the first is the module that was replicated."""
        return self._modules[index]

    def __len__(self) -> int:
        """The number of replicas."""
        return len(self._modules)

    # -- batches

    def scatter(self, *inputs: Any) -> list[tuple[Any, ...]]:
        """Splits tensors along dimension 0 into a shard for each replica's device.

        Shards differ by at most one row and may be empty. Autograd records the split.

        Args:
            *inputs: tensors, None, and dicts, lists, tuples, named tuples and
                dataclasses of these, nested or not.

        Returns:
            The shards of each replica, nested like the inputs.

        Raises:
            ValueError: a tensor without dimensions, or tensors of different lengths.
            TypeError: an input that cannot be split.
            NotImplementedError: sparse and nested tensors.
        """
        return scatter(inputs, "inputs", self._devices)

    def gather(self, outputs: Sequence[Any]) -> Any:
        """Joins tensors along dimension 0, on the first replica's device.

        Tensors without dimensions (losses) are stacked. Autograd records it.

        Args:
            outputs: one per replica, of the same structure; see :meth:`scatter`.

        Returns:
            The joined tensors, nested like each output.

        Raises:
            ValueError: no outputs, or outputs of different structures.
            TypeError: outputs other than tensors, nested tensors and None.
        """
        return gather(outputs, self._devices[0])

    # -- forward and backward

    def __call__(
        self, *inputs: Any, repeat: Mapping[str, Any] | None = None, **keywords: Any
    ) -> Any:
        """Runs each replica on its shard of a batch, and joins the outputs.

        A single ``backward`` of a loss of the output then computes the gradients of all
        replicas.

        Args:
            *inputs: as in :meth:`scatter`.
            repeat: arguments by name that are not split: tensors are copied to each
                replica's device, anything else is passed unchanged.
            **keywords: as in :meth:`scatter`.

        Returns:
            As :meth:`gather`.

        Raises:
            Exception: what a module raises.
        """
        return self.gather(self._run(operator.call, _Call(inputs, keywords), repeat))

    def backward(
        self,
        loss: Callable[..., Tensor],
        /,
        *inputs: Any,
        repeat: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> Tensor:
        """Computes and differentiates each replica's loss on its shard of a batch.

        :meth:`torchkv.Trainer.step` sums the gradients of the replicas. So to train on
        the mean over the batch, let `loss` sum and pass the batch size to ``step``::

            def loss(model, images, labels):
                return F.cross_entropy(model(images), labels, reduction="sum")

            losses = replicas.backward(loss, images, labels)
            trainer.step(len(images))

        Args:
            loss: called as ``loss(replica, *shards, **shards)``; returns a scalar.
            *inputs: as in :meth:`scatter`.
            repeat: as in :meth:`__call__`.
            **keywords: as in :meth:`scatter`.

        Returns:
            The detached losses of the replicas that had rows, on the first replica's
            device.

        Raises:
            Exception: what `loss` or its ``backward`` raises. Some replicas may already
                have gradients.
        """

        def differentiate(module: nn.Module, /, *args: Any, **kwargs: Any) -> Tensor:
            value = loss(module, *args, **kwargs)
            value.backward()  # type: ignore[no-untyped-call]
            return value.detach()

        outputs = self._run(differentiate, _Call(inputs, keywords), repeat)
        losses: Tensor = self.gather(outputs)
        return losses

    def _run(
        self,
        function: Callable[..., Any],
        call: _Call,
        repeat: Mapping[str, Any] | None,
    ) -> list[Any]:
        for name in call.kwargs:
            if repeat is not None and name in repeat:
                raise TypeError(
                    f"repeat: unexpected {name!r}, which is also in the batch"
                )
        shards = scatter(call, "", self._devices)
        more = repeat_on(repeat, self._devices)
        # The first replicas get the rows; without any, the first one runs.
        rows = num_rows(call, "")
        count = len(self) if rows is None else min(len(self), max(rows, 1))
        for module in self._modules[count:]:
            _zero_missing_gradients(module)

        def run(i: int) -> Any:
            args, kwargs = shards[i]
            return function(self._modules[i], *args, **kwargs, **more[i])

        return parallel_apply(run, self._devices[:count])

    # -- methods of a module

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        return self.module.training

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters of the first replica.

        A :class:`torchkv.Trainer` copies them to the other replicas. Pass it the
        replicas, not these parameters, as it sums the gradients of all replicas.
        """
        return self.module.parameters(recurse)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the first replica, with their names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets the gradients of all replicas to None, or else fills them with zeros."""
        for module in self._modules:
            module.zero_grad(set_to_none)
            for embedding in embeddings_of(module):
                embedding.zero_grad(set_to_none)

    def to(self, *args: Any, **kwargs: Any) -> Replicas:
        """Moves and casts all replicas, in place, as :meth:`torch.nn.Module.to`.

        Args:
            *args: as ``Module.to``. The device may be a list with one per replica; a
                single one is for all replicas.
            **kwargs: as ``Module.to``.

        Raises:
            ValueError: a number of devices that is not that of replicas, or ``meta``.
        """
        if args:
            like, *others = args
        else:
            like, others = kwargs.pop("tensor", kwargs.pop("device", None)), []
        likes = like if isinstance(like, list | tuple) else [like] * len(self)
        devices = self._devices
        if isinstance(like, Tensor | str | int | torch.device | list | tuple):
            places = [x.device if isinstance(x, Tensor) else x for x in likes]
            devices = _checked_devices("to", places, len(self))
        for module, like in zip(self._modules, likes, strict=True):
            module.to(like, *others, **kwargs)
        self._devices = devices
        return self

    def train(self, mode: bool = True) -> Replicas:
        """Sets all replicas to training mode, or with False to evaluation mode."""
        for module in self._modules:
            module.train(mode)
        return self

    def eval(self) -> Replicas:
        """Sets all replicas to evaluation mode."""
        return self.train(False)

    def state_dict(self) -> dict[str, Any]:
        """The state of the first replica."""
        return self._modules[0].state_dict()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> Any:
        """Loads a module's state into all replicas.

        Args:
            state_dict: of the module.
            strict: whether its names must be exactly those of the module.

        Returns:
            The missing and the unexpected names, as
            :meth:`torch.nn.Module.load_state_dict`.

        Raises:
            RuntimeError: a state that does not match the module.
        """
        return [module.load_state_dict(state_dict, strict) for module in self][0]

    def __repr__(self) -> str:
        """``Replicas(Sequential, devices=['cuda:0', 'cuda:1'])``."""
        names = [str(device) for device in self._devices]
        return f"Replicas({type(self._modules[0]).__name__}, devices={names})"


def replicate(module: nn.Module, devices: Sequence[Device] | None = None) -> Replicas:
    """Replicates a module on several devices.

    Args:
        module: moved to the first device as the first replica. The others are deep
            copies of it, but share the stores of its
            :class:`torchkv.nn.StoreEmbedding` modules.
        devices: one for each replica; may be repeated, as in ``["cpu", "cpu"]``. None:
            all GPUs or, without GPUs, the CPU once.

    Raises:
        ValueError: no devices, or ``meta``, whose tensors have no data.
        TypeError: not a module.
    """
    expect("replicate", module, nn.Module, "a module")
    if devices is None:
        count = torch.cuda.device_count()
        devices = [torch.device("cuda", i) for i in range(count)] or ["cpu"]
    if isinstance(devices, str | int | torch.device):
        devices = [devices]
    if not devices:
        raise ValueError("replicate: expected at least one device, but got none")
    first, *others = devices = _checked_devices("replicate", devices, len(devices))
    stores = [embedding.store for embedding in embeddings_of(module)]
    copies = [
        copy.deepcopy(module, {id(store): store for store in stores}).to(device)
        for device in others
    ]
    return Replicas([module.to(first), *copies], devices)


def _checked_devices(
    op: str, devices: Sequence[Device], count: int
) -> list[torch.device]:
    checked = [torch.device(device) for device in devices]
    for device in checked:
        if device.type == "meta":
            raise ValueError(
                f"{op}: expected devices whose tensors have data, but got 'meta'"
            )
    if len(checked) != count:
        raise ValueError(
            f"{op}: expected {count} devices, one for each replica, but got "
            f"{len(checked)}"
        )
    return checked


def _zero_missing_gradients(module: nn.Module) -> None:
    """Gradients of a replica without rows, as a Trainer expects them."""
    if torch.is_grad_enabled():
        tables = {
            id(table.weight)
            for table in module.modules()
            if isinstance(table, nn.Embedding | nn.EmbeddingBag) and table.sparse
        }
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.grad is None:
                # A dense one beside sparse ones would be a step of all rows.
                parameter.grad = (
                    _without_rows(parameter)
                    if id(parameter) in tables
                    else torch.zeros_like(parameter)
                )
        for embedding in embeddings_of(module):
            embedding._note_no_rows()


def _without_rows(parameter: Tensor) -> Tensor:
    ids = torch.empty(0, dtype=torch.int64, device=parameter.device)
    return sparse_rows(ids, parameter.detach()[:0].clone(), tuple(parameter.shape))
