"""torch.amp.GradScaler with a Trainer."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchkv
from training import (
    assert_near,
    assert_same_weights,
    make_batches,
    make_model,
    train_plainly,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler_skips_infinities_and_changes_nothing_else(on_store, unscale):
    copies = torchkv.replicate(make_model(), ["cpu"] * 2)
    trainer = torchkv.Trainer(
        copies, "sgd", {"learning_rate": 0.1}, update_on_kvstore=on_store
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10**6)
    batches = make_batches()
    for i, (x, y) in enumerate(batches):
        trainer.zero_grad()
        scaler.scale(F.cross_entropy(copies(x), y)).backward()
        if i in (2, 5):
            next(copies[i % 2].parameters()).grad[0, 0] = float("inf")
        if unscale:
            scaler.unscale_(trainer)
        before = weights(copies[0])
        scale = scaler.get_scale()
        scaler.step(trainer)
        scaler.update()
        if i in (2, 5):
            assert scaler.get_scale() == scale / 2
            assert_same_weights(weights(copies[0]), before)
        else:
            assert scaler.get_scale() == scale
    kept = [batch for i, batch in enumerate(batches) if i not in (2, 5)]
    expected = train_plainly(torch.optim.SGD, {"lr": 0.1}, kept)
    assert_near(weights(copies[0]), expected)
    assert_same_weights(weights(copies[1]), weights(copies[0]))


def test_gradients_may_be_clipped_between_unscaling_and_the_step():
    """Compared with torch's own loop: autocast, unscale, clip, step, update."""
    batches = make_batches()

    def train(make_optimizer):
        model = make_model()
        optimizer = make_optimizer(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        return weights(model)

    ours = train(lambda m: torchkv.Trainer(m, "sgd", {"learning_rate": 0.5}))
    theirs = train(lambda m: torch.optim.SGD(m.parameters(), lr=0.5, foreach=False))
    assert_near(ours, theirs, 1e-7)


def test_a_skipped_step_leaves_its_gradients_for_zero_grad():
    parameter = nn.Parameter(torch.zeros(2))
    trainer = torchkv.Trainer([parameter], "sgd", {"learning_rate": 1.0})
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale((parameter * torch.inf).sum()).backward()
    scaler.step(trainer)
    scaler.update()
    assert parameter.tolist() == [0.0, 0.0]
    assert parameter.grad is not None
    assert trainer.optimizer.state_dict()["state"][0]["step"] == 0
    trainer.zero_grad()
    scaler.scale(parameter.sum()).backward()
    scaler.step(trainer)
    assert parameter.tolist() == [-1.0, -1.0]
    assert trainer.optimizer.state_dict()["state"][0]["step"] == 1


def test_grad_scaler_passes_the_batch_size():
    parameter = nn.Parameter(torch.zeros(3))
    trainer = torchkv.Trainer([parameter], "sgd", {"learning_rate": 1.0})
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(parameter.sum() * 8).backward()
    scaler.step(trainer, 2)
    assert parameter.tolist() == [-4.0] * 3


def test_param_groups_are_read_only():
    trainer = torchkv.Trainer(make_model(), "sgd")
    assert len(trainer.param_groups[0]["params"]) == 4
    with pytest.raises(TypeError):
        trainer.param_groups[0]["lr"] = 0.1
