"""How tools/gpu_check.py spends its time, with steps that need no GPU."""

import json
import re
import subprocess
import sys
import time

import pytest
import torch

import gpu_check
from gpu_check import Step


def python(name, code, limit_s=60.0, **variables):
    return Step(name, [sys.executable, "-c", code], limit_s, variables)


@pytest.fixture
def run_all(tmp_path):
    """Runs steps, and gives their outcomes and the log."""

    def run_all(*steps, budget_s=60.0):
        with (tmp_path / "log.txt").open("w+") as log:
            results = gpu_check.run_all(steps, budget_s, log)
        return results, (tmp_path / "log.txt").read_text()

    return run_all


def test_outcomes(run_all):
    results, log = run_all(
        python("first", "print('fine')"),
        python("second", "import os, sys; print(os.environ['X']); sys.exit(3)", X="y"),
        python("third", "print('== still run')"),
    )
    assert [r.outcome for r in results] == ["passed", "failed (3)", "passed"]
    assert [r.last_words for r in results] == ["fine", "y", "still run"]
    assert re.findall("=== (.*?):", log) == ["first", "second", "third"]


def test_nothing_without_a_build(run_all):
    results, _ = run_all(python("build", "raise SystemExit(1)"), python("tests", ""))
    assert [r.outcome for r in results] == ["failed (1)", "not run"]
    assert results[1].last_words == "no build"


def test_a_hung_step_ends_with_its_children(run_all, tmp_path):
    child = tmp_path / "child"
    sleep = f"import time; time.sleep(2); open({str(child)!r}, 'w')"
    hung = (
        "import subprocess, sys; print('here', flush=True); "
        f"subprocess.run([sys.executable, '-c', {sleep!r}])"
    )
    results, _ = run_all(
        python("build", ""), python("hung", hung, limit_s=1), python("tests", "")
    )
    assert [r.outcome for r in results] == ["passed", "out of time (1 s)", "passed"]
    assert results[1].last_words == "here"
    time.sleep(2)
    assert not child.exists()


def test_the_budget_ends(run_all):
    results, _ = run_all(
        python("build", ""),
        python("slow", "import time; time.sleep(60)"),
        python("tests", ""),
        budget_s=1.5,
    )
    assert results[1].outcome.startswith("out of time")
    assert results[2].outcome == "not run"


def test_missing_program(run_all):
    results, _ = run_all(python("build", ""), Step("memcheck", ["no-such-program"], 1))
    assert results[1].outcome == "not run"
    assert results[1].last_words == "no no-such-program"


def test_plan():
    steps = {step.name: step for step in gpu_check.plan(gpu_check.ROOT, "9.0")}
    sanitizers = ["memcheck", "initcheck", "synccheck"]
    assert list(steps)[:7] == ["build", "tests", "places", "digits", *sanitizers]
    assert steps["build"].variables["TORCH_CUDA_ARCH_LIST"] == "9.0"
    for name in ("tests", "places", *sanitizers):
        assert steps[name].variables["FAIL_WITHOUT_CUDA"]
    places = "cuda:0,cuda:0,cuda:0,cuda:0"
    on_places = [n for n, s in steps.items() if s.variables.get("TORCHKV_PLACES")]
    assert on_places == ["places", "digits"]
    assert all(steps[n].variables["TORCHKV_PLACES"] == places for n in on_places)
    assert places in steps["digits"].command


def test_the_sanitizers_have_tests_of_sums_and_of_optimizers():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", *gpu_check.SANITIZED],
        cwd=gpu_check.ROOT,
        capture_output=True,
        text=True,
    )
    for name in ("test_sums[torch.int8-1-tiny]", "test_optimizers_of_every_dtype"):
        assert name in done.stdout
    assert "large" not in done.stdout


def test_the_store_has_tests_on_places():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "cuda"]
        + gpu_check.ON_PLACES,
        cwd=gpu_check.ROOT,
        capture_output=True,
        text=True,
    )
    for name in ("test_transcripts.py", "test_random_ops.py", "test_cuda_streams.py"):
        assert f"tests/{name}::" in done.stdout


def test_main_writes_the_results(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_check, "gpu", lambda: ("9.0", {"gpu": "a fast one"}))
    steps = [python("build", "print('built')"), python("tests", "raise SystemExit(1)")]
    monkeypatch.setattr(gpu_check, "plan", lambda folder, arch: steps)
    monkeypatch.setattr(sys, "argv", ["gpu_check", str(tmp_path / "results")])
    with pytest.raises(SystemExit, match="not everything passed"):
        gpu_check.main()
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    assert results["gpu"] == "a fast one"
    assert [step["outcome"] for step in results["steps"]] == ["passed", "failed (1)"]
    summary = (tmp_path / "results" / "summary.txt").read_text()
    assert re.search("tests +failed", summary)


def test_without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="can use no GPU here"):
        gpu_check.gpu()
