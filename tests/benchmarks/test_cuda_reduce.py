"""The benchmark of sums on a GPU runs, tiny, also without one."""

import itertools

import pytest
import torch

import cuda_reduce
from gpu_grid import COPY, Case
from smoke import assert_rounds, run_smoke

pytestmark = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)


def test_measures_every_dtype_number_and_size(tmp_path, device):
    output, written = run_smoke("cuda_reduce", tmp_path, "--device", device)
    cases = [(c["name"], c["replicas"], c["replica_bytes"]) for c in written["cases"]]
    grid = itertools.product(["fp32", "bf16"], [1 << 14, 1 << 10], [1, 4])
    assert cases == [(name, replicas, size) for name, size, replicas in grid]
    for case in written["cases"]:
        assert_rounds(case["seconds"], [COPY, cuda_reduce.OURS, *cuda_reduce.PEERS])
        assert case["title"] in output
        replicas = case["replicas"]
        assert case["moved_bytes"] == (replicas + 1) * case["replica_bytes"]
    limits = [target["limit"] for target in written["targets"]]
    assert limits == [95] * 4 + [2.3, 1, 1.5, 1]
    assert bool(written["gpu"]) == (device == "cuda")


def test_a_wrong_sum_is_not_timed(device):
    case = Case("fp32", 2, 4000, 12_000, 3)
    contestants = cuda_reduce.contestants_of(case, torch.float32, device)
    assert len(contestants) == 3
    for contestant in contestants.values():
        assert not contestant.agrees()
        contestant.run(1)
        assert contestant.agrees()
