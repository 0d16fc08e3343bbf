"""The benchmark of rows of tables on a GPU runs, tiny, also without one."""

import pytest

import cuda_rows
from cuda_rows import EMBEDDING, LOOKUP, LOOKUPS, OURS, SPARSE, TORCH
from smoke import assert_rounds, run_smoke


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)
def test_measures_all_cases(tmp_path, device):
    output, written = run_smoke("cuda_rows", tmp_path, "--device", device)
    *sparse, lookups = written["cases"]
    assert [case["case"] for case in sparse] == [tables.case for tables in SPARSE]
    for case in sparse:
        assert_rounds(case["seconds"], [OURS, TORCH])
    assert lookups["case"] == LOOKUPS
    assert_rounds(lookups["seconds"], [LOOKUP, EMBEDDING])
    assert len(written["targets"]) == len(SPARSE)
    assert f"{LOOKUPS}: {LOOKUP}" in output


def test_targets_compare_with_the_other():
    lookups = {LOOKUP: [3.0] * 3, EMBEDDING: [1.0] * 3}
    pushes = {OURS: [3.0] * 3, TORCH: [1.5] * 3}
    (target,) = cuda_rows.targets_of(
        [{"case": "", "seconds": seconds} for seconds in (pushes, lookups)]
    )
    assert (target.value, target.reached) == (0.5, False)
