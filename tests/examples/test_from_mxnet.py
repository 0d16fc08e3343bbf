"""Programs carried over from MXNet print what MXNet prints, where it is installed."""

import contextlib
import copy
import functools
import io
import logging
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.run
import torch.nn.functional as F

from helpers import free_port, run_program

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "from_mxnet"
MXNET = ROOT / ".venv/mxnet-1.9.1/bin/python"
needs_mxnet = pytest.mark.skipif(
    not MXNET.exists(), reason="needs MXNet: make bench-peers"
)
EPOCHS = {"gluon": 12, "module": 8}
BATCHES = {"gluon": 2, "module": 3}  # of an epoch, those that are reported
COMPRESSED = "--gc-type=2bit", "--gc-threshold=0.4"
# A weight decay that shows whether biases have it.
OPTIONS = (
    "--optimizer=nag --mom=0.8 --lr=0.15 --lr-factor=0.5 --lr-step-epochs=1,3 --wd=0.1 "
    "--batch-size=60 --disp-batches=7 --num-epochs=5"
).split()
DIST = "--kv-store=dist_sync"
LINE = re.compile(
    r"(?:worker |node\[)(\d)\]?,? epoch[ [](\d+)\]?,? (batch \S+|train|valid)(.*)", re.I
)


def values_of(text):
    """What lines say: {(worker, epoch, "train", "valid" or a batch, metric): value}."""
    return {
        (int(worker), int(epoch), part.lower(), name): float(value)
        for worker, epoch, part, rest in LINE.findall(text)
        for name, value in re.findall(r"(accuracy|cross-entropy)[ =](\d+\.\d+)", rest)
    }


@functools.cache
def run(name, *arguments):
    """The globals of a program for torchkv, and what it prints.

    In this process, as most of the time of another one would go into imports.
    """
    printed = io.StringIO()
    level = logging.root.level
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.syspath_prepend(FOLDER)
        patch.setattr(sys, "argv", [name, *arguments])
        patch.setattr(logging.root, "handlers", [])
        try:
            program = runpy.run_path(str(FOLDER / f"{name}_torchkv.py"))
        finally:
            logging.root.setLevel(level)
    return program, values_of(printed.getvalue())


