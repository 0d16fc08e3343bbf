"""The shapes of real models' parameters, in the order in which the models list them."""

from __future__ import annotations

import math
from collections.abc import Sequence

Shape = tuple[int, ...]

OPT_LAYERS = 24


def resnet50() -> list[Shape]:
    """ResNet-50 as torchvision defines it: 161 tensors, 25,557,032 parameters."""

    def convolution(out: int, into: int, kernel: int) -> list[Shape]:
        norm = [(out,), (out,)]
        return [(out, into, kernel, kernel), *norm]

    shapes = convolution(64, 3, 7)
    channels = 64
    for width, blocks in [(64, 3), (128, 4), (256, 6), (512, 3)]:
        for block in range(blocks):
            shapes += convolution(width, channels, 1)
            shapes += convolution(width, width, 3)
            shapes += convolution(4 * width, width, 1)
            if block == 0:  # the shortcut also changes the number of channels
                shapes += convolution(4 * width, channels, 1)
            channels = 4 * width
    return [*shapes, (1000, channels), (1000,)]


def opt_1_3b(layers: int = OPT_LAYERS) -> list[Shape]:
    """OPT-1.3B, a decoder of GPT-3 XL's size: 388 tensors, 1,315,758,080 parameters.

    The output layer is the embedding. `layers` truncates the model.
    """
    width, inner, vocabulary, positions = 2048, 8192, 50272, 2050
    norm: list[Shape] = [(width,), (width,)]

    def linear(out: int, into: int) -> list[Shape]:
        return [(out, into), (out,)]

    layer = [
        *linear(width, width) * 4,  # of the attention: key, value, query, output
        *norm,
        *linear(inner, width),
        *linear(width, inner),
        *norm,
    ]
    return [(vocabulary, width), (positions, width), *norm, *layer * layers]


def num_parameters(shapes: Sequence[Shape]) -> int:
    """The number of elements of all tensors."""
    return sum(math.prod(shape) for shape in shapes)


def opt_that_fits(num_bytes: float, bytes_per_parameter: float) -> int:
    """How many of OPT's 24 layers fit into this much memory; at least 1."""
    rest = num_parameters(opt_1_3b(0))
    per_layer = num_parameters(opt_1_3b(1)) - rest
    layers = (num_bytes / bytes_per_parameter - rest) / per_layer
    return max(1, min(OPT_LAYERS, int(layers)))


def shrunk(shapes: Sequence[Shape], num_elements: int = 1000) -> list[Shape]:
    """As many tensors, with the large ones truncated, for smoke runs."""
    return [(min(num_elements, math.prod(shape)),) for shape in shapes]
