"""Weights that are written, frozen, moved or unused between the steps of a Trainer."""

import copy

import pytest
import torch
from torch import nn

import torchkv
from helpers import assert_same
from torchkv import optim

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.bfloat16]
of_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def trained(module, lr=0.1, copies=1, **options):
    module = torchkv.replicate(module, ["cpu"] * copies) if copies > 1 else module
    return module, torchkv.Trainer(module, optim.SGD(lr=lr), **options)


def step(module, trainer, rows=1, **options):
    first = next(module.parameters())
    module(torch.ones(rows, 2, dtype=first.dtype)).float().sum().backward()
    trainer.step(**options)


def two_layers(dtype=torch.float32):
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(dtype)


# --- saving and loading -----------------------------------------------------------


@of_each_dtype
def test_a_write_to_a_frozen_weight_is_saved(dtype):
    module, trainer = trained(two_layers(dtype))
    step(module, trainer)
    module[0].requires_grad_(False)
    with torch.no_grad():
        module[0].weight.fill_(0.5)
    step(module, trainer)
    saved = trainer.state_dict()
    assert_same(saved["keys"]["0.weight"]["value"], module[0].weight.detach())
    trainer.load_state_dict(saved)
    assert module[0].weight.unique().tolist() == [0.5]


@of_each_dtype
def test_a_weight_frozen_since_is_loaded(dtype):
    module, trainer = trained(two_layers(dtype))
    step(module, trainer)
    saved = trainer.state_dict()
    again, other = trained(two_layers(dtype))
    again[0].requires_grad_(False)
    other = torchkv.Trainer(again, optim.SGD(lr=0.1))
    other.load_state_dict(saved)
    for mine, theirs in zip(again.parameters(), module.parameters(), strict=True):
        assert_same(mine.detach(), theirs.detach())


def test_a_refused_state_of_a_weight_frozen_since_changes_nothing(tmp_path):
    module, trainer = trained(two_layers())
    saved = trainer.state_dict()
    trainer.save_states(tmp_path / "states")
    again = two_layers()
    again[0].requires_grad_(False)
    other = torchkv.Trainer(again, optim.Adam(lr=0.1))
    before = other.kvstore.keys()
    with pytest.raises(ValueError, match="optimizer"):
        other.load_state_dict(saved)
    with pytest.raises(ValueError):
        other.load_states(tmp_path / "states")
    assert other.kvstore.keys() == before
    again[0].requires_grad_(True)
    step(again, other)
    assert len(other.kvstore.keys()) == 4


def test_states_of_a_weight_frozen_since_are_loaded(tmp_path):
    module, trainer = trained(two_layers())
    step(module, trainer)
    trainer.save_states(tmp_path / "states")
    again = two_layers()
    again[0].requires_grad_(False)
    other = torchkv.Trainer(again, optim.SGD(lr=0.3))
    other.load_states(tmp_path / "states")
    assert other.learning_rate == 0.1


def test_some_of_the_parameters_with_strict_false():
    module, trainer = trained(two_layers())
    module[0].requires_grad_(False)
    trainer = torchkv.Trainer(module, optim.SGD(lr=0.1))
    step(module, trainer)
    saved = trainer.state_dict()
    again, other = trained(two_layers())
    before = again[0].weight.detach().clone()
    with pytest.raises(ValueError, match=r"missing.*strict=False"):
        other.load_state_dict(saved)
    other.load_state_dict(saved, strict=False)
    assert_same(again[0].weight.detach(), before)
    assert_same(again[1].weight.detach(), module[1].weight.detach())


def test_a_dict_of_something_else_is_refused():
    module, trainer = trained(two_layers())
    with pytest.raises(ValueError, match="expected what a Trainer's state_dict"):
        trainer.load_state_dict(module.state_dict())


# --- memory -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 256])
@of_each_dtype
def test_assigned_data_counts_wherever_it_is(dtype, size):
    """The allocator gives it addresses that earlier data had."""
    for seed in range(10):
        torch.manual_seed(seed)
        module = nn.Linear(size, size, bias=False).to(dtype)
        trainer = torchkv.Trainer(module, optim.SGD(lr=0.0))
        weight = module.weight
        weight.grad = torch.ones_like(weight)
        trainer.step()
        weight.data = weight.data * 0.5
        weight.data = weight.data + 1
        saved = weight.data.clone()
        weight.grad = torch.ones_like(weight)
        trainer.step()
        assert_same(weight.detach(), saved)


