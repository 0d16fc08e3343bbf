"""Dtypes that torch cannot add or convert are refused before any change."""

import pytest
import torch

from helpers import assert_same, full

ODD = {
    "float4": lambda: full(0, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "uint1": lambda: torch.empty(2, 3, dtype=torch.uint1),
    "int7": lambda: torch.empty(2, 3, dtype=torch.int7),
    "bits8": lambda: torch.empty(2, 3, dtype=torch.bits8),
}
REFUSED = (NotImplementedError, TypeError)


@pytest.fixture(params=ODD.values(), ids=ODD)
def odd(request):
    """A tensor of an odd dtype, of the contract's shape."""
    return request.param()


@pytest.mark.parametrize("name", ["uint1", "int7", "bits8"])
def test_init(kv, name):
    with pytest.raises(REFUSED, match="^init: expected"):
        kv.init([3, 5], [full(1), ODD[name]()])
    assert kv.keys() == []


@pytest.mark.parametrize("replicas", [1, 3])
def test_push(kv, odd, replicas):
    kv.init([3, 5], [full(1), full(2)])
    with pytest.raises(REFUSED, match=r"^push: expected .*\(key 5\)"):
        kv.push([3, 5], [[full(7)] * replicas, [odd] * replicas])
    assert_same(kv.pull(3), full(1))
    assert_same(kv.pull(5), full(2))


def test_pull(kv, odd):
    kv.init([3, 5], [full(1), full(2)])
    out = full(7)
    with pytest.raises(REFUSED, match=r"^pull: expected .*\(key 5\)"):
        kv.pull([3, 5], out=[out, odd])
    assert_same(out, full(7))
