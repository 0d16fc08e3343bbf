"""The benchmark of optimizers on a GPU runs, tiny, also without one."""

import pytest
import torch

import cuda_optimizers
from cuda_optimizers import ADAMW, KINDS, MOMENTUM, OURS, TORCH
from gpu_grid import COPY, Case
from smoke import assert_rounds, run_smoke

on_devices = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)


@on_devices
def test_measures_both_optimizers(tmp_path, device):
    output, written = run_smoke("cuda_optimizers", tmp_path, "--device", device)
    names = dict.fromkeys(case["name"] for case in written["cases"])
    titles = [kind.title for kind, _ in KINDS]
    assert list(names) == [
        f"{t}, {dtype}" for t in titles for dtype in ("fp32", "bf16")
    ]
    for case in written["cases"]:
        peers = [TORCH] if case["name"].endswith("fp32") else []
        assert_rounds(case["seconds"], [COPY, OURS, *peers])
        assert case["title"] in output
    limits = [target["limit"] for target in written["targets"]]
    assert limits == [92] * 4 + [1.2, 1]


@pytest.mark.parametrize(
    ("num_states", "dtype", "replicas", "num_bytes"),
    [
        (1, torch.float32, 2, 24),  # per element
        (2, torch.float32, 2, 32),
        (2, torch.float32, 8, 56),
        (1, torch.bfloat16, 2, 22),
        (2, torch.bfloat16, 2, 30),
    ],
)
def test_bytes_that_a_push_must_move(num_states, dtype, replicas, num_bytes):
    per_byte = cuda_optimizers.moved_per_byte(replicas, num_states, dtype)
    assert per_byte * dtype.itemsize == num_bytes


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [MOMENTUM, ADAMW], ids=lambda kind: kind.title)
def test_a_wrong_step_is_not_timed(kind, dtype, device):
    case = Case("", 2, 4000, 12_000, 3)
    contestants = cuda_optimizers.contestants_of(kind, case, dtype, device)
    assert (TORCH in contestants) == (dtype is torch.float32)
    for contestant in contestants.values():
        assert not contestant.agrees()
        contestant.run(1)
        assert contestant.agrees()
        contestant.run(1)
        assert not contestant.agrees()
