"""The fine-tuning example, stopped and resumed, ends with the same bits."""

import re
import subprocess
import sys
from pathlib import Path

import torch

from helpers import assert_same, run_program

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_digits.py"


def run(tmp_path, *options):
    result = run_program(EXAMPLE, "--devices", "cpu,cpu", *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def assert_same_tree(actual, expected, note):
    assert type(actual) is type(expected), note
    if isinstance(expected, dict):
        assert list(actual) == list(expected), note
        for key in expected:
            assert_same_tree(actual[key], expected[key], f"{note}, {key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), note
        for i, pair in enumerate(zip(actual, expected, strict=True)):
            assert_same_tree(*pair, f"{note}, {i}")
    elif isinstance(expected, torch.Tensor):
        assert_same(actual, expected, note)
    else:
        assert actual == expected, note


def saved_in(path):
    """A checkpoint without the store's type, and its count of updates and loads."""
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["trainer"]["type"]
    for item in checkpoint["trainer"]["keys"].values():
        del item["version"]
    return checkpoint


def test_a_resumed_run_ends_with_the_bits_of_a_whole_one(tmp_path):
    whole = run(tmp_path, "--epochs", "6", "--checkpoint", "whole.pt")
    rest = ("--epochs", "6", "--checkpoint", "parts.pt")
    first = run(tmp_path, *rest, "--stop-after", "2")
    second = run(tmp_path, *rest, "--resume", "--stop-after", "3")
    third = run(tmp_path, *rest, "--resume")

    lines = whole.splitlines()
    assert first.splitlines() == lines[:2]
    assert second.splitlines() == ["resumed after epoch 2", lines[2]]
    assert third.splitlines() == ["resumed after epoch 3", *lines[3:]]
    saved = [saved_in(tmp_path / name) for name in ("parts.pt", "whole.pt")]
    assert saved[1]["epoch"] == 6
    assert_same_tree(*saved, "checkpoint")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts.pt", "whole.pt"]


def run_ranks(tmp_path, *options):
    """With two processes of one replica each."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--nproc-per-node", "2", str(EXAMPLE)),
        *("--devices", "cpu", "--kvstore", "dist_sync", *options),
    ]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_two_processes_resume_with_the_bits_of_a_whole_run_of_one(tmp_path):
    whole = run(tmp_path, "--epochs", "2", "--checkpoint", "whole.pt")
    parts = ("--epochs", "2", "--checkpoint", "parts.pt")
    first = run_ranks(tmp_path, *parts, "--stop-after", "1")
    second = run_ranks(tmp_path, *parts, "--resume")

    # The loss is that of rank 0's share.
    accuracies = [line.partition(", ")[2] for line in whole.splitlines()]
    lines = (first + second).splitlines()
    assert lines.pop(1) == "resumed after epoch 1"
    assert [line.partition(", ")[2] for line in lines] == accuracies
    saved = [saved_in(tmp_path / name) for name in ("parts.pt", "whole.pt")]
    assert_same_tree(*saved, "checkpoint")


def test_it_reads_97_percent_of_held_out_scans(tmp_path):
    last = run(tmp_path).splitlines()[-1]
    found = re.fullmatch(
        r"epoch 20: loss \d\.\d+, (\d+\.\d+)% of held-out scans correct", last
    )
    assert found is not None, last
    assert float(found[1]) >= 97
