"""The benchmark of sparse gradients runs, tiny, and wrong steps are not timed."""

import pytest

import mxnet_peer
import sparse
from harness import Plan
from mxnet_peer import MXNet
from smoke import assert_rounds, run_smoke


def test_measures_all_cases(tmp_path):
    output, written = run_smoke("sparse", tmp_path, "--rounds=4", "--no-mxnet")
    beside_mxnet, *cases = written["cases"]
    assert_rounds(beside_mxnet["seconds"], [sparse.OURS, sparse.ROW_SPARSE])
    *_, all_rows = cases
    assert [each["optimizer"] for each in cases] == ["SGD"] * 3 + ["Adagrad"] * 3
    for each in cases:
        names = [sparse.OURS, sparse.TORCH if "coalesced" in each else sparse.DENSE]
        assert_rounds(each["seconds"], names)
    assert "coalesced" not in all_rows
    assert "Adagrad, some rows, uncoalesced" in output
    limits = [target["limit"] for target in written["targets"]]
    assert limits[:4] == [1.3, 3.0, 3.0, 1.3]


@pytest.mark.skipif(not mxnet_peer.PYTHON.exists(), reason="needs `make bench-peers`")
def test_mxnet_steps_the_same():
    with MXNet.start(mxnet_peer.PYTHON, threads=1, smoke=True) as mxnet:
        figures = sparse.measure_mxnet(sparse.SMOKE, Plan(3, 0.0, 0.0), mxnet)
    names = [sparse.OURS, sparse.ROW_SPARSE, *figures["mxnet"]]
    assert_rounds(figures["seconds"], names)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", sparse.KINDS, ids=lambda kind: kind.title)
@pytest.mark.parametrize("coalesced", [True, False])
def test_a_wrong_step_is_not_timed(kind, coalesced):
    values = sparse.rows_of(sparse.SMOKE, 40, 500, coalesced)
    expected = sparse.first_step(kind, values)
    torchs = sparse.Torch(kind, values)
    way = sparse.contestant(torchs.push, lambda: torchs.table, expected)
    assert not way.agrees()  # no step has been made
    torchs.push()
    assert way.agrees()
    ids, _ = expected
    other = next(row for row in range(500) if row not in ids)
    torchs.table.data[other] = 1.0
    assert not way.agrees()
