"""The optimizers by name against the weights that MXNet 1.9.1 itself has ended with.

``mxnet_weights.npz`` has them. Where ``make bench-peers`` has installed MXNet, a test
makes them again, as this does::

    PYTHONPATH=tests/optim .venv/mxnet-1.9.1/bin/python tests/optim/mxnet_peer.py \\
        tests/optim/mxnet_weights.npz float32 float64
"""

import os
import pathlib
import subprocess

import numpy as np
import pytest
import torch

import torchkv
from helpers import stored
from mxnet_cases import (
    CASES,
    KEYS,
    OF_SEVERAL_KEYS,
    SCHEDULED,
    case,
    ids,
    rate,
    start,
)

HERE = pathlib.Path(__file__).parent
PYTHON = HERE.parents[1] / ".venv/mxnet-1.9.1/bin/python"
DTYPES = [torch.float32, torch.float64]
# MXNet's states of these are float32.
WITHOUT_FLOAT64 = {"adadelta", "adagrad", "ftrl", "groupadagrad", "rmsprop"}
NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def read(path):
    """By dtype and case."""
    with np.load(path) as arrays:
        return {
            dtype: dict(zip(arrays[f"{name} names"], arrays[name], strict=True))
            for dtype, name in zip(DTYPES, NAMES, strict=True)
        }


@pytest.fixture(scope="module")
def theirs():
    return read(HERE / "mxnet_weights.npz")


def assert_near(actual, expected, atol=2e-6):
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-5, atol=atol)


@each_dtype
@pytest.mark.parametrize(("name", "options"), CASES, ids=ids)
def test_100_steps_with_a_changing_learning_rate(theirs, name, options, dtype):
    expected = theirs[dtype].get(case(name, options))
    if expected is None:
        pytest.skip("MXNet has float32 states only")
    weight, gradients = start()
    with torchkv.create() as kv:
        kv.init(3, torch.tensor(weight, dtype=dtype))
        kv.set_optimizer(name, **options)
        for step, gradient in enumerate(gradients):
            kv.optimizer.set_learning_rate(rate(name, step))
            kv.push(3, torch.tensor(gradient, dtype=dtype))
        assert_near(stored(kv, 3), expected)


@each_dtype
@pytest.mark.parametrize(("name", "options"), OF_SEVERAL_KEYS, ids=ids)
def test_several_keys(theirs, name, options, dtype):
    if case(name, options) not in theirs[dtype]:
        pytest.skip("MXNet has float32 states only")
    weights, gradients = zip(*map(start, KEYS), strict=True)
    keys = list(KEYS)
    with torchkv.create() as kv:
        kv.init(keys, [torch.tensor(weight, dtype=dtype) for weight in weights])
        kv.set_optimizer(name, **options)
        for step, of_keys in enumerate(zip(*gradients, strict=True)):
            kv.optimizer.set_learning_rate(rate(name, step))
            kv.push(keys, [torch.tensor(x, dtype=dtype) for x in of_keys])
        for key in keys:
            assert_near(stored(kv, key), theirs[dtype][case(name, options, key)])


@each_dtype
@pytest.mark.parametrize(("name", "options", "schedule"), SCHEDULED, ids=ids)
def test_100_steps_with_a_schedule(theirs, name, options, schedule, dtype):
    weight, gradients = start()
    scheduler = getattr(torchkv.lr_scheduler, schedule[0])(**schedule[1])
    with torchkv.create() as kv:
        kv.init(3, torch.tensor(weight, dtype=dtype))
        kv.set_optimizer(name, lr_scheduler=scheduler, **options)
        for gradient in gradients:
            kv.push(3, torch.tensor(gradient, dtype=dtype))
        expected = theirs[dtype][case(name, options, schedule)]
        # MXNet's schedules end in float32, here they do not.
        assert_near(stored(kv, 3), expected, atol=1e-5)


def test_the_file_has_all_cases(theirs):
    """But those that MXNet does not have."""
    cases = {
        *(case(*each) for each in [*CASES, *SCHEDULED]),
        *(case(*each, key) for each in OF_SEVERAL_KEYS for key in KEYS),
    }
    assert theirs[torch.float32].keys() == cases
    missing = {each.split()[0] for each in cases - theirs[torch.float64].keys()}
    assert missing == WITHOUT_FLOAT64


@pytest.mark.skipif(not PYTHON.exists(), reason="needs MXNet: make bench-peers")
def test_mxnet_still_ends_with_these(theirs, tmp_path):
    path = tmp_path / "weights.npz"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    subprocess.run(
        [PYTHON, HERE / "mxnet_peer.py", path, *NAMES],
        env={**environment, "PYTHONPATH": str(HERE)},
        check=True,
        capture_output=True,
    )
    again = read(path)
    for dtype in DTYPES:
        assert again[dtype].keys() == theirs[dtype].keys()
        for name, weights in again[dtype].items():
            np.testing.assert_allclose(
                weights, theirs[dtype][name], rtol=1e-6, atol=1e-6, err_msg=name
            )
