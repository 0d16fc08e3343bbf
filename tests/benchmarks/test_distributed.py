"""The benchmark of several processes runs, tiny, and a failing rank is reported."""

import sys

import pytest

import distributed
from jobs import Job, Process, prefix_of_other_host
from mxnet_peer import PYTHON
from smoke import assert_rounds, run_smoke

VARIANTS = [distributed.OURS, distributed.OURS_TWO_CALLS, distributed.OURS_SOCKETS]
OWN = [
    [*VARIANTS, distributed.GLOO_SUM],
    [*VARIANTS, distributed.GLOO, distributed.GLOO_VIEWS],
    [distributed.OURS],
]


def test_measures_all_rows(tmp_path):
    output, written = run_smoke(
        "distributed", tmp_path, "--no-mxnet", "--rounds=4", "--idle=1"
    )
    small, sync, async_, *behind = written["cases"]
    for case, contestants in zip([small, sync, async_], OWN, strict=True):
        assert_rounds(case["seconds"], contestants, rounds=4)
        for name in contestants:
            assert name in output
    assert "161 keys" in sync["title"] and "dist_async" in async_["title"]
    assert len(behind) == (1 if prefix_of_other_host() else 0)
    assert [target["limit"] for target in written["targets"]] == [
        *(6.0, 3.0, 3.5, 1.0, 3.5),
        *(5, 0.1),
    ]
    assert 0 < written["idle_percent"] < 100


@pytest.mark.skipif(not PYTHON.exists(), reason="needs `make bench-peers`")
def test_meets_mxnet(tmp_path):
    _, written = run_smoke("distributed", tmp_path, "--idle=1")
    for case in written["cases"][:3]:
        assert {distributed.MXNET, distributed.MXNET_PUSHPULL} <= case["seconds"].keys()
    assert [target["value"] is None for target in written["targets"][:5]] == [False] * 5


def test_a_rank_that_fails_is_named():
    job = Job("some job")
    job.ranks.append(Process([sys.executable, "-c", "raise ValueError('x')"], {}))
    with job, pytest.raises(RuntimeError, match=r"some job, rank 0: run: .*ended"):
        job.ask("run")


def test_the_slower_rank_counts():
    list_row, small_row = distributed.rows(smoke=True)[1::-1]
    answers = [{"seconds": [1.0, 1.0, 4.0]}, {"seconds": [1.5, 1.5, 1.5]}]
    assert distributed.seconds_of(list_row, answers) == 2.0
    assert distributed.seconds_of(small_row, answers) == 1.5