@functools.cache
def run_two(name, *arguments):
    """What two processes print."""
    processes = "--standalone", "--nproc-per-node=2", FOLDER / f"{name}_torchkv.py"
    launch = torch.distributed.run.__file__
    result = run_program(launch, *processes, DIST, *arguments)
    assert result.returncode == 0, result.stderr
    return values_of(result.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("from_mxnet")


@pytest.fixture(params=EPOCHS)
def name(request):
    return request.param


@pytest.fixture
def saving(folder):
    """The options with which a program saves what it has trained."""
    return {"gluon": f"--save={folder}/gluon", "module": f"--model-prefix={folder}/m"}


def assert_trains(name, values, worker=0):
    last = EPOCHS[name] - 1
    assert values[worker, last, "train", "cross-entropy"] < 0.2
    assert values[worker, last, "valid", "accuracy"] > 0.93


def test_trains(name, saving):
    _, values = run(name, saving[name])
    assert_trains(name, values)
    # Two metrics, also of each whole epoch and of the validation.
    assert len(values) == EPOCHS[name] * (BATCHES[name] + 2) * 2


def test_a_store_of_another_type(name, saving):
    assert run(name, "--kv-store=local")[1] == run(name, saving[name])[1]


def test_saves_the_parameters(name, saving, folder):
    program, values = run(name, saving[name])
    net = copy.deepcopy(program["net"]) if name == "gluon" else program["network"]()
    for parameter in net.parameters():
        parameter.detach().zero_()
    file = {"gluon": "gluon", "module": "m-0008.params"}[name]
    net.load_state_dict(torch.load(folder / file))
    images, labels = map(torch.from_numpy, program["digits"].load()[1])
    with torch.no_grad():
        outputs = net(images)
    accuracy = (outputs.argmax(1) == labels).double().mean().item()
    last = 0, EPOCHS[name] - 1, "valid"
    assert values[*last, "accuracy"] == pytest.approx(accuracy, abs=1e-5)
    loss = F.cross_entropy(outputs, labels).item()
    assert values[*last, "cross-entropy"] == pytest.approx(loss, abs=2e-5)


def after(epoch, values):
    return {key: value for key, value in values.items() if key[1] >= epoch}


def test_continues_after_a_checkpoint(saving):
    whole = after(4, run("module", saving["module"])[1])
    assert run("module", saving["module"], "--load-epoch=4")[1] == whole
    # It has read the parameters and the optimizer's states.
    with pytest.raises(FileNotFoundError, match=r"m-0009.params"):
        run("module", saving["module"], "--load-epoch=9")


def test_several_processes(name, saving):
    values = run_two(name, saving[name] + "-of-two")
    assert {worker for worker, *_ in values} == {0, 1}
    for key, value in values.items():
        worker, epoch, part, metric = key
        # Parts of the data differ, the parameters do not.
        same = value == values[1 - worker, epoch, part, metric]
        assert same or part != "valid", key
    assert_trains(name, values)
    assert_trains(name, values, worker=1)
    trained = [values[worker, 0, "train", "cross-entropy"] for worker in (0, 1)]
    assert trained[0] != trained[1]


def test_several_processes_continue_after_a_checkpoint(saving, folder):
    prefix = saving["module"] + "-of-two"
    whole = after(4, run_two("module", prefix))
    assert (folder / "m-of-two-1-0004.states").exists()
    assert run_two("module", prefix, "--load-epoch=4") == whole


def test_several_processes_compress():
    values = run_two("module", *COMPRESSED)
    assert_trains("module", values)
    assert values != run_two("module", COMPRESSED[0])  # with threshold 0.5


def test_gradient_compression():
    _, values = run("module", *COMPRESSED)
    assert_trains("module", values)
    assert values != run("module", COMPRESSED[0])[1]  # with threshold 0.5
    with pytest.raises(ValueError, match="set_gradient_compression.*'local'"):
        run("module", "--kv-store=local", *COMPRESSED)


@functools.cache
def run_mxnet(name, *arguments):
    """What a program for MXNet prints."""
    program = [MXNET, FOLDER / f"{name}_mxnet.py", *arguments]
    result = subprocess.run(
        program, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return values_of(result.stdout)


def assert_as_mxnet(ours, theirs):
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        about = {"accuracy": {"abs": 0.01}, "cross-entropy": {"rel": 0.01}}[key[-1]]
        assert ours[key] == pytest.approx(value, **about), key


@needs_mxnet
def test_prints_what_mxnet_prints(name, saving):
    theirs = run_mxnet(name, saving[name] + "-of-mxnet")
    assert_as_mxnet(run(name, saving[name])[1], theirs)


@needs_mxnet
@pytest.mark.parametrize("options", [COMPRESSED, OPTIONS], ids=["compressed", "others"])
def test_options_do_what_they_do_in_mxnet(options):
    theirs = run_mxnet("module", *options)
    assert_as_mxnet(run("module", *options)[1], theirs)


@needs_mxnet
def test_continues_as_mxnet_does(saving):
    prefix = saving["module"] + "-of-mxnet"
    run_mxnet("module", prefix)
    theirs = run_mxnet("module", prefix, "--load-epoch=4")
    assert_as_mxnet(run("module", saving["module"], "--load-epoch=4")[1], theirs)


@needs_mxnet
def test_several_processes_print_what_mxnets_print(name, saving):
    """Without MXNet's launch.py, which is not in its wheel."""
    environment = {
        **os.environ,
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": "2",
    }
    worker = [MXNET, FOLDER / f"{name}_mxnet.py", DIST]
    other = [MXNET, "-c", "import mxnet"]
    with contextlib.ExitStack() as stack:
        processes = []
        for role in ("scheduler", "server", "worker", "worker"):
            process = subprocess.Popen(
                worker if role == "worker" else other,
                env={**environment, "DMLC_ROLE": role},
                stdout=subprocess.PIPE if role == "worker" else subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
                text=True,
            )
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        workers = processes[2:]
        printed = "\n".join(p.communicate(timeout=120)[0] for p in workers)
    assert [p.returncode for p in workers] == [0, 0], printed
    ours = run_two(name, saving[name] + "-of-two")
    assert_as_mxnet(ours, values_of(printed))
