"""The tutorial prints what the contract's first three transcripts say."""

import runpy
from pathlib import Path

import pytest
import torch

from helpers import run_program

EXAMPLE = Path(__file__).parents[2] / "examples" / "local_push_pull.py"

# What is printed, in order: a line, or a tensor of shape (2, 3) by what it is full of.
TRANSCRIPT = [
    "--- A. One key ---",
    ("after init with 2:", 2),
    ("after a push of 8:", 8),
    ("after a push of 1 from each of 4 devices:", 4),
    ("with the updater stored += input * 2:", 4),
    "update on key: 3",
    ("after a push of 1:", 6),
    ("pulled to device 0:", 6),
    ("pulled to device 1:", 6),
    ("pulled to device 2:", 6),
    ("pulled to device 3:", 6),
    "--- B. A list of keys ---",
    "update on key: 5",
    "update on key: 7",
    "update on key: 9",
    ("b[1] after a push of 1 to every key:", 3),
    "update on key: 5",
    "update on key: 7",
    "update on key: 9",
    ("b[1][1] after a push of 1 from 4 devices to every key:", 11),
    '--- C. Type "device" ---',
    ("after init with -2:", -2),
    ("after a push of -7:", -7),
    ("after a push of 1 from each of 3 devices:", 3),
    ("the last of four keys after init with -3:", -3),
    ("the last of four keys after a push of -0.1 from 3 devices:", -0.3),
    ("key 3 with the updater stored += input * 0.01:", 3),
    ("key 3 after a push of 5:", 3.05),
]


def transcript_text():
    lines = []
    for entry in TRANSCRIPT:
        if isinstance(entry, str):
            lines.append(entry)
        else:
            title, value = entry
            lines += [title, str(torch.full((2, 3), float(value)))]
    return "".join(line + "\n" for line in lines)


@pytest.fixture
def all_decimals():
    """Lets a float32 print with as many digits as tell it from its neighbours."""
    torch.set_printoptions(precision=10)
    yield
    torch.set_printoptions(profile="default")


def test_runs_as_it_is_and_prints_the_transcripts():
    result = run_program(EXAMPLE)
    assert result.stderr == ""
    assert result.returncode == 0
    assert result.stdout == transcript_text()


@pytest.mark.usefixtures("all_decimals")
def test_printed_values_have_the_bits_of_the_transcripts(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed == transcript_text()
    assert "3.0499999523" in printed  # the digits are there to be compared