def test_a_copy_sees_assigned_data():
    for _ in range(10):
        module, trainer = trained(nn.Linear(2, 2, bias=False), lr=0.0)
        step(module, trainer)
        module, trainer = copy.deepcopy((module, trainer))
        module.weight.data = torch.full((2, 2), 3.0)
        step(module, trainer)
        assert module.weight.unique().tolist() == [3.0]


def test_memory_that_was_a_weights_is_not_written():
    module, trainer = trained(nn.Linear(2, 2))
    backup = [parameter.data for parameter in module.parameters()]
    before = [tensor.clone() for tensor in backup]
    nn.utils.vector_to_parameters(torch.zeros(6), module.parameters())
    step(module, trainer)
    for tensor, expected in zip(backup, before, strict=True):
        assert_same(tensor, expected)
    assert module.bias.tolist() == pytest.approx([-0.1, -0.1])


@pytest.mark.parametrize("wrap", [lambda x: x, nn.Parameter])
def test_parameters_that_share_memory_are_refused(wrap):
    module = two_layers()
    if wrap is nn.Parameter:
        module[1].weight = nn.Parameter(module[0].weight)
    else:
        module[1].weight.data = module[0].weight.data
    with pytest.raises(ValueError, match=r"memory of their own.*'0.weight' and '1.wei"):
        torchkv.Trainer(module, "sgd")


def test_parameters_in_one_flat_buffer_are_trained():
    module = two_layers()
    flat = nn.utils.parameters_to_vector(module.parameters()).detach()
    nn.utils.vector_to_parameters(flat, module.parameters())
    step(*trained(module))


def test_one_written_element_keeps_the_masters_of_others():
    def change(touch):
        module = nn.Linear(4, 4, bias=False).bfloat16()
        nn.init.constant_(module.weight, 1)
        trainer = torchkv.Trainer(module, optim.SGD(lr=1e-4))
        for _ in range(100):
            module.weight.grad = torch.ones_like(module.weight)
            trainer.step()
            if touch:
                with torch.no_grad():
                    module.weight[0, 0] = 0.0
        return module.weight.detach()[1:]

    assert change(touch=False).unique().tolist() == [0.98828125]  # of 0.99
    assert_same(change(touch=True), change(touch=False))


def test_parameters_can_be_swapped():
    module, trainer = trained(nn.Linear(2, 2))
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.load_state_dict({k: x + 1 for k, x in module.state_dict().items()})
        expected = module.bias.detach() - 0.1
        step(module, trainer)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    torch.testing.assert_close(module.bias.detach(), expected)


# --- replicas ---------------------------------------------------------------------


def test_a_write_to_a_frozen_weight_reaches_all_replicas():
    module = two_layers()
    module[0].requires_grad_(False)
    replicas, trainer = trained(module, copies=2)
    step(replicas, trainer, rows=2)
    with torch.no_grad():
        module[0].weight.fill_(5)
    step(replicas, trainer, rows=2)
    assert_same(replicas[1][0].weight.detach(), torch.full((2, 2), 5.0))


def test_a_write_to_an_unused_weight_reaches_all_replicas():
    replicas, trainer = trained(two_layers(), copies=2)
    for replica in replicas:
        replica[0].bias.grad = torch.ones(2)
    with torch.no_grad():
        replicas[0][1].weight.fill_(5)
    trainer.step(ignore_stale_grad=True)
    assert_same(replicas[1][1].weight.detach(), torch.full((2, 2), 5.0))


@pytest.mark.parametrize("copies", [1, 2])
def test_gradients_of_frozen_weights_are_dropped(copies):
    module = two_layers()
    replicas, trainer = trained(module, copies=copies)
    replicas(torch.ones(2, 2)).sum().backward()
    module[0].requires_grad_(False)
    trainer.step()
    for replica in replicas if copies > 1 else [module]:
        assert all(parameter.grad is None for parameter in replica.parameters())


def test_a_batch_with_fewer_rows_than_replicas_keeps_gradients_sparse():
    def weights(copies):
        table = nn.Embedding(5, 1, sparse=True)
        nn.init.ones_(table.weight)
        module = torchkv.replicate(table, ["cpu"] * copies) if copies > 1 else table
        trainer = torchkv.Trainer(module, optim.AdamW(lr=0.1))
        for ids in ([1, 2], [3]):
            module(torch.tensor(ids)).sum().backward()
            trainer.step()
        return table.weight.detach()

    assert_same(weights(3), weights(1))
