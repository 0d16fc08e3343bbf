"""MXNet's worker is controlled, and its fastest configuration represents it."""

import sys
from pathlib import Path

import pytest

import mxnet_peer
from harness import Plan
from mxnet_peer import (
    NAIVE,
    NAME,
    Case,
    Choice,
    MXNet,
    Worker,
    engines,
    measure_beside,
)

FAKE = [sys.executable, str(Path(__file__).with_name("fake_mxnet_worker.py"))]
CASE = Case([(1000,), (2, 3)], "float32", 4, 2)

needs_mxnet = pytest.mark.skipif(
    not mxnet_peer.PYTHON.exists(), reason="needs `make bench-peers`"
)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(mxnet_peer, "SETTLE_S", 0.0)
    monkeypatch.setattr(mxnet_peer, "WAKE_S", 0.0)
    seconds = {"NaiveEngine": "1", "default engine": "3", "default engine, 2": "2"}
    workers = {
        name: Worker(FAKE, {"FAKE_ENGINE_S": each}) for name, each in seconds.items()
    }
    with MXNet(workers) as mxnet:
        yield mxnet


@pytest.fixture(scope="module")
def real():
    with MXNet.start(mxnet_peer.PYTHON, threads=2) as mxnet:
        yield mxnet


def test_every_way_is_tried_and_the_fastest_of_both_engines_timed(fake):
    figures = measure_beside(fake, CASE, {}, Plan(3, 0.0, 0.0))
    assert len(figures["mxnet_trials"]) == 3 * 2 * 2
    assert figures["mxnet"] == {
        NAME: "pushpull; local; default engine, 2",
        NAIVE: "pushpull; local; NaiveEngine",
    }
    letters = len("pushpull") + len("local")
    assert figures["seconds"] == {NAME: [2 + letters] * 3, NAIVE: [1 + letters] * 3}


def test_without_outs_there_is_only_push(fake):
    trials = fake.try_all(CASE._replace(outs=0))
    assert {choice.way for choice in trials} == {"push"}
    assert {choice.store for choice in trials} == {"local", "device"}


def test_turns_alternate_between_processes(fake, monkeypatch):
    turns = []
    run = MXNet._run
    monkeypatch.setattr(MXNet, "_run", lambda *given: turns.append(NAME) or run(*given))
    theirs = fake.prepare(CASE, Choice("NaiveEngine", "local", "push, pull"))
    ours = theirs._replace(run=lambda calls: turns.append("torchkv") or 1.0)
    mxnet_peer.measure({"torchkv": ours, NAME: theirs}, Plan(4, 0.0, 1e6))
    assert turns == ["torchkv", NAME] * (1 + 1 + 4)  # the check, the pilot, four rounds


def test_without_mxnet_the_others_are_timed(fake):
    ours = fake.prepare(CASE, Choice("NaiveEngine", "local", "push, pull"))
    figures = measure_beside(None, CASE, {"torchkv": ours}, Plan(3, 0.0, 0.0))
    assert list(figures["seconds"]) == ["torchkv"]
    assert figures["mxnet"] == {}


def test_a_wrong_result_is_not_timed(fake):
    wrong = fake.prepare(CASE, Choice("NaiveEngine", "wrong", "push"))
    with pytest.raises(AssertionError, match="MXNet does not have the result"):
        mxnet_peer.measure({NAME: wrong}, Plan(3, 0.0, 0.0))


def test_errors_of_the_worker_reach_the_caller(fake):
    worker = fake._workers["NaiveEngine"]
    with pytest.raises(RuntimeError, match="fail: the MXNet worker failed\nTraceback"):
        worker.ask("fail")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="worker ended\nno MXNet to be found"):
            worker.ask("end")


def test_an_environment_without_mxnet_says_so():
    with pytest.raises(RuntimeError, match="No module named 'mxnet'"):
        MXNet.start(Path(sys.executable), threads=2)


def test_the_environment_is_the_configurations_own(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setenv("MXNET_CPU_TEMP_COPY", "64")
    worker = Worker(FAKE, engines(2)["NaiveEngine"])
    environment = worker.ask("versions")["environment"]
    worker.close()
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["MXNET_ENGINE_TYPE"] == "NaiveEngine"
    assert "MXNET_CPU_TEMP_COPY" not in environment


@needs_mxnet
def test_real_mxnet_tells_its_version(real):
    assert real.versions["mxnet"] == "1.9.1"


@needs_mxnet
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shapes", [CASE.shapes, [(1000,)]], ids=["list", "one key"])
@pytest.mark.parametrize("outs", [0, 2], ids=["push", "push, pull"])
def test_real_mxnet_has_the_right_sums(real, dtype, shapes, outs):
    case = Case(shapes, dtype, 4, outs)
    for choice, seconds in real.try_all(case).items():
        assert 0 < seconds < 1, choice
        contestant = real.prepare(case, choice)
        if outs:
            assert not contestant.agrees()  # nothing has been pulled yet
        assert contestant.run(3) > 0
        assert contestant.agrees(), choice


@needs_mxnet
def test_real_mxnet_refuses_what_it_cannot_do(real):
    worker = real._workers["NaiveEngine"]
    real.drop()
    with pytest.raises(RuntimeError, match="expected a command for this state"):
        worker.ask("check", store="local")
    assert worker.ask("versions") == real.versions  # it is still running
