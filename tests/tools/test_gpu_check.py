"""How tools/gpu_check.py spends its time, with steps that need no GPU."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gpu_check
from gpu_check import GROUPS, Step
from helpers import run_program

PROGRAM = gpu_check.ROOT / "tools" / "gpu_check.py"


def python(name, code, share=1.0, needs=(), **variables):
    return Step(name, [sys.executable, "-c", code], share, variables, needs)


@pytest.fixture
def run_all(tmp_path):
    """Runs steps, and gives their outcomes and the log."""

    def run_all(*steps, budget_s=60.0, absent=()):
        with (tmp_path / "log.txt").open("w") as log:
            results = gpu_check.run_all(steps, budget_s, log, absent)
        return results, (tmp_path / "log.txt").read_text()

    return run_all


# --- Steps


def test_outcomes(run_all):
    results, log = run_all(
        python("first", "print('fine')"),
        python("second", "import os, sys; print(os.environ['X']); sys.exit(3)", X="y"),
        python("third", "print('== still run')"),
    )
    assert [r.outcome for r in results] == ["passed", "failed (3)", "passed"]
    assert [r.last_words for r in results] == ["fine", "y", "still run"]
    assert re.findall("=== (.*?):", log) == ["first", "second", "third"]


def test_nothing_without_a_build(run_all, monkeypatch, tmp_path):
    results, _ = run_all(python("build", "raise SystemExit(1)"), python("tests", ""))
    assert [r.outcome for r in results] == ["failed (1)", "not run"]
    assert results[1].last_words == "no build"
    monkeypatch.setattr(gpu_check, "LIBRARY", tmp_path / "none.so")
    results, _ = run_all(python("tests", ""))
    assert results[0].last_words == "no build"


def test_what_a_step_lacks(run_all):
    results, _ = run_all(
        python("build", "", needs=["g++"]),
        python("memcheck", "", needs=["pytest", "compute-sanitizer"]),
        absent=["compute-sanitizer", "ncu"],
    )
    assert [r.outcome for r in results] == ["passed", "not run"]
    assert results[1].last_words == "no compute-sanitizer"


INTERRUPTED = """
import time
try:
    print("here", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("what I had")
    raise SystemExit(2)
"""


def test_a_step_that_is_stopped_shows_what_it_had(run_all):
    results, log = run_all(
        python("build", ""),
        python("slow", INTERRUPTED),
        python("tests", ""),
        budget_s=8,
    )
    assert results[1].outcome.startswith("out of time")
    assert results[1].last_words == "what I had"
    assert results[2].outcome == "passed"
    assert "here\nwhat I had\n" in log


@pytest.mark.slow
def test_a_hung_step_ends_with_its_children(run_all, tmp_path):
    child = tmp_path / "child"
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    sleep = deaf + f"time.sleep(6); open({str(child)!r}, 'w')"
    hung = (
        f"{deaf}import subprocess, sys; print('here', flush=True); "
        f"subprocess.run([sys.executable, '-c', {sleep!r}])"
    )
    started = time.monotonic()
    results, _ = run_all(
        python("build", ""),
        python("hung", hung, share=2),
        python("tests", ""),
        budget_s=6,
    )
    assert results[1].outcome.startswith("out of time")
    assert results[1].last_words == "here"
    assert results[2].outcome == "passed"
    assert time.monotonic() - started < 6
    time.sleep(7)
    assert not child.exists()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_step_starts_ends_it(run_all, monkeypatch, end):
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)
            signal.raise_signal(end)
            assert self.poll() is None  # the handler has not run yet

    def handler(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Popen)
    previous = signal.signal(end, handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_all(python("build", "import time; time.sleep(100)"))
        assert signal.getsignal(end) is handler
    finally:
        signal.signal(end, previous)
    (process,) = started
    with process:  # waits for it, and closes its output
        pass
    assert process.returncode == -signal.SIGKILL


def test_time_that_is_left_is_for_the_others(run_all):
    wait = "import time; time.sleep(2.5)"
    results, _ = run_all(
        python("build", ""), python("tests", wait, share=0.01), budget_s=6
    )
    assert [r.outcome for r in results] == ["passed", "passed"]


def test_the_budget_ends(run_all):
    results, _ = run_all(
        python("build", "import time; time.sleep(60)"),
        python("tests", ""),
        budget_s=1.5,
    )
    assert results[0].outcome.startswith("out of time")
    assert results[1].outcome == "not run"


FAILING = """
import time

def test_a():
    assert 1 == 2, "the reason"

def test_b():
    time.sleep(60)
"""


def test_failures_are_shown_when_they_happen(run_all, tmp_path, capfd):
    tests = tmp_path / "test_failing.py"
    tests.write_text(FAILING)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "print_failures"]
    command += ["-p", "no:cacheprovider", "-c", "/dev/null", str(tests)]
    results, _ = run_all(Step("tests", command, 1), budget_s=16)
    assert results[0].outcome.startswith("out of time")
    shown = capfd.readouterr().out
    assert re.search(r"^! call of .*test_failing.py::test_a$", shown, re.MULTILINE)
    assert re.search(r"^! E .*the reason", shown, re.MULTILINE)
    assert "test_b" not in shown.partition("out of time")[0]


@pytest.mark.parametrize("there", [True, False])
def test_tests_run_without_pytest_timeout(tmp_path, there):
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\ntimeout = 600\naddopts = --strict-config\n"
    )
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    hidden = [] if there else ["-p", "no:timeout", "-p", "hide_timeout"]
    (tmp_path / "hide_timeout.py").write_text(
        "import importlib.util\n"
        "found = importlib.util.find_spec\n"
        "def find_spec(name, *rest):\n"
        "    return None if name == 'pytest_timeout' else found(name, *rest)\n"
        "importlib.util.find_spec = find_spec\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *hidden, "-p", "print_failures"],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{PROGRAM.parent}:{tmp_path}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# --- The plan


def steps_of(*only):
    return {step.name: step for step in gpu_check.plan(only, gpu_check.ROOT)}


def test_plan():
    steps = steps_of(*GROUPS)
    sanitizers = ["memcheck", "initcheck", "synccheck", "racecheck"]
    benchmarks = [
        *("cuda_model", "cuda_other", "cuda_reduce", "cuda_optimizers", "cuda_rows")
    ]
    names = ["build", "check_sass", "tests", *benchmarks, "places", *sanitizers]
    assert list(steps) == [*names, "digits"]
    assert sorted(benchmarks) == sorted(
        path.stem for path in (gpu_check.ROOT / "benchmarks").glob("cuda_*.py")
    )
    # All architectures, as in a user's build; no warning of another compiler ends it.
    assert steps["build"].variables == {
        "TORCH_CUDA_ARCH_LIST": "",
        "TORCHKV_USE_CUDA": "1",
        "TORCHKV_WERROR": "0",
    }
    for name in ("tests", "places", *sanitizers):
        assert steps[name].variables["FAIL_WITHOUT_CUDA"]
    places = "cuda:0,cuda:0,cuda:0,cuda:0"
    on_places = [n for n, s in steps.items() if s.variables.get("TORCHKV_PLACES")]
    assert on_places == ["places", "digits"]
    assert all(steps[n].variables["TORCHKV_PLACES"] == places for n in on_places)
    assert places in steps["digits"].command


def test_steps_in_any_order():
    assert list(steps_of("digits", "tests")) == ["digits", "tests"]
    assert gpu_check.names_of("tests, build,tests") == ["tests", "build"]


def collected(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", *arguments],
        cwd=gpu_check.ROOT,
        capture_output=True,
        text=True,
    )
    return done.stdout


def test_the_sanitizers_have_tests_of_sums_and_of_optimizers():
    tests = collected(*gpu_check.SANITIZED)
    for name in ("test_sums[torch.int8-1-tiny]", "test_optimizers_of_every_dtype"):
        assert name in tests
    assert "large" not in tests


@pytest.mark.slow
def test_the_tests_are_those_of_the_store():
    chosen = ["-m", "cuda", *gpu_check.NOT_OF_GPUS]
    for tests in (collected(*chosen), collected(*chosen, *gpu_check.ON_PLACES)):
        for name in ("kvstore/test_transcripts", "kvstore/test_random_ops"):
            assert f"tests/{name}.py::" in tests
        assert "tests/cuda/test_cuda_streams.py::" in tests
        assert not re.search("tests/(benchmarks|examples|tools)/", tests)


# --- What is missing


def test_what_is_missing_is_said_in_a_line_each():
    needs = {need.name: need for need in gpu_check.NEEDS}
    assert set(needs) >= {
        *("pytest", "pytest-timeout", "ninja", "setuptools", "compute-sanitizer"),
        *("ncu", "Python.h", "g++"),
    }
    assert all(need.advice and "\n" not in need.advice for need in needs.values())
    used = {name for step in steps_of(*GROUPS).values() for name in step.needs}
    assert used <= set(needs)
    assert needs["pytest"].is_there()
    assert not gpu_check.package("pytest", 10_000).is_there()
    assert not gpu_check.package("no-such-package").is_there()
    assert not gpu_check.program("no-such-program", "").is_there()
    assert not gpu_check.toolkit_has("no-such-program")


def test_wheels_bring_what_is_missing(tmp_path):
    """Installs a wheel of a made-up package from a folder into another one."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "pyproject.toml").write_text(
        '[project]\nname = "made-up"\nversion = "3.1"\n'
        '[build-system]\nrequires = ["setuptools"]\n'
        'build-backend = "setuptools.build_meta"\n[tool.setuptools]\npy-modules = []\n'
    )
    wheels = tmp_path / "wheels"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-build-isolation",
            "--no-deps",
        ]
        + ["--wheel-dir", str(wheels), str(source)],
        check=True,
    )
    code = (
        "import sys; from pathlib import Path; import gpu_check as g\n"
        "need = g.package('made-up', 3)\n"
        "assert g.missing([need]) == [need]\n"
        "g.install([need, g.package('no-such-package')], *map(Path, sys.argv[1:]))\n"
        "assert g.missing([need]) == []\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(wheels), str(tmp_path / "installed")],
        cwd=PROGRAM.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# --- The program


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--only", "tests,wheels"], "--only: expected names out of build, tests, "),
        (["--wheels", "no-such-folder"], "there is no folder no-such-folder"),
        (["--minutes", "0"], "--minutes: expected more than 0"),
        (["--minutes", "nan"], "--minutes: expected more than 0"),
    ],
)
def test_bad_input(tmp_path, options, text):
    folder = tmp_path / "results"
    done = run_program(PROGRAM, str(folder), "--dry-run", *options)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("gpu_check: ") and done.stderr.count("\n") == 1
    assert text in done.stderr
    assert not folder.exists()


