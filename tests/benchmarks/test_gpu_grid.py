"""The grid of a GPU's benchmarks: its cases and targets."""

import argparse

import pytest

import gpu_grid
from gpu_grid import COPY, Sizes
from harness import Contestant, Plan

PLAN = Plan(3, 0.0, 0.0)
OURS, PEER = "ours", "peer"
SIZES = Sizes([2, 4], [8, 800], 800, 100, PLAN)


def contestants_of(case):
    return {OURS: Contestant(lambda calls: 1.0 * calls, lambda: True)}


def measured(sizes=SIZES):
    return list(
        gpu_grid.measure_cases(
            "fp32", sizes, "cpu", lambda n: n + 1, lambda n: n, contestants_of
        )
    )


def test_cases():
    cases = measured()
    found = [(c["replicas"], c["replica_bytes"], c["moved_bytes"]) for c in cases]
    assert found == [(2, 8, 24), (4, 8, 40), (2, 800, 2400), (4, 800, 4000)]
    assert [case["turns"] for case in cases] == [5, 3, 1, 1]
    assert [case["title"] for case in cases][:2] == ["fp32, 2 x 8 B", "fp32, 4 x 8 B"]
    assert all(set(case["seconds"]) == {COPY, OURS} for case in cases)


def test_cases_that_do_not_fit_are_left_out(monkeypatch, capsys):
    needed = 800 * 2 + 2400
    monkeypatch.setattr(gpu_grid, "free_bytes", lambda device: needed / 0.89)
    found = [(case["replicas"], case["replica_bytes"]) for case in measured()]
    assert found == [(2, 8), (4, 8), (2, 800)]
    assert capsys.readouterr().out == "not enough memory: fp32, 4 x 800 B\n"


def test_a_case_that_fails_leaves_the_others():
    def contestants(case):
        if case.replicas == 4:
            raise RuntimeError("out of memory")
        return contestants_of(case)

    cases = list(
        gpu_grid.measure_cases(
            "fp32", SIZES, "cpu", lambda n: n + 1, lambda n: n, contestants
        )
    )
    assert ["error" in case for case in cases] == [False, True, False, True]
    assert cases[1]["title"] == "fp32, 4 x 8 B"


def case(replicas, replica_bytes, ours, peer=None):
    seconds = {COPY: [3.0] * 3, OURS: [ours] * 3}
    if peer:
        seconds[PEER] = [peer] * 3
    return {
        "title": f"{replicas} x {replica_bytes}",
        "name": "fp32",
        "replicas": replicas,
        "replica_bytes": replica_bytes,
        "moved_bytes": 6e9,
        "seconds": seconds,
    }


CASES = [
    case(2, 8, ours=6.0, peer=3.0),
    case(2, 800, ours=3.0, peer=6.0),
    case(4, 800, ours=2.0, peer=8.0),
    case(4, 800, ours=4.0),
]


def test_targets_of_copy_are_those_of_large_replicas():
    targets = gpu_grid.copy_targets(CASES, SIZES, OURS, 95)
    assert [round(target.value) for target in targets] == [100, 150, 75]
    assert [target.reached for target in targets] == [True, True, False]
    assert targets[0].row()[1:3] == ["100.00 %", ">= 95 %"]


def test_targets_of_peers_take_the_least():
    four, everywhere = gpu_grid.peer_targets(CASES, SIZES, OURS, {PEER: 1.5})
    assert (four.value, four.limit) == (4.0, 1.5)
    assert (everywhere.value, everywhere.limit) == (0.5, 1)
    missing, _ = gpu_grid.peer_targets(CASES[:2], SIZES, OURS, {PEER: 1.5})
    assert missing.value is None


def test_table():
    rows = gpu_grid.table("", CASES, OURS, [PEER]).rows
    assert rows[0] == ["2 x 8", "6 s", "6 s", "1", "50.0", "0.50"]
    assert rows[3][-1] == ""


@pytest.mark.parametrize("num_bytes", [1 << 10, 1 << 28])
def test_size_text(num_bytes):
    assert gpu_grid.size_text(num_bytes) in ("1024 B", "256 MiB")


def test_the_full_grid():
    sizes = gpu_grid.sizes_for(argparse.Namespace(smoke=False, rounds=None))
    assert sorted(sizes.replicas) == [1, 2, 4, 8]
    assert [size >> 20 for size in sizes.replica_bytes] == [256, 1024, 16, 1]
    assert sizes.large == 256 << 20
    assert sizes.rotated_bytes > 2 * 60e6  # the cache of an H200
