"""Row-sparse keys of the tests in stores of several processes."""

from helpers import assert_same
from torchkv import initializers

SHAPE = (40, 3)
INIT = initializers.Uniform(-1, 1, seed=5)
FAR = 10**15  # an id that no dense table could have


def check_same(found, expected):
    """Two pulled values."""
    assert found.is_coalesced() and found.shape == expected.shape
    assert found.indices().tolist() == expected.indices().tolist()
    assert_same(found.values(), expected.values())
