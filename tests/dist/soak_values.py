"""The values of soak.py: a + b * pattern, so that two numbers tell a tensor."""

import zlib
from typing import Any

import torch

PERIOD = 7  # of the pattern


def pair(*name: Any) -> tuple[int, int]:
    """Two numbers from -4 to 4 that all ranks know."""
    number = zlib.crc32("/".join(map(str, name)).encode())
    return number % 9 - 4, (number >> 8) % 9 - 4


_patterns: dict[tuple[int, ...], torch.Tensor] = {}


def tensor(
    size: tuple[int, ...], a: float, b: float, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """a + b * 0, a + b * 1, ... a + b * 6, a + b * 0, ..."""
    if size not in _patterns:
        count = torch.Size(size).numel()
        _patterns[size] = (torch.arange(count) % PERIOD).float().reshape(size)
    return (_patterns[size] * b).add_(a).to(dtype)
