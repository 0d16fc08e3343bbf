"""A seed of the simulated network replays a run message for message.

TORCHKV_SIMULATE is the program torchkv_simulate, which `make test` builds.
"""

import subprocess

import pytest

import programs


def replay(seed, mode, profile):
    program = programs.path_of("TORCHKV_SIMULATE")
    return subprocess.run(
        [program, "--one", str(seed), mode, profile, "-v"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


@pytest.mark.parametrize(
    ("mode", "profile"),
    [("sync", "restart"), ("async", "crash"), ("ssp", "flaky"), ("quorum", "calm")],
)
def test_a_seed_replays_its_run(mode, profile):
    log = replay(11, mode, profile)
    assert log.count("\n") > 200
    assert replay(11, mode, profile) == log
    assert replay(12, mode, profile) != log
