"""Optimizers that run on the store: pushing gradients is a step.

``store.set_optimizer(torchkv.optim.AdamW(lr=1e-3))`` makes one the store's updater.
They have the arguments of :mod:`torch.optim`, except the parameters, which are the
store's values. They run in C++ without the GIL, fused with the sum of the gradients.
All schedulers of :mod:`torch.optim.lr_scheduler` accept them. Those with MXNet's
formulas are in :mod:`torchkv.optim.mxnet`.
"""

from torchkv.optim import mxnet
from torchkv.optim.adaptor import TorchOptimizer
from torchkv.optim.base import StoreOptimizer
from torchkv.optim.options import GradientOptions
from torchkv.optim.rules import LAMB, SGD, Adagrad, Adam, AdamW, Lion, RMSprop

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
    "mxnet",
]
