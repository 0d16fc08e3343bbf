"""Copies of a module on several devices, for data-parallel training in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Self, TypeAlias, overload
from weakref import WeakSet

import torch
from torch import Tensor, nn

from torchkv.trainer.nests import map_nests

Device: TypeAlias = torch.device | str | int

# All that exist, for a Trainer to tell whose parameters it gets.
existing: WeakSet[Replicas] = WeakSet()


class _Call(NamedTuple):
    """The arguments of a module; their names are those of messages."""

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

    Different devices work at the same time, each in a thread of its own; replicas on
    one device, one after the other, so that random numbers (dropout) are drawn in the
    same order every time.

    A batch may be nested: dicts, lists, tuples, named tuples and dataclasses are
    scattered tensor by tensor, and outputs gathered likewise. What is not part of the
    batch, such as a flag, a weight of each class or a mask for all rows, is passed by
    name in ``repeat``::

        output = replicas(**batch, repeat={"return_dict": True})

    Parameters are kept equal by :class:`torchkv.Trainer`. Buffers are not: each
    replica's BatchNorm counts its own shards, and the first replica's buffers, which
    are the module's, are those that :meth:`state_dict` has.
    """

    _modules: Sequence[nn.Module] = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Notes that it exists, of copies, too."""
        self = super().__new__(cls)
        existing.add(self)
        return self

    def __init__(self, modules: Sequence[nn.Module], devices: Sequence[Device]) -> None:
        """Holds modules that are on `devices` already; see :func:`replicate`.

        Raises:
            ValueError: another number of devices than of modules, or ``meta``.
        """
        self._devices = _checked_devices("Replicas", devices)
        _check_one_each("Replicas", self._devices, len(modules))
        self._modules = list(modules)

    @property
    def module(self) -> nn.Module:
        """The first replica: the module that was replicated."""
        return self._modules[0]

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
        """Splits tensors along dimension 0 into a shard for each replica's device.

        Shards differ by one row at most, and may have none. Autograd records it.

        Args:
            *inputs: tensors, None, and dicts, lists, tuples, named tuples and
                dataclasses of these, nested or not.

        Returns:
            For each replica its shards of the inputs, nested as they are.

        Raises:
            ValueError: a tensor without dimensions, or tensors of different length.
            TypeError: anything else, which cannot be split.
            NotImplementedError: sparse and nested tensors.
        """
        return self._scatter(inputs, "inputs")

    def _scatter(self, nest: Any, path: str) -> list[Any]:
        if self._num_rows(nest, path) is None:
            return [nest] * len(self)

        def shard_of(i: int) -> Any:
            def shard(_: str, leaves: Sequence[Any]) -> Tensor | None:
                (x,) = leaves
                if x is None:
                    return None
                shards: Sequence[Tensor] = x.tensor_split(len(self))
                return shards[i].to(self._devices[i], non_blocking=True)

            return map_nests(shard, [nest], path)

        return [shard_of(i) for i in range(len(self))]

    def _num_rows(self, nest: Any, path: str) -> int | None:
        """The length of all tensors; None where there are none."""
        lengths: dict[int, str] = {}

        def check(path: str, leaves: Sequence[Any]) -> None:
            (x,) = leaves
            if x is None:
                return
            path = path.removeprefix(".")
            if not isinstance(x, Tensor):
                raise TypeError(
                    "scatter: expected tensors in dicts, lists, tuples and "
                    f"dataclasses, but got {type(x).__name__} as {path}; pass what all "
                    "replicas get as repeat={'name': value}"
                )
            if x.layout != torch.strided or x.is_nested:
                kind = "a nested tensor" if x.is_nested else f"one of {x.layout}"
                raise NotImplementedError(
                    f"scatter: expected dense tensors, but got {kind} as {path}"
                )
            if x.dim() == 0:
                raise ValueError(
                    "scatter: expected tensors with a dimension to split, but got one "
                    f"of shape [] as {path}; pass what all replicas get as "
                    "repeat={'name': value}"
                )
            lengths.setdefault(len(x), path)

        map_nests(check, [nest], path)
        if len(lengths) > 1:
            told = ", ".join(f"{n} as {path}" for n, path in sorted(lengths.items()))
            raise ValueError(f"scatter: expected tensors of one length, but got {told}")
        return next(iter(lengths), None)

    def _repeated(self, repeat: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        """For each replica what all get, with tensors on its device."""
        if repeat is not None and not isinstance(repeat, Mapping):
            raise TypeError(
                "repeat: expected a dict of arguments by name, but got "
                f"{type(repeat).__name__}"
            )

        def repeated_on(device: torch.device) -> dict[str, Any]:
            def move(_: str, leaves: Sequence[Any]) -> Any:
                (x,) = leaves
                return x.to(device) if isinstance(x, Tensor) else x

            moved: dict[str, Any] = map_nests(move, [dict(repeat or {})], "repeat")
            return moved

        return [repeated_on(device) for device in self._devices]

    def gather(self, outputs: Sequence[Any]) -> Any:
        """Joins tensors along dimension 0, on the first replica's device.

        Tensors without dimensions (losses) become a vector. Autograd records it.

        Args:
            outputs: one per replica, all nested alike; see :meth:`scatter`.

        Returns:
            The joined tensors, nested as each output is.

        Raises:
            ValueError: no outputs, or outputs of different structure.
            TypeError: something else than tensors, nests of tensors, and None.
        """
        if not outputs:
            raise ValueError("gather: expected at least one tensor, but got none")
        device = self._devices[0]

        def join(path: str, leaves: Sequence[Any]) -> Tensor | None:
            if all(x is None for x in leaves):
                return None
            for x in leaves:
                if not isinstance(x, Tensor):
                    raise TypeError(
                        f"gather: expected tensors, but got {type(x).__name__} as "
                        f"{path}"
                    )
            moved = [x.to(device) for x in leaves]
            if all(x.dim() == 0 for x in moved):
                return torch.stack(moved)
            return torch.cat(moved)

        return map_nests(join, outputs, "output")

    # -- work

    def __call__(
        self, *inputs: Any, repeat: Mapping[str, Any] | None = None, **keywords: Any
    ) -> Any:
        """Runs each replica on its shard of a batch, and joins the outputs.

        So one ``backward`` of a loss of the output leaves gradients in all replicas.

        Args:
            *inputs: as in :meth:`scatter`.
            repeat: arguments by name that each replica gets whole: tensors are copied
                to its device, all else is passed as it is.
            **keywords: as in :meth:`scatter`.

        Returns:
            As :meth:`gather`.

        Raises:
            Exception: what a module raises.
        """

        def work(module: nn.Module, call: _Call) -> Any:
            return module(*call.args, **call.kwargs)

        return self.gather(self._run(work, _Call(inputs, keywords), repeat))

    def backward(
        self,
        loss: Callable[..., Tensor],
        /,
        *inputs: Any,
        repeat: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> Tensor:
        """Computes and differentiates each replica's loss on its shard of a batch.

        The gradients stay in the replicas, for :meth:`torchkv.Trainer.step`, which adds
        them up. So for the gradients of the whole batch's mean, sum in `loss` and
        divide in ``step(batch_size)``::

            def loss(model, images, labels):
                return F.cross_entropy(model(images), labels, reduction="sum")

            losses = replicas.backward(loss, images, labels)
            trainer.step(len(images))

        Args:
            loss: called as ``loss(replica, *shards, **shards)``; returns one number.
            *inputs: as in :meth:`scatter`.
            repeat: as in calls of the replicas.
            **keywords: as in :meth:`scatter`.

        Returns:
            The losses, one per replica that had a row, without gradients, on the first
            replica's device.

        Raises:
            Exception: what `loss` or its ``backward`` raises. Some replicas may have
                gradients by then.
        """

        def work(module: nn.Module, call: _Call) -> Tensor:
            value = loss(module, *call.args, **call.kwargs)
            value.backward()  # type: ignore[no-untyped-call]
            return value.detach()

        losses: Tensor = self.gather(self._run(work, _Call(inputs, keywords), repeat))
        return losses

    def _run(
        self,
        function: Callable[[nn.Module, _Call], Any],
        call: _Call,
        repeat: Mapping[str, Any] | None,
    ) -> list[Any]:
        for name in call.kwargs:
            if repeat is not None and name in repeat:
                raise TypeError(
                    f"repeat: expected other arguments than those of the batch, but "
                    f"got {name!r} in both"
                )
        num_rows = self._num_rows(call, "")
        shards = [
            _Call(shard.args, {**shard.kwargs, **more})
            for shard, more in zip(
                self._scatter(call, ""), self._repeated(repeat), strict=True
            )
        ]
        by_device: dict[torch.device, list[int]] = {}
        for i in range(len(self)):
            # Rows come to the first replicas first.
            if num_rows is not None and i >= max(num_rows, 1):
                _leave_zeros(self._modules[i])
            else:
                by_device.setdefault(self._devices[i], []).append(i)

        def run_all(places: list[int]) -> list[Any]:
            return [function(self._modules[i], shards[i]) for i in places]

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

    @property
    def training(self) -> bool:
        """Whether the module is set to training."""
        return self.module.training

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The module's parameters: those of the first replica.

        A :class:`torchkv.Trainer` copies what is written to them to the others. It
        takes the replicas themselves, since it adds up the gradients of all.
        """
        return self.module.parameters(recurse)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As :meth:`parameters`, with their names in the module."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of all replicas, or with False fills them with zeros."""
        for module in self._modules:
            module.zero_grad(set_to_none)

    def to(self, *args: Any, **kwargs: Any) -> Replicas:
        """Moves and casts all replicas, in place, as :meth:`torch.nn.Module.to`.

        Args:
            *args: as of ``Module.to``. The device may be a list with one for each
                replica; a single one is that of all.
            **kwargs: likewise.

        Raises:
            ValueError: another number of devices than of replicas, or ``meta``.
        """
        like = args[0] if args else kwargs.get("tensor")
        place = like if args else kwargs.pop("device", None)
        if isinstance(like, Tensor):
            place = [like.device] * len(self)
        elif isinstance(place, str | int | torch.device):
            place = [torch.device(place)] * len(self)
        elif not isinstance(place, list | tuple):  # a dtype, or none
            for module in self._modules:
                module.to(*args, **kwargs)
            return self
        devices = _checked_devices("to", place)
        _check_one_each("to", devices, len(self))
        for module, device in zip(self._modules, devices, strict=True):
            if isinstance(like, Tensor):
                module.to(*args, **kwargs)
            else:
                module.to(device, *args[1:], **kwargs)
        self._devices = devices
        return self

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

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> Any:
        """Loads a module's state into all replicas.

        Args:
            state_dict: of the module.
            strict: whether its names must be those of the module.

        Returns:
            The names that were missing and those that were unexpected, as
            :meth:`torch.nn.Module.load_state_dict`.

        Raises:
            RuntimeError: a state that does not fit the module.
        """
        return [module.load_state_dict(state_dict, strict) for module in self][0]

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
        ValueError: no devices, or ``meta``, where tensors have no data.
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
    first, *others = devices = _checked_devices("replicate", devices)
    copies = [copy.deepcopy(module).to(device) for device in others]
    return Replicas([module.to(first), *copies], devices)


def _check_one_each(op: str, devices: Sequence[torch.device], count: int) -> None:
    if len(devices) != count:
        raise ValueError(
            f"{op}: expected {count} devices, one for each replica, but got "
            f"{len(devices)}"
        )


def _checked_devices(op: str, devices: Sequence[Device]) -> list[torch.device]:
    checked = [torch.device(device) for device in devices]
    for device in checked:
        if device.type == "meta":
            raise ValueError(
                f"{op}: expected devices whose tensors have data, but got 'meta'"
            )
    return checked


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
        function: Callable[[list[int]], list[Any]],
        places: list[int],
    ) -> list[Any]:
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
