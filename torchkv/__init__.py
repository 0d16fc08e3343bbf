"""torchkv: a key-value store of tensors for PyTorch.

``torchkv.create("device")`` makes a store; ``init``, ``push`` and ``pull`` move
tensors in and out of it. :class:`Trainer` trains a model with an optimizer on one.
Importing the package registers the TorchScript class
``torch.classes.torchkv.KVStore``, which is the same store.
"""

from importlib.metadata import PackageNotFoundError, version

# The first of these is the first to be imported: it explains why the others may fail.
from torchkv import (
    _binaries,
    compression,
    distributed,
    initializers,
    lr_scheduler,
    nn,
    optim,
)
from torchkv._C import Work
from torchkv.errors import (
    RemoteError,
    ServerLostError,
    StoreTimeoutError,
    WorkerLostError,
)
from torchkv.kvstore import KVStore, create, load
from torchkv.registered import KVStoreBase, register
from torchkv.trainer import Replicas, Trainer, replicate

try:
    __version__ = version("torchkv")
except PackageNotFoundError:  # imported from a source tree that is not installed
    __version__ = "0+unknown"

del _binaries, distributed

__all__ = [
    "KVStore",
    "KVStoreBase",
    "RemoteError",
    "Replicas",
    "ServerLostError",
    "StoreTimeoutError",
    "Trainer",
    "Work",
    "WorkerLostError",
    "compression",
    "create",
    "initializers",
    "load",
    "lr_scheduler",
    "nn",
    "optim",
    "register",
    "replicate",
]