def test_without_a_compiler(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler -x")
    with pytest.raises(SystemExit) as caught:
        gpu_check.main([str(tmp_path / "results"), "--dry-run"])
    assert caught.value.code == 2
    assert "there is no C++ compiler" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_without_gpu(tmp_path):
    if shutil.which("nvidia-smi"):
        pytest.skip("there may be a GPU")
    done = run_program(PROGRAM, str(tmp_path / "results"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "can use no GPU here" in done.stderr


@pytest.mark.slow
def test_without_pytest_the_rest_runs(tmp_path):
    """It says so, and runs the steps that do not need it."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "pytest.py").write_text("raise ImportError('no pytest here')\n")
    code = (
        "import importlib.metadata as m, sys\n"
        "version = m.version\n"
        "def hide(name):\n"
        "    if name.startswith('pytest'):\n"
        "        raise m.PackageNotFoundError(name)\n"
        "    return version(name)\n"
        "m.version = hide\n"
        "import gpu_check\n"
        "gpu_check.main(sys.argv[1:])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "results"), "--dry-run"]
        + ["--only", "tests,benchmarks", "--minutes", "8"],
        env={**os.environ, "PYTHONPATH": f"{hidden}:{PROGRAM.parent}"},
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert done.returncode == 1, done.stderr
    assert re.search("^missing: pytest: pip install 'pytest>=9'", done.stdout, re.M)
    steps = json.loads((tmp_path / "results" / "results.json").read_text())["steps"]
    assert [step["outcome"] for step in steps] == ["not run", *["passed"] * 5]
    assert steps[0]["last_words"] == "no pytest"


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_an_end_leaves_results_and_no_step(tmp_path, end):
    late = tmp_path / "late"
    sleep = f"import time; print(1); time.sleep(9); open({str(late)!r}, 'w')"
    code = (
        "import sys, gpu_check as g\n"
        f"steps = [g.Step('build', [sys.executable, '-c', ''], 1),\n"
        f"         g.Step('tests', [sys.executable, '-c', {sleep!r}], 1)]\n"
        "g.plan = lambda *arguments: steps\n"
        "g.main(sys.argv[1:])\n"
    )
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "cuda_old.json").write_text(
        '{"targets": [{"what": "of an earlier run"}]}'
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder), "--dry-run", "--minutes", "2"],
        cwd=PROGRAM.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As a shell without job control starts what is in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    log = folder / "log.txt"
    for _ in range(300):
        time.sleep(0.1)
        if log.exists() and "=== tests" in log.read_text():
            break
    process.send_signal(end)
    process.communicate(timeout=60)
    assert process.returncode != 0
    results = json.loads((folder / "results.json").read_text())
    assert [step["name"] for step in results["steps"]] == ["build"]
    assert results["targets"] == []
    time.sleep(10)
    assert not late.exists()


def test_main_writes_the_results(monkeypatch, tmp_path, capsys):
    figures = {
        "what": "a push",
        "value": 0.5,
        "limit": 0.25,
        "at_least": False,
        "unit": "ms",
        "reached": False,
    }
    folder = tmp_path / "results"
    written = json.dumps({"targets": [figures]})
    code = f"open('{folder}/cuda_x.json', 'w').write({written!r})"
    steps = [python("build", "print('built')"), python("cuda_x", code)]
    steps.append(python("tests", "raise SystemExit(1)"))
    monkeypatch.setattr(gpu_check, "plan", lambda *arguments: steps)
    monkeypatch.setattr(gpu_check.signal, "signal", lambda *arguments: None)  # pytest's
    with pytest.raises(SystemExit, match="not everything passed"):
        gpu_check.main([str(folder), "--dry-run", "--minutes", "1"])
    results = json.loads((folder / "results.json").read_text())
    outcomes = [step["outcome"] for step in results["steps"]]
    assert outcomes == ["passed", "passed", "failed (1)"]
    summary = (folder / "summary.txt").read_text()
    assert re.search("tests +failed", summary)
    assert re.search(r"a push +<= 0.25 ms +0.5 ms +NO", summary)
    assert re.search(r"a push +<= 0.25 ms +0.5 ms +NO", capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.timeout(1450)  # minutes, and many with other load
def test_a_dry_run_executes_every_step(tmp_path):
    done = run_program(
        PROGRAM, str(tmp_path), "--dry-run", "--minutes", "22", timeout=1400
    )
    results = json.loads((tmp_path / "results.json").read_text())
    names = [step["name"] for step in results["steps"]]
    planned = [step.name for step in gpu_check.plan([*GROUPS], tmp_path, dry=True)]
    assert names == planned
    assert set(planned) >= {*GROUPS} - {"benchmarks", "sanitizers"}
    has_no = "cuobjdump" in results["missing"]
    lacks = {"check_sass"} & set(planned) if has_no else set()
    for step in results["steps"]:
        expected = "not run" if step["name"] in lacks else "passed"
        assert step["outcome"] == expected, (step, (tmp_path / "log.txt").read_text())
    assert done.returncode == (1 if lacks else 0), done.stderr
    assert len(results["targets"]) > 10
    for target in results["targets"]:
        assert target["what"] in done.stdout
    for path in (gpu_check.ROOT / "benchmarks").glob("cuda_*.py"):
        assert (tmp_path / path.with_suffix(".json").name).exists()
    assert [*Path(tmp_path).glob("built/torchkv/lib/libtorchkv.so")]
