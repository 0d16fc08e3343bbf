"""MXNet's optimizers by name: MXNet's formulas, options, defaults and attributes."""

import pytest
import torch

import torchkv
from helpers import stored
from mxnet_cases import CASES, STEPS, ids, rate, start
from mxnet_formulas import Formula

TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float64: {"rtol": 1e-9, "atol": 1e-10},
}
NAMES = sorted({name for name, _ in CASES})


@pytest.mark.parametrize(("name", "options"), CASES, ids=ids)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_100_steps_with_a_changing_learning_rate(name, options, dtype):
    weight, gradients = start()
    with torchkv.create() as kv:
        kv.init(3, torch.tensor(weight, dtype=dtype))
        kv.set_optimizer(name, **options)
        formula = Formula(name, stored(kv, 3).numpy(), options)
        for step, gradient in enumerate(gradients):
            kv.optimizer.set_learning_rate(rate(name, step))
            pushed = torch.tensor(gradient, dtype=dtype)
            kv.push(3, [pushed / 4, pushed / 4, pushed / 2])
            formula.step(pushed.numpy(), rate(name, step))
        torch.testing.assert_close(
            stored(kv, 3).double(), torch.tensor(formula.w), **TOLERANCES[dtype]
        )
        assert kv.optimizer.state_dict()["state"][3]["step"] == (
            STEPS // options.get("batch_scale", 1)
        )
