"""The example of a store of one's own trains as one process does."""

import re
from pathlib import Path

import torch.distributed.run

from helpers import run_program

EXAMPLE = Path(__file__).parents[2] / "examples" / "register_store.py"


def test_ranks_have_the_same_line():
    result = run_program(
        torch.distributed.run.__file__, "--standalone", "--nproc-per-node=2", EXAMPLE
    )
    assert result.returncode == 0, result.stderr
    lines = dict(re.findall(r"rank (\d): (-?\d\.\d{6} -?\d\.\d{6})", result.stdout))
    assert sorted(lines) == ["0", "1"]
    assert lines["0"] == lines["1"]
    weight, bias = map(float, lines["0"].split())
    assert abs(weight - 3) < 0.3
    assert abs(bias + 1) < 0.2
