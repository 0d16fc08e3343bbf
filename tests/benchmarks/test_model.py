"""The model benchmark runs, tiny; its lists are scaled to the available memory."""

import pytest
import torch

import model
from mxnet_peer import PYTHON
from parameter_lists import num_parameters
from smoke import assert_rounds, run_smoke


def test_measures_both_models(tmp_path):
    output, written = run_smoke("model", tmp_path, "--no-mxnet", "--rounds=4")
    resnet, opt = written["models"]
    assert (resnet["model"], resnet["keys"]) == ("ResNet-50", 161)
    assert (opt["model"], opt["dtype"]) == ("OPT-1.3B", "torch.bfloat16")
    for measured in (resnet, opt):
        assert_rounds(measured["seconds"], model.CONTESTANTS)
        for name in measured["seconds"]:
            assert name in output
    assert [target["limit"] for target in written["targets"]] == [3.8, 1.5]


@pytest.mark.skipif(not PYTHON.exists(), reason="needs `make bench-peers`")
def test_resnet_meets_mxnet_which_has_no_bf16(tmp_path):
    _, written = run_smoke("model", tmp_path)
    resnet, opt = written["models"]
    assert "MXNet" in resnet["seconds"]
    assert not any("MXNet" in name for name in opt["seconds"])
    assert all(target["value"] for target in written["targets"])


@pytest.mark.parametrize("gibibytes", [8, 16, 24, 64])
def test_the_transformer_fits_into_memory(gibibytes, monkeypatch):
    available = gibibytes * 2**30
    monkeypatch.setattr(model, "available_bytes", lambda: available)
    resnet, opt = model.models(smoke=False)
    assert num_parameters(resnet.shapes) == 25_557_032
    assert opt.dtype == torch.bfloat16
    needed = model.SHARED_COPIES * opt.num_bytes
    assert needed <= model.MEMORY_FRACTION * available
    whole = 16 * 24 + 4
    assert len(opt.shapes) == whole or needed > 0.6 * model.MEMORY_FRACTION * available


def test_the_fastest_foreach_counts():
    first, second, third = model.FOREACH
    times = {first: [3.0] * 3, second: [2.0] * 3, third: [1.0, 4.0, 4.0]}
    assert model.fastest_foreach(times) == second
    resnet = {**times, model.OURS: [1.0] * 3}
    mxnet, foreach = model.targets_of(resnet)
    assert mxnet.value is None
    assert foreach.value == 2.0
    assert second in foreach.what
