"""torchkv: a key-value store of tensors for PyTorch.

``torchkv.create("device")`` makes a store; ``init``, ``push`` and ``pull`` move
tensors in and out of it. Importing the package registers the TorchScript class
``torch.classes.torchkv.KVStore``, which is the same store.
"""

from importlib.metadata import PackageNotFoundError, version

from torchkv.kvstore import KVStore, create

try:
    __version__ = version("torchkv")
except PackageNotFoundError:  # imported from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = ["KVStore", "create"]
