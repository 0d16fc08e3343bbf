"""The optimizers' benchmark runs, tiny, and every contestant makes the same step."""

import pytest
import torch

import optimizers
from contestants import Arrays
from mxnet_peer import PYTHON
from parameter_lists import resnet50, shrunk
from smoke import assert_rounds, run_smoke

OWN = [
    optimizers.OUR_PUSH,
    optimizers.TORCH_PUSH,
    optimizers.OURS,
    optimizers.TORCH,
]


def test_measures_both_optimizers(tmp_path):
    output, written = run_smoke("optimizers", tmp_path, "--no-mxnet", "--rounds=4")
    titles = [kind.title for kind in optimizers.KINDS]
    assert [each["optimizer"] for each in written["optimizers"]] == titles
    for each in written["optimizers"]:
        assert_rounds(each["seconds"], OWN)
    for name in OWN:
        assert name in output
    assert [target["limit"] for target in written["targets"]] == [4.0, 1.5, 1.3] * 2


@pytest.mark.skipif(not PYTHON.exists(), reason="needs `make bench-peers`")
def test_meets_mxnet(tmp_path):
    _, written = run_smoke("optimizers", tmp_path)
    for each in written["optimizers"]:
        assert "MXNet" in each["seconds"]
    assert all(target["value"] for target in written["targets"])


@pytest.mark.parametrize("kind", optimizers.KINDS, ids=lambda kind: kind.title)
def test_a_wrong_step_is_not_timed(kind):
    shapes = shrunk(resnet50())[:3]
    arrays = Arrays(shapes, torch.float32, optimizers.REPLICAS, 1)
    torchs = optimizers.Torch(kind, arrays)
    sums = [sum(values) for values in arrays.values]
    expected = optimizers.first_step(kind, sums)
    way = optimizers.contestant(torchs.push, lambda: torchs.stored, expected)
    assert not way.agrees()  # no step has been made
    torchs.push()
    assert way.agrees()
    torchs.push()
    assert not way.agrees()
