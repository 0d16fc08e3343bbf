"""Optimizers by MXNet's names, with MXNet's names and defaults of options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from torchkv.optim.adaptor import TorchOptimizer
from torchkv.optim.base import StoreOptimizer
from torchkv.optim.groups import near
from torchkv.optim.options import GradientOptions
from torchkv.optim.rules import LAMB, SGD, Adagrad, Adam, AdamW, Lion, RMSprop

# Name: class, MXNet's defaults where they differ from torch's, its own options.
_Entry: TypeAlias = tuple[Callable[..., StoreOptimizer], dict[str, Any], dict[str, str]]
_BY_NAME: dict[str, _Entry] = {
    "sgd": (SGD, {"lr": 0.01}, {}),
    "nag": (SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}, {}),
    "adam": (Adam, {}, {"epsilon": "eps"}),
    "adamw": (AdamW, {"weight_decay": 0.0}, {"epsilon": "eps"}),
    "adagrad": (Adagrad, {}, {"epsilon": "eps"}),
    "rmsprop": (
        RMSprop,
        {"lr": 1e-3, "alpha": 0.9},
        {"epsilon": "eps", "gamma1": "alpha", "gamma2": "momentum"},
    ),
    "lion": (Lion, {}, {}),
    "lamb": (LAMB, {}, {"epsilon": "eps"}),
}

_COMMON = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "clip_gradient": "clip_value",
}

# Always the case: a dense gradient updates all rows, and fp16 and bf16 have an fp32
# master.
_IGNORED = ("lazy_update", "multi_precision")


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
    cls, defaults, aliases = _BY_NAME[name]
    aliases = {**_COMMON, **aliases}
    signature = inspect.signature(cls).parameters
    known = {*signature, *GradientOptions.__annotations__} - {"gradient"}
    if "betas" in known:
        known |= {"beta1", "beta2"}
    names = [*aliases, *known]
    arguments = dict(defaults)
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
        if option == "clip_gradient" and isinstance(value, float | int) and value < 0:
            value = None  # as in MXNet
        given[target] = option
        arguments[target] = value
    if {"beta1", "beta2"} & given.keys():
        if "betas" in given:
            raise ValueError(f"{op}: expected 'betas' or 'beta1' and 'beta2', not both")
        first, second = signature["betas"].default
        betas = arguments.pop("beta1", first), arguments.pop("beta2", second)
        arguments["betas"] = betas
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
