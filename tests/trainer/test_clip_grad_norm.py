"""Trainer.clip_grad_norm_, and the norm of the last step."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchkv
from training import assert_near, assert_same_weights, make_batches, make_model, weights

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_NORM = 0.05  # less than the norms here


def train_plainly(batches, norm_type=2.0, scaled=False):
    """torch's own loop: its weights and norms."""
    model, norms = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
    for x, y in batches:
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type)
        norms.append(norm.item())
        scaler.step(optimizer)
        scaler.update()
    return weights(model), norms


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("scaled", [False, True])
def test_replicas_clip_as_one_model(count, on_store, scaled):
    batches = make_batches()
    expected, norms = train_plainly(batches, scaled=scaled)
    copies = torchkv.replicate(make_model(), ["cpu"] * count)
    trainer = torchkv.Trainer(
        copies, "sgd", {"learning_rate": 0.5}, update_on_kvstore=on_store
    )
    assert trainer.grad_norm is None
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
    for (x, y), norm in zip(batches, norms, strict=True):
        trainer.zero_grad()
        scaler.scale(F.cross_entropy(copies(x), y)).backward()
        scaler.unscale_(trainer)
        actual = trainer.clip_grad_norm_(MAX_NORM)
        assert actual.dim() == 0 and norm > MAX_NORM
        assert actual.item() == pytest.approx(norm, rel=1e-5)
        scaler.step(trainer)
        scaler.update()
        assert trainer.grad_norm == actual.item()
    assert_near(weights(copies[0]), expected)
    assert_same_weights(weights(copies[-1]), weights(copies[0]))


@pytest.mark.parametrize("norm_type", [1.0, 3.0, math.inf])
def test_other_norms(norm_type):
    batches = make_batches(3)
    expected, norms = train_plainly(batches, norm_type)
    copies = torchkv.replicate(make_model(), ["cpu"] * 2)
    trainer = torchkv.Trainer(copies, "sgd", {"learning_rate": 0.5})
    for (x, y), norm in zip(batches, norms, strict=True):
        F.cross_entropy(copies(x), y).backward()
        actual = trainer.clip_grad_norm_(MAX_NORM, norm_type)
        assert actual.item() == pytest.approx(norm, rel=1e-5)
        trainer.step()
    assert_near(weights(copies[0]), expected)


def test_a_small_norm_changes_nothing():
    copies = torchkv.replicate(make_model(), ["cpu"] * 2)
    trainer = torchkv.Trainer(copies, "sgd")
    (x, y) = make_batches(1)[0]
    F.cross_entropy(copies(x), y).backward()
    before = [p.grad.clone() for m in copies for p in m.parameters()]
    trainer.clip_grad_norm_(1e6)
    after = [p.grad for m in copies for p in m.parameters()]
    assert all(a.equal(b) for a, b in zip(before, after, strict=True))


def test_gradients_from_allreduce_grads_are_not_summed_again():
    copies = torchkv.replicate(make_model(), ["cpu"] * 2)
    trainer = torchkv.Trainer(
        copies, "sgd", {"learning_rate": 0.5}, update_on_kvstore=False
    )
    plain = copy.deepcopy(copies[0])
    x, y = make_batches(1)[0]
    F.cross_entropy(plain(x), y).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM).item()
    F.cross_entropy(copies(x), y).backward()
    unreduced = trainer.clip_grad_norm_(1e6).item()
    assert unreduced == pytest.approx(expected, rel=1e-5)
    trainer.allreduce_grads()
    for limit, norm in [(1e6, expected), (MAX_NORM, expected), (1e6, MAX_NORM)]:
        actual = trainer.clip_grad_norm_(limit).item()
        assert actual == pytest.approx(norm, rel=1e-4)
    trainer.update()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    assert_near(weights(copies[0]), weights(plain))
    # The next gradients are not sums, though they may have the same memory.
    F.cross_entropy(copies(x), y).backward()
    plain.zero_grad()
    F.cross_entropy(plain(x), y).backward()
    norm = nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
    assert trainer.clip_grad_norm_(1e6).item() == pytest.approx(norm, rel=1e-4)


def test_gradients_that_were_written_after_allreduce_grads():
    copies = torchkv.replicate(make_model(), ["cpu"] * 2)
    trainer = torchkv.Trainer(copies, "sgd", update_on_kvstore=False)
    x, y = make_batches(1)[0]
    F.cross_entropy(copies(x), y).backward()
    trainer.allreduce_grads()
    with torch.no_grad():
        for p in copies[0].parameters():
            p.grad.mul_(3)
    norm = nn.utils.get_total_norm([p.grad for p in copies[0].parameters()]).item()
    assert trainer.clip_grad_norm_(1e6).item() == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.float32])
def test_norms_whose_powers_overflow(norm_type, dtype):
    model = nn.Linear(2, 2, bias=False, dtype=dtype)
    trainer = torchkv.Trainer(model, "sgd", {"learning_rate": 1.0})
    large = 1e30 if dtype == torch.float32 else 1e250
    model.weight.grad = torch.full_like(model.weight, large)
    expected = large * {1.0: 4, 2.0: 2, math.inf: 1}[norm_type]
    assert trainer.clip_grad_norm_(1.0, norm_type).item() == pytest.approx(expected)
    assert model.weight.grad.abs().max().item() == pytest.approx(large / expected)


