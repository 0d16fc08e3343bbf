"""The benchmark of models on a GPU runs, tiny, also without one."""

import pytest

import cuda_model
from cuda_model import OURS, TORCH
from gpu import COPY
from parameter_lists import num_parameters
from smoke import assert_rounds, run_smoke


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)
def test_measures_gpu_and_host(tmp_path, device):
    output, written = run_smoke("cuda_model", tmp_path, "--device", device)
    resnet, opt = written["models"]
    assert (resnet["model"], resnet["keys"]) == ("ResNet-50 (shrunk)", 161)
    assert opt["model"] == "OPT-1.3B (shrunk)"
    for measured in (resnet, opt):
        assert_rounds(measured["seconds"], [OURS, TORCH, COPY])
        assert_rounds(measured["host_seconds"], [OURS, TORCH])
        assert measured["moved_bytes"] == 36 * measured["parameters"]
        for clock in ("GPU", "host"):
            assert f"{measured['model']}, {measured['keys']} keys, {clock}" in output
    limits = [(t["limit"], t["at_least"], t["unit"]) for t in written["targets"]]
    assert limits == [(0.25, False, "ms"), (60.0, False, "us"), (1.0, True, "x")]


def test_targets_are_of_medians():
    figures = {
        "seconds": {OURS: [2e-4, 3e-4, 9e-4], TORCH: [6e-4] * 3},
        "host_seconds": {OURS: [5e-5, 4e-5, 9e-5]},
    }
    gpu, host, torchs = cuda_model.targets_of("ResNet-50", figures)
    assert (gpu.value, gpu.reached) == (pytest.approx(0.3), False)
    assert (host.value, host.reached) == (pytest.approx(50), True)
    assert torchs.value == pytest.approx(2)


def test_the_decoder_fits_into_memory(monkeypatch):
    for gibibytes in (24, 140):
        free = gibibytes << 30
        monkeypatch.setattr(cuda_model.gpu, "free_bytes", lambda device, f=free: f)
        resnet, opt = cuda_model.models(False, "cuda").values()
        assert num_parameters(resnet) == 25_557_032
        assert num_parameters(opt) * cuda_model.HELD_PER_PARAMETER <= free
    assert len(opt) > 200
