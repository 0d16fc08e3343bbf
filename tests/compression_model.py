"""What each codec sends, by its definition, with PyTorch's operators."""

import math

import pytest
import torch

from torchkv.compression import BF16, FP8, FP16, Int4, OneBit, TopK, TwoBit

WITH_FEEDBACK = [
    OneBit(),
    OneBit(-0.25),
    TwoBit(),
    TwoBit(0.125),
    FP16(),
    BF16(),
    FP8(),
    TopK(k=7),
    TopK(ratio=0.25),
]
ALL = [*WITH_FEEDBACK, Int4(), Int4(seed=7)]

each_codec = pytest.mark.parametrize("codec", WITH_FEEDBACK, ids=str)
each_float = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)


def some(shape, dtype=torch.float32, scale=1.0):
    """Normally distributed numbers."""
    return (torch.randn(shape) * scale).to(dtype)


def sent(codec, value):
    """What is sent of a value to which the residual has been added."""
    match codec:
        case OneBit(threshold):
            return torch.where(value > threshold, 1.0, -1.0).to(value.dtype)
        case TwoBit(threshold):
            one = torch.tensor(threshold, dtype=value.dtype)
            low = torch.where(value <= -one, -one, torch.zeros_like(one))
            return torch.where(value >= one, one, low)
        case FP16():
            return value.float().clamp(-65504, 65504).half().to(value.dtype)
        case BF16():
            most = torch.finfo(torch.bfloat16).max
            return value.float().clamp(-most, most).bfloat16().to(value.dtype)
        case FP8():
            return _by_block(value, 1024, _fp8)
        case TopK():
            flat, result = value.flatten(), torch.zeros(value.numel()).to(value.dtype)
            largest = flat.abs().sort(descending=True, stable=True).indices
            chosen = largest[: num_sent(codec, value.numel())]
            result[chosen] = flat[chosen]
            return result.view_as(value)
    raise AssertionError(codec)


def num_sent(codec, num_elements):
    """How many elements topk sends."""
    if codec.k is not None:
        return min(codec.k, num_elements)
    ratio = 0.01 if codec.ratio is None else codec.ratio
    return max(1, math.ceil(ratio * num_elements * (1 - 1e-12)))


def _by_block(value, size, function):
    blocks = [function(block) for block in value.flatten().split(size)]
    return torch.cat(blocks).view_as(value)


def _fp8(block):
    if not block.any():
        return torch.zeros_like(block)
    most, largest = torch.tensor(448, dtype=block.dtype), block.abs().max()
    scaled = (block * (most / largest)).clamp(-most, most)
    code = scaled.float().to(torch.float8_e4m3fn)
    return code.to(block.dtype) * (largest / most)


class Model:
    """A key of a store that compresses: what it adds up, and its residuals."""

    def __init__(self, codec, shape, dtype=torch.float32):
        self.codec = codec
        self.shape = shape
        self.dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.residuals = []

    def sum(self, values):
        """What values pushed as one list add up to, in the residuals' dtype."""
        while len(self.residuals) < len(values):
            self.residuals.append(torch.zeros(self.shape, dtype=self.dtype))
        total = None
        for position, value in enumerate(values):
            whole = value.to(self.dtype) + self.residuals[position]
            chosen = sent(self.codec, whole)
            self.residuals[position] = whole - chosen
            total = chosen if total is None else total + chosen
        return total
