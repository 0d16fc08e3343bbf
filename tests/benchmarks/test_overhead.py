"""The overhead benchmark runs, once and small: a smoke test, it times nothing."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "overhead.py"


def test_prints_a_table_and_writes_json_and_a_plot(tmp_path):
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.png"
    output = subprocess.run(
        [sys.executable, PROGRAM, "--rounds=2", f"--json={figures}", f"--plot={plot}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    written = json.loads(figures.read_text())
    assert set(written["limits"]) < set(written["ratios"])
    for call, ratio in written["ratios"].items():
        assert ratio > 0
        assert len(written["microseconds"][call]) == 2
        assert call in output
    assert all(
        milliseconds > 0
        for milliseconds in written["import_milliseconds"]["import torch"]
    )
    assert plot.read_bytes().startswith(b"\x89PNG")
