"""The benchmark of compression runs, tiny, and its contestants are checked."""

import torch

import compression
from compression_model import sent
from smoke import assert_rounds, run_smoke
from torchkv.compression import TopK


def test_measures_all_cases(tmp_path):
    output, written = run_smoke("compression", tmp_path, "--rounds=4")
    pushes = written["cases"][compression.PUSHES]
    assert_rounds(pushes, [compression.PLAIN, *(c.type for c in compression.CODECS)])
    for title in (compression.ONE_TOPK, compression.ONE_INT4):
        assert_rounds(written["cases"][title], [compression.OURS, compression.TORCH])
        assert title in output
    assert [target["limit"] for target in written["targets"]] == [1.5, 1.0, 0.5]


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
