"""The benchmark of several processes runs, tiny, and a failing rank is reported."""

import math
import sys

import pytest

import distributed
from jobs import Job, Process, prefix_of_other_host
from mxnet_peer import PYTHON
from smoke import assert_rounds, run_smoke

HAS_TCP = prefix_of_other_host() is not None


def is_expected(name):
    return not name.startswith("MXNet") and (HAS_TCP or not name.endswith("tcp"))


def test_measures_all_rows(tmp_path):
    output, written = run_smoke(
        "distributed", tmp_path, "--no-mxnet", "--rounds=4", "--idle=1"
    )
    rows = distributed.rows(smoke=True)
    assert len(written["cases"]) == len(rows) + HAS_TCP  # the pull behind a push
    for row, case in zip(rows, written["cases"], strict=False):
        contestants = list(filter(is_expected, row.contestants))
        assert case["title"] == row.title
        assert_rounds(case["seconds"], contestants, rounds=4)
        for name in contestants:
            assert name in output
    limits = [goal.limit for row in rows for goal in row.goals]
    copies = [row.most_copies for row in rows if row.most_copies < math.inf]
    assert sorted(target["limit"] for target in written["targets"]) == sorted(
        [*limits, *copies, 5, 0.1]
    )
    assert 0 < written["idle_percent"] < 100


def test_titles_are_distinct_and_ours_come_first():
    rows = distributed.rows(smoke=False)
    assert len({row.title for row in rows}) == len(rows)
    for row in rows:
        assert row.contestants[0].startswith("torchkv")
        for goal in row.goals:
            assert {goal.ours, goal.other} <= set(row.contestants)


@pytest.mark.skipif(not PYTHON.exists(), reason="needs `make bench-peers`")
def test_meets_mxnet(tmp_path):
    _, written = run_smoke("distributed", tmp_path, "--idle=1")
    for row, case in zip(distributed.rows(smoke=True), written["cases"], strict=False):
        assert list(case["seconds"]) == list(row.contestants)
    assert all(target["value"] is not None for target in written["targets"])


def test_a_rank_that_fails_is_named():
    job = Job("some job")
    job.ranks.append(Process([sys.executable, "-c", "raise ValueError('x')"], {}))
    with job, pytest.raises(RuntimeError, match=r"some job, rank 0: run: .*ended"):
        job.ask("run")


def test_the_slower_rank_counts():
    small_row, list_row = distributed.rows(smoke=True)[:2]
    answers = [{"seconds": [1.0, 1.0, 4.0]}, {"seconds": [1.5, 1.5, 1.5]}]
    assert distributed.seconds_of(list_row, answers) == 2.0
    assert distributed.seconds_of(small_row, answers) == 1.5