def test_a_norm_that_is_not_finite():
    copies = torchkv.replicate(make_model(), ["cpu"] * 2)
    trainer = torchkv.Trainer(copies, "sgd")
    x, y = make_batches(1)[0]
    F.cross_entropy(copies(x), y).backward()
    next(copies[1].parameters()).grad[0, 0] = math.inf
    before = [p.grad.clone() for m in copies for p in m.parameters()]
    with pytest.raises(RuntimeError, match="of a finite norm, but got one of inf"):
        trainer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    after = [p.grad for m in copies for p in m.parameters()]
    assert all(a.equal(b) for a, b in zip(before, after, strict=True))
    assert trainer.clip_grad_norm_(1.0).isinf()


def test_gradients_of_half_precision_are_summed_in_single_precision():
    model = nn.Linear(4, 4).to(torch.float16)
    copies = torchkv.replicate(model, ["cpu"] * 2)
    trainer = torchkv.Trainer(copies, "sgd")
    for replica in copies:
        for p in replica.parameters():
            p.grad = torch.full_like(p, 40000.0)
    norm = trainer.clip_grad_norm_(1.0)
    assert norm.dtype == torch.float64
    assert norm.item() == pytest.approx(80000 * math.sqrt(20), rel=1e-5)


def test_invalid_limits():
    trainer = torchkv.Trainer(make_model(), "sgd")
    for limit in (-1.0, math.nan):
        with pytest.raises(ValueError, match="clip_grad_norm_: expected a max_norm"):
            trainer.clip_grad_norm_(limit)
    with pytest.raises(TypeError, match="max_norm"):
        trainer.clip_grad_norm_("1")
    assert trainer.clip_grad_norm_(1.0).item() == 0  # no gradients


def test_the_norm_of_the_last_step():
    model = make_model()
    trainer = torchkv.Trainer(
        model, torchkv.optim.SGD(0.5, max_norm=MAX_NORM, skip_nonfinite=True)
    )
    batches = make_batches(4)

    def backward(i):
        F.cross_entropy(model(batches[i][0]), batches[i][1]).backward()
        return nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()

    norm = backward(0)
    trainer.step()
    assert trainer.grad_norm == pytest.approx(norm, rel=1e-5)
    assert trainer.optimizer.grad_norm == trainer.grad_norm
    norm = backward(1)
    trainer.clip_grad_norm_(1e6)
    trainer.step()
    assert trainer.grad_norm == pytest.approx(norm, rel=1e-5)
    # A call that is not followed by a step has no effect on the norm.
    backward(2)
    trainer.clip_grad_norm_(1e-6)
    trainer.zero_grad()
    norm = backward(3)
    trainer.step()
    assert trainer.grad_norm == pytest.approx(norm, rel=1e-5)
    trainer.optimizer.max_norm = None
    trainer.optimizer.skip_nonfinite = False
    backward(0)
    trainer.step()
    assert trainer.grad_norm is None


def test_the_norm_of_gradients_that_were_dropped():
    model = make_model()
    trainer = torchkv.Trainer(model, "sgd")
    x, y = make_batches(1)[0]
    F.cross_entropy(model(x), y).backward()
    trainer.clip_grad_norm_(1.0)
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    trainer.step()
    assert trainer.grad_norm is None


def test_a_skipped_push_keeps_the_norm():
    model = make_model()
    trainer = torchkv.Trainer(model, torchkv.optim.SGD(0.1, skip_nonfinite=True))
    x, y = make_batches(1)[0]
    for with_clip in (False, True):
        F.cross_entropy(model(x), y).backward()
        if with_clip:
            trainer.clip_grad_norm_(1e6)
        trainer.step()
        norm = trainer.grad_norm
        assert math.isfinite(norm)
        F.cross_entropy(model(x), y).backward()
        next(model.parameters()).grad[0] = math.inf
        if with_clip:
            trainer.clip_grad_norm_(1e6)
        trainer.step()
        assert trainer.grad_norm == norm
    assert trainer.optimizer.num_skipped == 2


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_copy_of_a_trainer_continues_training(duplicate):
    model = make_model()
    trainer = torchkv.Trainer(model, "adamw", {"learning_rate": 0.1})
    batches = make_batches(2)

    def train(model, trainer, batch):
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        trainer.clip_grad_norm_(MAX_NORM)
        trainer.step()

    train(model, trainer, batches[0])
    F.cross_entropy(model(batches[1][0]), batches[1][1]).backward()
    trainer.clip_grad_norm_(MAX_NORM)
    both = duplicate((model, trainer))
    trainer.zero_grad()
    both[1].zero_grad()
    for pair in ((model, trainer), both):
        train(*pair, batches[1])
    assert_same_weights(weights(both[0]), weights(model))
    # Parameters may have options before they are trained.
    both[1].optimizer.set_lr_mult({"0.weight": 0.5})
    with pytest.raises(KeyError, match="set_lr_mult"):
        both[1].optimizer.set_lr_mult({"0.wieght": 0.5})
