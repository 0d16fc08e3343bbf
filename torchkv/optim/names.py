"""Optimizers by MXNet's names, with MXNet's names and defaults of options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import torch

from torchkv.arguments import near
from torchkv.optim import mxnet
from torchkv.optim.adaptor import TorchOptimizer
from torchkv.optim.base import StoreOptimizer
from torchkv.optim.mxnet_base import MXNetOptions
from torchkv.optim.options import GradientOptions, numbers_of
from torchkv.optim.rules import AdamW, Lion

# Those that MXNet does not have, with torch's words and formulas: name, class, and
# options that are not torch's.
_OTHERS: dict[str, tuple[Callable[..., StoreOptimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {"weight_decay": 0.0}),
    "lion": (Lion, {}),
}
_BY_NAME: dict[str, Callable[..., StoreOptimizer]] = {
    **{cls.__name__.lower(): cls for cls in mxnet.ALL},
    "ccsgd": mxnet.SGD,
    **{name: cls for name, (cls, _) in _OTHERS.items()},
}

# Other words for the arguments of a constructor.
_ALIASES = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "clip_gradient": "clip_value",
    "epsilon": "eps",
    "lazy_update": "lazy",
}
_MXNET_ALIASES = {
    "lr": "learning_rate",
    "weight_decay": "wd",
    "eps": "epsilon",
    "lazy_update": "lazy",
}
# Always the case: values of fp16 and bf16 have an fp32 master.
_IGNORED = ("multi_precision",)


def by_name(name: str, options: dict[str, Any]) -> StoreOptimizer:
    """Makes the optimizer that MXNet calls `name`, from MXNet's options or torch's.

    Names are case-insensitive, as in MXNet.

    Raises:
        ValueError: an unknown name or option; the message lists the valid ones.
    """
    op = "set_optimizer"
    given_name, name = name, name.lower()
    if name not in _BY_NAME:
        valid = ", ".join(repr(known) for known in _BY_NAME)
        raise ValueError(
            f"{op}: unknown optimizer {given_name!r}; expected one of {valid}"
            f"{near(name, _BY_NAME)}"
        )
    cls = _BY_NAME[name]
    signature = inspect.signature(cls).parameters
    is_mxnet = name not in _OTHERS
    common = MXNetOptions if is_mxnet else GradientOptions
    known = {*signature, *get_type_hints(common)} - {"gradient", "options"}
    # An alias is not used where it is the name of an argument, as AdaGrad's eps.
    aliases = {
        alias: target
        for alias, target in (_MXNET_ALIASES if is_mxnet else _ALIASES).items()
        if target in known and alias not in known
    }
    if "betas" in known:
        known |= {"beta1", "beta2"}
    elif "beta1" in known and "beta2" in known:
        known |= {"betas"}
    names = [*aliases, *known]
    arguments = {} if is_mxnet else dict(_OTHERS[name][1])
    given: dict[str, str] = {}
    for option, value in options.items():
        target = aliases.get(option, option)
        if option in _IGNORED:
            continue
        if target not in known:
            raise ValueError(
                f"{op}: unknown option {option!r} of {name!r}; expected one of "
                f"{', '.join(sorted(names))}{near(option, names)}"
            )
        if target in given:
            raise ValueError(
                f"{op}: expected {given[target]!r} or {option!r}, which are the same "
                "option, but got both"
            )
        if option == "clip_gradient" and isinstance(value, float | int) and value <= 0:
            value = None  # as in MXNet
        given[target] = option
        arguments[target] = value
    if "betas" in given and {"beta1", "beta2"} & given.keys():
        raise ValueError(f"{op}: expected 'betas' or 'beta1' and 'beta2', not both")
    if "betas" in signature and {"beta1", "beta2"} & given.keys():
        first, second = signature["betas"].default
        betas = arguments.pop("beta1", first), arguments.pop("beta2", second)
        arguments["betas"] = betas
    elif "betas" in given and "betas" not in signature:
        betas = arguments.pop("betas")
        numbers = numbers_of(op, {"betas": betas})
        arguments.update(numbers)
    return cls(**arguments)


def make(optimizer: Any, options: dict[str, Any]) -> StoreOptimizer:
    """The optimizer of a store for the arguments of ``set_optimizer``."""
    op = "set_optimizer"
    if isinstance(optimizer, str):
        return by_name(optimizer, options)
    if isinstance(optimizer, type) and issubclass(optimizer, StoreOptimizer):
        constructor: Callable[..., StoreOptimizer] = optimizer
        return constructor(**options)
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        return TorchOptimizer(optimizer, **options)
    if isinstance(optimizer, StoreOptimizer):
        if options:
            raise TypeError(
                f"{op}: unexpected options {', '.join(map(repr, options))}; pass them "
                "to the optimizer's constructor"
            )
        return optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(
            f"{op}: unexpected torch.optim object, which has its own parameters; pass "
            f"its class: set_optimizer(torch.optim.{kind}, lr=...)"
        )
    raise TypeError(
        f"{op}: expected a name, an optimizer of torchkv.optim or a class of "
        f"torch.optim, but got {type(optimizer).__name__}"
    )
