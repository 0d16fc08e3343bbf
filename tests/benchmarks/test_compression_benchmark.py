"""The benchmark of compression runs, tiny, and its contestants are checked."""

import pytest
import torch

import compression
import mxnet_peer
from compression_model import sent
from harness import Plan
from mxnet_peer import MXNet
from smoke import assert_rounds, run_smoke
from torchkv.compression import TopK


def test_measures_all_cases(tmp_path):
    output, written = run_smoke("compression", tmp_path, "--rounds=4", "--no-mxnet")
    assert_rounds(written["two_bit"]["seconds"], [compression.OURS])
    pushes = written["cases"][compression.PUSHES]
    assert_rounds(pushes, [compression.PLAIN, *(c.type for c in compression.CODECS)])
    for title in (compression.ONE_TOPK, compression.ONE_INT4):
        assert_rounds(written["cases"][title], [compression.OURS, compression.TORCH])
        assert title in output
    assert [target["limit"] for target in written["targets"]] == [*(1.5, 4.0, 1.0, 0.5)]


@pytest.mark.skipif(not mxnet_peer.PYTHON.exists(), reason="needs `make bench-peers`")
def test_mxnet_sends_the_same():
    with MXNet.start(mxnet_peer.PYTHON, threads=1, smoke=True) as mxnet:
        figures = compression.measure_two_bit(1000, Plan(3, 0.0, 0.0), mxnet)
    assert set(figures["mxnet"].values()) <= {
        f"push; device; {engine}" for engine in ("NaiveEngine", "default engine")
    }
    assert_rounds(figures["seconds"], [compression.OURS, *figures["mxnet"]])


def test_torch_topk_sends_what_ours_does():
    value = torch.randn(1000)
    torchs, residual = compression.TorchTopK(value, 10), torch.zeros(1000)
    for _ in range(3):
        torchs.push()
        whole = value + residual
        expected = sent(TopK(k=10), whole)
        residual = whole - expected
        assert torch.equal(torchs.sent, expected)
        assert torch.equal(torchs.residual, residual)


def test_a_wrong_sum_is_not_timed():
    value = torch.randn(1000)
    assert compression.contestant(lambda: None, lambda: value, value).agrees()
    assert not compression.contestant(lambda: None, lambda: -value, value).agrees()
    wrong = value.clone()
    wrong[3] = torch.nan
    assert not compression.contestant(lambda: None, lambda: wrong, value).agrees()
