"""Tensors of any dtype and strides as contiguous ones of dtypes that the files know."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchkv.optim.groups import shown

# Dtypes that the library of the safetensors format does not read into torch, and what
# their tensors are stored as.
_STORED_AS = {
    torch.complex128: torch.float64,
    torch.complex32: torch.float16,
    torch.float8_e8m0fnu: torch.uint8,
}
_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in _STORED_AS}


@dataclass
class Originals:
    """What native tensors cannot express, by the names of the tensors."""

    strides: dict[str, list[int]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)

    def to_native(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor as the files hold it; notes what is lost."""
        if not tensor.is_cpu:
            tensor = tensor.cpu()
        if not tensor.is_contiguous():
            self.strides[name] = list(tensor.stride())
            tensor = tensor.contiguous()
        stored_as = _STORED_AS.get(tensor.dtype)
        if stored_as is not None:
            self.dtypes[name] = str(tensor.dtype).removeprefix("torch.")
            complex = tensor.is_complex()
            tensor = torch.view_as_real(tensor) if complex else tensor.view(stored_as)
        return tensor

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """The other way, in place; ValueError where a tensor does not fit."""
        for fields in (self.dtypes, self.strides):
            for name in fields:
                if name not in tensors:
                    raise ValueError(f"load: missing tensor {shown(name)}")
        for name, text in self.dtypes.items():
            tensors[name] = _with_dtype(name, tensors[name], text)
        for name, strides in self.strides.items():
            tensors[name] = _with_strides(name, tensors[name], strides)


def _with_dtype(name: str, tensor: Tensor, text: str) -> Tensor:
    dtype = _BY_NAME.get(text)
    if dtype is None or tensor.dtype != _STORED_AS[dtype]:
        raise ValueError(f"load: {tensor.dtype} does not hold {text!r} ({shown(name)})")
    if not dtype.is_complex:
        return tensor.view(dtype)
    if tensor.shape[-1:] != (2,):
        raise ValueError(f"load: expected pairs of numbers ({shown(name)})")
    return torch.view_as_complex(tensor)


def _with_strides(name: str, tensor: Tensor, strides: list[int]) -> Tensor:
    """A copy of these strides, which fill its memory without gaps, as in a store."""
    fills = len(strides) == tensor.dim()
    step = 1
    for stride, size in sorted(zip(strides, tensor.shape, strict=False)):
        if size != 1:
            fills = fills and stride == step
            step *= size
    if not fills:
        raise ValueError(f"load: the strides {strides} do not fit ({shown(name)})")
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cpu")
    return copy.copy_(tensor)
