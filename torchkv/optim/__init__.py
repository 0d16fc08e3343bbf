"""Optimizers that run on the store, where a push of gradients is a step.

``store.set_optimizer(torchkv.optim.AdamW(lr=1e-3))`` makes one of these the
store's updater. They take the arguments of :mod:`torch.optim`, but no parameters:
these are the store's values. They run in C++, in the pass that adds up the
gradients, without the GIL. Every scheduler of :mod:`torch.optim.lr_scheduler`
takes them.
"""

from torchkv.optim.adaptor import TorchOptimizer
from torchkv.optim.base import StoreOptimizer
from torchkv.optim.built_in import GradientOptions
from torchkv.optim.rules import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Lion,
    RMSprop,
)

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "GradientOptions",
    "Lion",
    "RMSprop",
    "StoreOptimizer",
    "TorchOptimizer",
]
