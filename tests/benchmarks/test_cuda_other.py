"""The benchmark of other figures of a GPU runs, tiny, also without one."""

import pytest
import torch

import cuda_other
from compression import ONE_TOPK
from contestants import Arrays
from cuda_other import (
    ALIGNED,
    CAPTURED,
    CODECS,
    COMPRESSED,
    EAGER,
    FIRST,
    MISALIGNED,
    OPERATORS,
    OURS,
    PLAIN,
    PROCESS_OF,
)
from gpu import COPY
from smoke import assert_rounds, run_smoke


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)
def test_measures_all_cases(tmp_path, device):
    output, written = run_smoke("cuda_other", tmp_path, "--device", device)
    views, compressed, top, step, first = written["cases"]
    assert [case["case"] for case in written["cases"]] == [
        MISALIGNED,
        COMPRESSED,
        ONE_TOPK,
        CAPTURED,
        FIRST,
    ]
    assert_rounds(views["seconds"], [COPY, ALIGNED, MISALIGNED])
    assert_rounds(compressed["seconds"], [PLAIN, *(codec.type for codec in CODECS)])
    assert_rounds(top["seconds"], [OURS, OPERATORS])
    assert_rounds(step["seconds"], [CAPTURED, EAGER])
    assert_rounds(step["host_seconds"], [CAPTURED, EAGER])
    assert_rounds(first["seconds"], PROCESS_OF, rounds=1)
    assert_rounds(first["second_call"], PROCESS_OF, rounds=1)
    for name in PROCESS_OF:
        assert f"{FIRST}: {name}" in output
    limits = [(t["limit"], t["at_least"], t["unit"]) for t in written["targets"]]
    assert limits == [
        (70, True, "%"),
        (1, True, "x"),
        (1, True, "x"),
        (1, True, "x"),
        (1.5, False, "x"),
    ]


def test_views_begin_where_they_are_asked_to():
    arrays = Arrays([(5,)], torch.float32, 2, 0)
    for behind in (0, 1):
        (values,) = cuda_other.views(arrays, behind)
        for value, expected in zip(values, arrays.values[0], strict=True):
            assert value.storage_offset() == behind
            assert torch.equal(value, expected)


def test_targets_are_those_of_the_cases_that_were_measured():
    assert cuda_other.targets_of([]) == []
    seconds = {COPY: [3.0] * 3, ALIGNED: [3.0] * 3, MISALIGNED: [4.0] * 3}
    (target,) = cuda_other.targets_of([{"case": MISALIGNED, "seconds": seconds}])
    assert (target.value, target.reached) == (75, True)
    seconds = dict(zip(PROCESS_OF, [[3.0, 4.0, 9.0], [2.0, 2.0, 2.0]], strict=True))
    (target,) = cuda_other.targets_of([{"case": FIRST, "seconds": seconds}])
    assert (target.value, target.reached) == (2, False)
