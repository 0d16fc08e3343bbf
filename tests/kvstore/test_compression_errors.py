"""set_gradient_compression and pushes that it makes invalid: nothing has changed."""

import math

import pytest
import torch

import torchkv
from helpers import assert_same, full, snapshot, stored
from torchkv.compression import Codec, Int4, OneBit, TopK, TwoBit


@pytest.fixture
def kv(device_kv):
    """An empty store of type device, of one place or several."""
    return device_kv


OP = "set_gradient_compression: "
ERRORS = [
    ({"type": "2bits"}, ValueError, "unknown compression '2bits'; .*mean '2bit'"),
    ({"threshold": 0.5}, ValueError, "missing 'type'; expected one of 'none', '1bit'"),
    ({}, ValueError, "missing 'type'"),
    ({"type": "2bit", "limit": 1}, ValueError, "option 'limit'.*'threshold'"),
    ({"type": "fp16", "threshold": 1}, ValueError, "expected none"),
    ({"type": "2bit", "threshold": 0}, ValueError, "greater than 0, but got 0"),
    ({"type": "2bit", "threshold": -1}, ValueError, "greater than 0, but got -1"),
    ({"type": "2bit", "threshold": math.nan}, ValueError, "finite"),
    ({"type": "1bit", "threshold": math.inf}, ValueError, "finite"),
    ({"type": "2bit", "threshold": 1e-60}, ValueError, "greater than 0"),
    ({"type": "2bit", "threshold": "high"}, TypeError, "number as threshold"),
    ({"type": "topk", "k": 0}, ValueError, "k to be a whole number of at least 1"),
    ({"type": "topk", "k": -3}, ValueError, "at least 1, but got -3"),
    ({"type": "topk", "k": 1.5}, ValueError, "whole number"),
    ({"type": "topk", "ratio": 0}, ValueError, "ratio to be greater than 0"),
    ({"type": "topk", "ratio": 1.5}, ValueError, "at most 1"),
    ({"type": "topk", "k": 1, "ratio": 0.5}, ValueError, "'k' or 'ratio'"),
    ({"type": "int4", "seed": -1}, ValueError, "seed to be a whole number"),
    ({"type": "int4", "seed": 2**53 + 1}, ValueError, r"less than 2\*\*53"),
    ({"type": 2}, TypeError, "as 'type', but got int"),
    ({"type": TwoBit(), "threshold": 1}, ValueError, "unexpected option 'threshold'"),
    ({"keys": ["w"], "type": "2bit"}, ValueError, "expected a list of groups"),
    ({"type": "2bit", 3: 1.0}, TypeError, "names of options as str, but got int"),
    ([{"keys": ["w", 3], "type": "2bit"}], TypeError, "int keys|str keys"),
    ("2bit", TypeError, "but got str"),
    (5, TypeError, "but got int"),
    ([TwoBit(), OneBit()], ValueError, "one group without 'keys', but got 2"),
    ([5], TypeError, "but got int"),
    ([{"keys": ["w", "w"], "type": "2bit"}], ValueError, "more than one group"),
    ([{"keys": 3, "type": "2bit"}], TypeError, r"\(key 3\)"),
    ([{"keys": "ww", "type": "2bit"}], KeyError, r"'ww'.*\(key 'ww'\)"),
]


@pytest.mark.parametrize(("given", "error", "text"), ERRORS, ids=str)
def test_errors_change_nothing(kv, given, error, text):
    kv.init("w", full(0))
    kv.set_gradient_compression(TwoBit(0.5))
    kv.push("w", full(0.375))
    before = snapshot(kv)
    with pytest.raises(error, match=f"(?s){OP}.*{text}|{text}.*"):
        kv.set_gradient_compression(given)
    assert snapshot(kv) == before
    assert kv.gradient_compression == TwoBit(0.5)
    kv.push("w", full(0.125))
    assert_same(stored(kv, "w"), full(0.5))


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: TwoBit(0), ValueError),
        (lambda: TwoBit(threshold=None), TypeError),
        (lambda: Int4(seed=None), TypeError),
        (lambda: TopK(k=0), ValueError),
        (lambda: TopK(k=1, ratio=0.5), ValueError),
        (lambda: Int4(seed="x"), TypeError),
        (lambda: Codec(), ValueError),
    ],
)
def test_a_codec_checks_its_options(make, error):
    with pytest.raises(error, match="set_gradient_compression"):
        make()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_only_floating_point_keys_are_compressed(kv, dtype):
    kv.init(["w", "n"], [full(1), torch.ones(2, 3, dtype=dtype)])
    kv.set_gradient_compression(TwoBit(0.5))
    before = snapshot(kv)
    with pytest.raises(TypeError, match=r"push: .*floating-point.*\(key 'n'\)"):
        kv.push(["w", "n"], [full(3), torch.ones(2, 3, dtype=dtype)])
    assert snapshot(kv) == before
    kv.set_gradient_compression([{"keys": "w", "type": TwoBit(0.5)}])
    kv.push(["w", "n"], [full(3), torch.ones(2, 3, dtype=dtype)])
    assert_same(stored(kv, "w"), full(0.5))


def test_a_wrong_call_leaves_the_residuals(kv):
    kv.init(["w", "v"], [full(0)] * 2)
    kv.set_gradient_compression(TwoBit(0.5))
    kv.push("w", full(0.375))
    with pytest.raises(ValueError, match="shape"):
        kv.push(["w", "v"], [full(0.125), torch.ones(5)])
    kv.push("w", full(0.125))
    assert_same(stored(kv, "w"), full(0.5))


def test_keys_of_a_store_without_keys_are_found_by_the_first_push(kv):
    kv.set_gradient_compression([{"keys": "lost", "type": TwoBit(0.5)}])
    kv.init("w", full(0))
    with pytest.raises(KeyError, match="'lost'"):
        kv.push("w", full(1))
    kv.init("lost", full(0))
    kv.push("w", full(1))
    assert_same(stored(kv, "w"), full(1))


@pytest.mark.parametrize("next", [None, TwoBit(0.5)], ids=str)
def test_keys_of_a_replaced_compression_are_not_expected(next):
    kv = torchkv.create("device")
    kv.set_gradient_compression([{"keys": "lost", "type": "2bit"}])
    kv.set_gradient_compression(next)
    kv.init("w", full(0))
    kv.push("w", full(1))


def test_an_optimizer_leaves_the_keys_of_the_compression_expected():
    kv = torchkv.create("device")
    kv.set_gradient_compression([{"keys": "lost", "type": "2bit"}])
    kv.set_optimizer("sgd")
    kv.init("w", full(0))
    with pytest.raises(KeyError, match="'lost'"):
        kv.push("w", full(1))


def test_a_closed_store():
    kv = torchkv.create("device")
    kv.close()
    with pytest.raises(RuntimeError, match="closed"):
        kv.set_gradient_compression(TwoBit())
    with pytest.raises(RuntimeError, match="closed"):
        _ = kv.gradient_compression
