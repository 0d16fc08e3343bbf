"""The tutorial for several processes prints what it says."""

from pathlib import Path

import pytest
import torch.distributed.run

from helpers import run_program

EXAMPLE = Path(__file__).parents[2] / "examples" / "dist_push_pull.py"


@pytest.mark.parametrize(("num_processes", "total", "updated"), [(2, 3, 7), (3, 6, 12)])
def test_values_of_all_processes(num_processes, total, updated):
    result = run_program(
        torch.distributed.run.__file__,
        "--standalone",
        f"--nproc-per-node={num_processes}",
        EXAMPLE,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "after init: 2",
        f"the sum over {num_processes} processes: {total}",
        f"after the updater: {updated}",
    ]
