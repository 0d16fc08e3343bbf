"""The C++ cores do what the model does: the same actions, in the same order.

TORCHKV_REPLAY is the program torchkv_replay, which `make test` builds.
"""

import re
import subprocess

import pytest

import programs
import traces
from psmodel import mutants
from psmodel.run import CELLS

SEEDS = 4
SLOW_SEEDS = 16


@pytest.fixture(scope="module")
def program():
    return programs.path_of("TORCHKV_REPLAY")


def replay(program, directory, lines):
    """(exit status, what the program says)"""
    path = directory / "trace"
    path.write_text("\n".join(lines) + "\n")
    result = subprocess.run(
        [program, path], stdout=subprocess.PIPE, text=True, timeout=250
    )
    return result.returncode, result.stdout


def expect_equal(program, directory, seeds, mode, profile):
    for seed in seeds:
        lines = traces.trace(seed, mode, profile)
        status, said = replay(program, directory, lines)
        assert status == 0, f"seed {seed} {mode} {profile}\n{said}"
        cores, events, actions = map(int, re.findall(r"\d+", said)[:3])
        assert cores == sum(line.startswith("core ") for line in lines)
        assert events == sum(line.startswith("! ") for line in lines)
        restored = sum(line.startswith("restored ") for line in lines)
        assert cores + restored + events + actions == len(lines)


@pytest.mark.parametrize("mode, profile", CELLS)
def test_cores_equal_the_model(program, tmp_path, mode, profile):
    expect_equal(program, tmp_path, range(SEEDS), mode, profile)


@pytest.mark.slow
@pytest.mark.parametrize("mode, profile", CELLS)
def test_cores_equal_the_model_for_many_seeds(program, tmp_path, mode, profile):
    seeds = range(SEEDS, SEEDS + SLOW_SEEDS)
    expect_equal(program, tmp_path, seeds, mode, profile)


def changed(start, old, new):
    """A trace with the last line that has both changed; `old` is a pattern."""
    for seed in range(100):
        lines = traces.trace(seed, "sync", "calm")
        for i in reversed(range(len(lines))):
            if lines[i].startswith(start) and re.search(old, lines[i]):
                return [
                    *lines[:i],
                    re.sub(old, new, lines[i], count=1),
                    *lines[i + 1 :],
                ]
    pytest.fail(f"no trace has a line {start} with {old}")


@pytest.mark.parametrize(
    "start, old, new",
    [
        ("send w", r"DONE (.*) version=\d+", r"DONE \1 version=77"),
        ("send s", r"PUSH (.*) floor=\d+", r"PUSH \1 floor=0"),
        ("send s", r"GOT (.*) got=\S+", r"GOT \1 got=77.0"),
        ("apply", r"number=\d+", "number=77"),
        ("return", r"value=\d+", "value=5"),
        ("! message", r"PULL (.*) opno=(\d+)", r"PULL \1 opno=9\2"),
        ("! message", r"VALUE (.*) payload=\d+", r"VALUE \1 payload=5"),
    ],
)
def test_a_change_of_a_trace_is_found(program, tmp_path, start, old, new):
    status, said = replay(program, tmp_path, changed(start, old, new))
    assert status == 1, said
    assert "the actions differ" in said


def test_an_action_too_many_or_too_few_is_found(program, tmp_path):
    lines = traces.trace(1, "sync", "calm")
    at = max(i for i, line in enumerate(lines) if line.startswith("send"))
    for other in (lines[:at] + lines[at + 1 :], lines[: at + 1] + lines[at:]):
        status, said = replay(program, tmp_path, other)
        assert status == 1, said
        assert "the actions differ" in said


@pytest.mark.parametrize(
    "bug, mode",
    [
        ("sum in order of arrival", "sync"),
        ("staleness off by one", "ssp"),
        ("grace for ever", "quorum"),
        ("region freed at GOT", "async"),
        ("first slice that threw ends the call", "sync"),
    ],
)
def test_a_bug_in_one_of_the_two_is_found(program, tmp_path, bug, mode):
    names = [name for name in mutants.MUTANTS if bug in name]
    if not names:
        pytest.fail(f"no planted bug {bug!r}")
    model = mutants.mutate(mutants.MUTANTS[names[0]][1])
    for seed in range(40):
        status, said = replay(
            program, tmp_path, traces.trace(seed, mode, "calm", model)
        )
        if status == 1 and "the actions differ" in said:
            return
    pytest.fail(f"{bug} was not found")


def test_an_unreadable_trace_is_an_error(program, tmp_path):
    for lines in ([], ["nonsense"], ["core server id=0"]):
        status, said = replay(program, tmp_path, lines)
        assert status != 0, said
