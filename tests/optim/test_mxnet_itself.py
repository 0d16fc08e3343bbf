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
    SHARING,
    case,
    ids,
    rate,
    start,
)

HERE = pathlib.Path(__file__).parent
PYTHON = HERE.parents[1] / ".venv/mxnet-1.9.1/bin/python"
DTYPES = [torch.float32, torch.float64]
NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
# MXNet's states of these are float32.
WITHOUT_FLOAT64 = {"adadelta", "adagrad", "ftrl", "groupadagrad", "rmsprop"}


def with_dtypes(cases):
    """The cases that MXNet has, each with a dtype."""
    return [
        (*each, dtype)
        for each in cases
        for dtype in DTYPES
        if dtype == torch.float32 or each[0] not in WITHOUT_FLOAT64
    ]


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


@pytest.mark.parametrize(("name", "options", "dtype"), with_dtypes(CASES), ids=ids)
def test_100_steps_with_a_changing_learning_rate(theirs, name, options, dtype):
    weight, gradients = start()
    with torchkv.create() as kv:
        kv.init(3, torch.tensor(weight, dtype=dtype))
        kv.set_optimizer(name, **options)
        for step, gradient in enumerate(gradients):
            kv.optimizer.set_learning_rate(rate(name, step))
            kv.push(3, torch.tensor(gradient, dtype=dtype))
        assert_near(stored(kv, 3), theirs[dtype][case(name, options)])


def weights_of_several_keys(name, options, dtype):
    """What torchkv ends with, by key."""
    weights, gradients = zip(*map(start, KEYS), strict=True)
    keys = list(KEYS)
    with torchkv.create() as kv:
        kv.init(keys, [torch.tensor(weight, dtype=dtype) for weight in weights])
        kv.set_optimizer(name, **options)
        for step, of_keys in enumerate(zip(*gradients, strict=True)):
            kv.optimizer.set_learning_rate(rate(name, step))
            kv.push(keys, [torch.tensor(x, dtype=dtype) for x in of_keys])
        return {key: stored(kv, key) for key in keys}


@pytest.mark.parametrize(
    ("name", "options", "dtype"), with_dtypes(OF_SEVERAL_KEYS), ids=ids
)
def test_several_keys(theirs, name, options, dtype):
    for key, weights in weights_of_several_keys(name, options, dtype).items():
        assert_near(weights, theirs[dtype][case(name, options, key)])


@pytest.mark.parametrize(("name", "options", "most", "dtype"), with_dtypes(SHARING))
def test_keys_that_share_a_number_in_mxnet(theirs, name, options, most, dtype):
    difference = max(
        (weights - torch.tensor(theirs[dtype][case(name, options, key)])).abs().max()
        for key, weights in weights_of_several_keys(name, options, dtype).items()
    )
    assert most * 0.8 < difference <= most
    page = (HERE.parents[1] / "docs" / "from_mxnet.md").read_text()
    assert f'{most} for `"{name}"`' in page


@pytest.mark.parametrize(
    ("name", "options", "schedule", "dtype"), with_dtypes(SCHEDULED), ids=ids
)
def test_100_steps_with_a_schedule(theirs, name, options, schedule, dtype):
    weight, gradients = start()
    scheduler = getattr(torchkv.lr_scheduler, schedule[0])(**schedule[1])
    with torchkv.create() as kv:
        kv.init(3, torch.tensor(weight, dtype=dtype))
        kv.set_optimizer(name, lr_scheduler=scheduler, **options)
        for gradient in gradients:
            kv.push(3, torch.tensor(gradient, dtype=dtype))
        expected = theirs[dtype][case(name, options, schedule)]
        # MXNet has Adam's betas in float32, and its bias correction in float64.
        assert_near(stored(kv, 3), expected, atol=1e-5 if name == "adam" else 2e-6)


def test_the_file_has_all_cases(theirs):
    cases = {dtype: set() for dtype in DTYPES}
    for *each, dtype in with_dtypes([*CASES, *SCHEDULED]):
        cases[dtype].add(case(*each))
    for name, options, *_, dtype in with_dtypes([*OF_SEVERAL_KEYS, *SHARING]):
        cases[dtype].update(case(name, options, key) for key in KEYS)
    assert {dtype: weights.keys() for dtype, weights in theirs.items()} == cases


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
