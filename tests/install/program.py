"""What a Python program does with an installed torchkv; tools/check_install runs it."""

import ctypes
import importlib.metadata
import os
import pathlib

import torch

import torchkv

assert torchkv.__version__ == importlib.metadata.version("torchkv")
package = pathlib.Path(torchkv.__file__).parent
assert "site-packages" in package.parts, package
for part in ("lib/libtorchkv.so", "include/torchkv/kvstore.h", "py.typed"):
    assert (package / part).is_file(), part

store = torchkv.create("local")
store.init(3, torch.ones(2, 3))
store.push(3, [torch.ones(2, 3), torch.ones(2, 3)])
assert store.pull(3).tolist() == [[2.0] * 3] * 2
print("a Python program pushed and pulled")


def add(key: int, input: torch.Tensor, stored: torch.Tensor):
    stored.add_(input)


class Sum(torch.nn.Module):
    """For a C++ program: a module that holds a store."""

    def __init__(self):
        super().__init__()
        self.store = torchkv.create("local")
        self.store.init(3, torch.ones(2, 3))
        self.store.set_updater(torch.jit.script(add))

    def forward(self, x: torch.Tensor):
        self.store.push(3, [x, x])
        pulled = self.store.pull(3)
        assert isinstance(pulled, torch.Tensor)
        return pulled


torch.jit.script(Sum()).save("archive.pt")

kernels = package / "lib" / "libtorchkv_cuda.so"
if wanted := os.environ.get("TORCHKV_USE_CUDA"):
    assert kernels.exists() == (wanted == "1"), kernels
if kernels.exists():
    assert ctypes.CDLL(kernels).torchkv_cuda_table()
    print("the CUDA kernels were loaded")
