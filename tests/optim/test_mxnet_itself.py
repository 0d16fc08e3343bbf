"""The optimizers by name against MXNet 1.9.1 itself, where ``make bench-peers`` has
installed it."""

import os
import pathlib
import subprocess

import numpy as np
import pytest
import torch

import torchkv
from helpers import stored
from mxnet_cases import CASES, SCHEDULED, ids, rate, start

HERE = pathlib.Path(__file__).parent
PYTHON = HERE.parents[1] / ".venv/mxnet-1.9.1/bin/python"

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="needs MXNet: make bench-peers"
)

DTYPES = [torch.float32, torch.float64]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    path = tmp_path_factory.mktemp("mxnet") / "weights.npz"
    dtypes = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    subprocess.run(
        [PYTHON, HERE / "mxnet_peer.py", path, *dtypes],
        env={**environment, "PYTHONPATH": str(HERE)},
        check=True,
        capture_output=True,
    )
    with np.load(path) as weights:
        return dict(weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "options"), CASES, ids=ids)
def test_100_steps_with_a_changing_learning_rate(theirs, name, options, dtype):
    expected = theirs.get(f"{name} {ids(options)} {dtype}".replace("torch.", ""))
    if expected is None:
        pytest.skip("MXNet has float32 states only")
    weight, gradients = start()
    with torchkv.create() as kv:
        kv.init(3, torch.tensor(weight, dtype=dtype))
        kv.set_optimizer(name, **options)
        for step, gradient in enumerate(gradients):
            kv.optimizer.set_learning_rate(rate(name, step))
            kv.push(3, torch.tensor(gradient, dtype=dtype))
        torch.testing.assert_close(
            stored(kv, 3), torch.tensor(expected), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "options", "schedule"), SCHEDULED, ids=ids)
def test_100_steps_with_a_schedule(theirs, name, options, schedule, dtype):
    case = f"{name} {ids(options)} {ids(schedule)} {dtype}".replace("torch.", "")
    weight, gradients = start()
    scheduler = getattr(torchkv.lr_scheduler, schedule[0])(**schedule[1])
    with torchkv.create() as kv:
        kv.init(3, torch.tensor(weight, dtype=dtype))
        kv.set_optimizer(name, lr_scheduler=scheduler, **options)
        for gradient in gradients:
            kv.push(3, torch.tensor(gradient, dtype=dtype))
        torch.testing.assert_close(
            stored(kv, 3), torch.tensor(theirs[case]), rtol=1e-5, atol=1e-5
        )
