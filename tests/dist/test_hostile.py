"""Ranks that train while a stranger attacks their sockets: see hostile.py."""

import pytest

import hostile
import ranks

FAST = 700  # frames of each mode: together about 2,000
SLOW = 4_000


def attack(mode, frames):
    try:
        report = hostile.attack_job(mode, frames)
    except ranks.NoHosts as error:
        pytest.skip(str(error))
    assert hostile.problems(report) == [], report
    assert report.sent == frames


@pytest.mark.parametrize("mode", ["ipc", "none", "curve"])
def test_a_stranger_changes_nothing(mode):
    attack(mode, FAST)


@pytest.mark.slow
@pytest.mark.parametrize("mode", hostile.MODES)
def test_a_stranger_changes_nothing_for_longer(mode):
    attack(mode, SLOW)


def test_who_has_the_token_crashes_no_rank():
    attack("insider", 200)
