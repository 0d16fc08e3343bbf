"""Programs carried over from MXNet print the losses of MXNet, where it is installed."""

import re
import subprocess
from pathlib import Path

import pytest
import torch.distributed.run

from helpers import run_program

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "from_mxnet"
MXNET = ROOT / ".venv/mxnet-1.9.1/bin/python"
NAMES = ["gluon", "module"]


def lines_of(text):
    """Loss and accuracy by epoch."""
    found = re.findall(r"epoch (\d): loss (\d\.\d{4}), accuracy (\d\.\d{3})", text)
    assert [int(epoch) for epoch, _, _ in found] == list(range(8)), text
    return [(float(loss), float(accuracy)) for _, loss, accuracy in found]


def run(path, *arguments):
    result = run_program(path, *arguments)
    assert result.returncode == 0, result.stderr
    return lines_of(result.stdout)


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def printed(name):
    return run(FOLDER / f"{name}_torchkv.py")


def test_trains(printed):
    assert printed[-1][0] < 0.2 and printed[-1][1] > 0.93


@pytest.mark.skipif(not MXNET.exists(), reason="needs MXNet: make bench-peers")
def test_prints_what_mxnet_prints(name, printed):
    program = [MXNET, FOLDER / f"{name}_mxnet.py"]
    theirs = subprocess.run(program, capture_output=True, text=True, check=True)
    for ours, expected in zip(printed, lines_of(theirs.stdout), strict=True):
        assert ours[0] == pytest.approx(expected[0], rel=1e-2)
        assert ours[1] == pytest.approx(expected[1], abs=0.01)


def test_a_store_of_another_type():
    path = FOLDER / "module_torchkv.py"
    assert run(path, "--kv-store=device") == run(path)


def test_several_processes():
    processes = "--standalone", "--nproc-per-node=2", FOLDER / "module_torchkv.py"
    arguments = *processes, "--kv-store=dist_sync"
    printed = run(torch.distributed.run.__file__, *arguments)
    assert printed[-1][0] < 0.2 and printed[-1][1] > 0.93
