"""Weights that are written between two steps, and writes that do not finish."""

import sys

import pytest
import torch
from torch import nn

import torchkv
from helpers import assert_same, snapshot
from torchkv.trainer import weights as module

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIMIZERS = [(torchkv.optim.SGD, "lr"), (torch.optim.SGD, "lr")]


def make(optimizer, word, dtype=torch.float32, **options):
    parameters = [nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in range(3)]
    parameters[2].requires_grad_(False)
    options = {word: 1.0, "momentum": 0.5, **options}
    return parameters, torchkv.Trainer(parameters, optimizer, options)


def step(parameters, trainer, gradient=4.0):
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, gradient)
    trainer.step()


class InterruptedAfter:
    """Raises KeyboardInterrupt before the n-th line that stores changed weights."""

    NAMES = ("store_changed", "_store_again")

    def __init__(self, count):
        self.left = count

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if code.co_filename != module.__file__ or code.co_name not in self.NAMES:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("optimizer", "word"), OPTIMIZERS)
def test_an_interrupt_at_any_line_loses_nothing(optimizer, word, dtype):
    """One weight is written, one changes its dtype, and one is new."""
    interrupts = 0
    while True:
        parameters, trainer = make(optimizer, word)
        step(parameters, trainer)
        parameters[0].data = torch.full((3,), 100.0)
        parameters[1].data = torch.full((3,), 50.0, dtype=dtype)
        parameters[2].requires_grad_(True)
        before = sys.gettrace()
        sys.settrace(InterruptedAfter(interrupts + 1))
        try:
            step(parameters, trainer)
            break
        except KeyboardInterrupt:
            interrupts += 1
        finally:
            sys.settrace(before)
        assert {0, 1} <= set(trainer.kvstore.keys()) <= {0, 1, 2}
        states = trainer.optimizer.state_dict()["state"]
        assert [float(states[key]["momentum_buffer"][0]) for key in (0, 1)] == [4, 4]
        step(parameters, trainer)
        assert parameters[0].tolist() == [94.0] * 3  # 100 - (4 + 4 / 2)
        assert parameters[1].tolist() == [44.0] * 3
        assert parameters[1].dtype == trainer.kvstore.dtype(1) == dtype
        assert parameters[2].tolist() == [-4.0] * 3
    assert interrupts > 20


@pytest.mark.parametrize("failing", ["assign", "init", "delete"])
@pytest.mark.parametrize(("optimizer", "word"), OPTIMIZERS)
def test_a_failure_of_the_store_loses_nothing(monkeypatch, optimizer, word, failing):
    parameters, trainer = make(optimizer, word)
    step(parameters, trainer)
    parameters[0].data = torch.full((3,), 100.0)
    parameters[1].data = torch.full((3,), 50.0, dtype=torch.float16)
    works, calls = getattr(torchkv.KVStore, failing), []

    def fail_once(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 1:
            raise MemoryError
        return works(*arguments, **options)

    monkeypatch.setattr(torchkv.KVStore, failing, fail_once)
    with pytest.raises(MemoryError):
        step(parameters, trainer)
    assert set(trainer.kvstore.keys()) == {0, 1}
    step(parameters, trainer)
    assert parameters[0].tolist() == [94.0] * 3
    assert parameters[1].tolist() == [44.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("optimizer", "word"), OPTIMIZERS)
def test_another_shape_is_refused_before_anything_changes(optimizer, word, dtype):
    parameters, trainer = make(optimizer, word)
    step(parameters, trainer)
    parameters[0].data = torch.full((3,), 100.0)
    parameters[1].data = torch.zeros(4, dtype=dtype)
    before = snapshot(trainer.kvstore)
    with pytest.raises(ValueError, match=r"Trainer: .*shape \(3,\).*\(4,\) \(key 1\)"):
        step(parameters, trainer)
    assert snapshot(trainer.kvstore) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_writing_the_same_weight_keeps_the_bits_of_its_master(dtype):
    parameters, trainer = make(torchkv.optim.SGD, "lr", dtype)
    trainer.set_learning_rate(0.0123)
    step(parameters, trainer, 1.7)
    masters = [trainer.optimizer.state_dict()["state"][i]["master"] for i in (0, 1)]
    assert (masters[0] != parameters[0]).any()
    with torch.no_grad():
        parameters[0].copy_(parameters[0].clone())
        parameters[1].fill_(5)
    trainer.set_learning_rate(0.0)
    step(parameters, trainer)
    states = trainer.optimizer.state_dict()["state"]
    assert_same(states[0]["master"], masters[0])
    assert_same(states[1]["master"], torch.full((3,), 5.0))


def test_skipped_steps_are_still_counted_after_a_change_of_dtype():
    parameters, trainer = make("sgd", "learning_rate", skip_nonfinite=True)
    step(parameters, trainer, float("nan"))
    for parameter in parameters:
        parameter.data = parameter.data.half()
    step(parameters, trainer)
    assert trainer.optimizer.num_skipped == 1
    assert parameters[0].tolist() == [-4.0] * 3
