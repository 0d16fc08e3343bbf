"""The dtypes that a store adds up, and random tensors of them."""

import torch

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOAT8S = [torch.float8_e4m3fn, torch.float8_e5m2]
INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128, torch.complex32]
WIDE_UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]


def random_tensor(shape, dtype):
    """Values over several binades, so that the order of a sum shows in its bits."""
    if dtype.is_complex:
        part = torch.float32 if dtype is torch.complex32 else torch.float64
        parts = [random_tensor(shape, part).clamp(-1000, 1000) for _ in range(2)]
        return torch.complex(*parts).to(dtype)
    if dtype.is_floating_point:
        scale = 2.0 ** torch.randint(-4, 5, shape)
        return (torch.randn(shape, dtype=torch.float64) * scale).to(dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    low = 0 if dtype in (torch.uint8, *WIDE_UNSIGNED) else -100
    return torch.randint(low, 100, shape).to(dtype)
