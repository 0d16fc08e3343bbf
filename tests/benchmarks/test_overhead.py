"""The overhead benchmark runs, once and small: a smoke test without timing."""

import pytest

from mxnet_peer import PYTHON
from smoke import assert_rounds, run_smoke


def test_prints_a_table_and_writes_json_and_a_plot(tmp_path):
    output, written = run_smoke("overhead", tmp_path, "--rounds=2", "--no-mxnet")
    assert set(written["limits"]) < set(written["ratios"])
    for call, ratio in written["ratios"].items():
        assert ratio > 0
        assert len(written["microseconds"][call]) == 2
        assert call in output
    assert all(
        milliseconds > 0
        for milliseconds in written["import_milliseconds"]["import torch"]
    )
    assert_rounds(written["small"]["seconds"], ["torchkv push, pull"])
    assert list(written["keys"]) == ["100", "1000"]
    for times in written["keys"].values():
        assert_rounds(times, ["push", "pull", "torch._foreach_copy_"])
    assert written["mxnet"] is None
    assert [t["what"] for t in written["targets"] if t["value"] is None] == [
        "push, pull of 4 x 16 floats, faster than MXNet"
    ]


@pytest.mark.skipif(not PYTHON.exists(), reason="needs `make bench-peers`")
def test_four_replicas_meet_mxnet(tmp_path):
    output, written = run_smoke("overhead", tmp_path)
    small = written["small"]
    assert {"torchkv push, pull", "MXNet"} <= set(small["seconds"])
    assert f"MXNet ({small['mxnet']['MXNet']})" in output
    assert written["mxnet"]["mxnet"] == "1.9.1"
    assert all(target["value"] for target in written["targets"])
