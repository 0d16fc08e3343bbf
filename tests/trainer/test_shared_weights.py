"""Weights that are the stored values themselves, and those that are copies."""

import copy

import pytest
import torch
from torch import nn

import torchkv
from helpers import assert_same

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def without_places(monkeypatch):
    """`make places-test` would shard the values."""
    monkeypatch.delenv("TORCHKV_PLACES", raising=False)


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(dtype)


def make(model, optimizer="adamw", kvstore="device", **options):
    return torchkv.Trainer(
        model.named_parameters(), optimizer, {"learning_rate": 0.1}, kvstore, **options
    )


def backward(model):
    dtype = next(model.parameters()).dtype
    model(torch.randn(6, 4).to(dtype)).float().square().sum().backward()


def shares(trainer, key, parameter):
    """Whether the store sees a write that bumps no version counter."""
    store, before = trainer._store, parameter.detach().clone()
    parameter.data.add_(1)
    found = torch.equal(store.pull(key).to(parameter.device), parameter)
    parameter.data.copy_(before)
    return found


@pytest.mark.parametrize("kvstore", ["local", "device", None])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16],
    ids=str,
)
def test_weights_are_the_stored_values(kvstore, dtype):
    model = make_model(dtype)
    trainer = make(model, kvstore=kvstore)
    for _ in range(2):
        assert all(shares(trainer, *item) for item in model.named_parameters())
        backward(model)
        trainer.step()


@pytest.mark.parametrize(
    ("optimizer", "reference"),
    [
        (torchkv.optim.AdamW, torch.optim.AdamW),
        (torchkv.optim.SGD, torch.optim.SGD),
        (torch.optim.RAdam, torch.optim.RAdam),
    ],
)
def test_writes_through_data_are_not_lost(optimizer, reference):
    """As torch.optim, which has the parameters, sees them."""
    ours, theirs = (nn.Sequential(nn.Linear(4, 8), nn.Tanh()) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    trainer = torchkv.Trainer(ours.named_parameters(), optimizer, {"lr": 0.1})
    reference = reference(theirs.parameters(), lr=0.1)
    averages = [p.detach().clone() for p in ours.parameters()]
    for step in range(4):
        for model in (ours, theirs):
            torch.manual_seed(step)
            backward(model)
            with torch.no_grad():
                if step == 1:
                    model[0].weight.data.clamp_(-0.2, 0.2)
                if step == 2:  # an exponential moving average, put in its place
                    for p, average in zip(model.parameters(), averages, strict=True):
                        p.data = average.clone()
        trainer.step()
        reference.step()
        reference.zero_grad()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    assert all(shares(trainer, *item) for item in ours.named_parameters())


@pytest.mark.parametrize("how", ["data", "in place"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_written_element_replaces_its_master_and_no_other(dtype, how):
    weight = nn.Parameter(torch.ones(6, dtype=dtype))
    trainer = torchkv.Trainer({"w": weight}, "sgd", {"learning_rate": 1.0})

    def step():
        weight.grad = torch.full((6,), 2.0**-14, dtype=dtype)  # rounded away
        trainer.step(1)
        assert shares(trainer, "w", weight)

    step()
    with torch.no_grad():
        (weight.data if how == "data" else weight)[2] = 3
    step()
    master = trainer.state_dict()["keys"]["w"]["state"]["master"]
    expected = [1 - 2.0**-13] * 6
    expected[2] = 3 - 2.0**-14
    assert master.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex32], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_writes_to_other_narrow_weights_count(dtype):
    weight = nn.Parameter(torch.ones(3).to(dtype))
    trainer = torchkv.Trainer({"w": weight}, "sgd", {"learning_rate": 1.0})
    for value in (1.0, 3.0):
        weight.data[2:] = torch.tensor([value]).to(dtype)
        weight.grad = torch.zeros(3).to(dtype)
        trainer.step(1)
        assert weight.detach().to(torch.complex64)[2] == value


def test_the_first_of_two_replicas_is_shared():
    model = make_model()
    replicas = torchkv.replicate(model, ["cpu", "cpu"])
    trainer = torchkv.Trainer(replicas, "sgd", {"learning_rate": 0.1})
    for _ in range(2):
        for replica in replicas:
            backward(replica)
        trainer.step()
        first, second = (dict(replica.named_parameters()) for replica in replicas)
        for key, parameter in first.items():
            assert shares(trainer, key, parameter)
            assert_same(second[key], parameter)


def test_weights_are_shared_after_load_state_dict():
    model, other = make_model(), make_model()
    trainer, fresh = make(model), make(other)
    backward(model)
    trainer.step()
    fresh.load_state_dict(trainer.state_dict())
    pointers = [p.data_ptr() for p in other.parameters()]
    for key, parameter in other.named_parameters():
        assert_same(parameter, dict(model.named_parameters())[key])
        assert shares(fresh, key, parameter)
    for each, its in ((model, trainer), (other, fresh)):
        torch.manual_seed(3)
        backward(each)
        its.step()
    for mine, its in zip(other.parameters(), model.parameters(), strict=True):
        assert_same(mine, its)
    assert [p.data_ptr() for p in other.parameters()] == pointers


def test_a_copied_trainer_shares_its_own_models_weights():
    model = make_model()
    trainer = make(model)
    backward(model)
    trainer.step()
    copied_model, copied = copy.deepcopy((model, trainer))
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        backward(copied_model)
        copied.step()
    assert all(shares(copied, *item) for item in copied_model.named_parameters())
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert_same(parameter, value)


def test_a_parameter_that_changes_its_dtype_or_layout_is_shared_again():
    model = make_model()
    trainer = make(model)
    backward(model)
    trainer.step()
    model.double()
    model[0].weight.data = model[0].weight.data.t().contiguous().t()
    backward(model)
    trainer.step()
    assert all(shares(trainer, *item) for item in model.named_parameters())


def test_parameters_of_one_storage_are_shared():
    flat = torch.randn(12)
    check_shared(
        {"a": flat[:4], "b": flat[4:6], "c": torch.randn(3), "d": flat[7:]},
        dict.fromkeys("abcd", True),
    )


def test_views_may_move_in_their_buffer():
    flat = torch.arange(12.0)
    a, b, c = (nn.Parameter(flat[i : i + 4]) for i in (0, 4, 8))
    half = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    copied = nn.Parameter(torch.ones(8)[::2])
    parameters = {"a": a, "half": half, "b": b, "copied": copied, "c": c}
    trainer = torchkv.Trainer(parameters, "sgd", {"learning_rate": 0.5})

    def check_step(shared):
        before = {key: p.detach().clone() for key, p in parameters.items()}
        for p in parameters.values():
            p.grad = torch.ones_like(p)
        trainer.step(1)
        found = {key for key, p in parameters.items() if shares(trainer, key, p)}
        assert found == shared
        for key in shared:
            assert_same(parameters[key].detach(), before[key] - 0.5)

    check_step({"a", "half", "b", "c"})
    a.data, b.data = b.data, a.data
    with torch.no_grad():
        half.add_(1)
    check_step({"a", "half", "b", "c"})
    a.data, b.data = flat[1:5], flat[5:9]  # over c's first number
    check_step({"a", "half"})
    b.data = flat[9:12].new_ones(4)
    check_step({"a", "half", "b"})
    c.data = flat[8:12].clone()
    check_step({"a", "half", "b", "c"})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_frozen_nested_tensor_overlaps_with_nothing():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    frozen = nn.Parameter(nested, requires_grad=False)
    weight = nn.Parameter(torch.ones(2))
    trainer = torchkv.Trainer({"a": frozen, "b": weight}, "sgd")
    weight.sum().backward()
    trainer.step(1)
    assert shares(trainer, "b", weight)


# --- copies ----------------------------------------------------------------------


def check_copies(model, trainer, keys):
    backward(model)
    trainer.step()
    for key, parameter in model.named_parameters():
        assert shares(trainer, key, parameter) == (key not in keys)
        assert_same(trainer._store.pull(key), parameter)


def check_shared(parameters, expected):
    model = nn.ParameterDict(parameters)
    trainer = torchkv.Trainer(model.named_parameters(), "sgd", {"learning_rate": 0.1})
    sum(p.square().sum() for p in model.parameters()).backward()
    trainer.step()
    found = {key: shares(trainer, key, p) for key, p in model.named_parameters()}
    assert found == expected


def test_parameters_that_overlap_are_copies():
    flat = torch.randn(12)
    check_shared(
        {"a": flat[:6], "b": flat[1:3], "c": flat[2:5], "d": flat[6:], "e": flat[5:5]},
        {"a": False, "b": False, "c": False, "d": True, "e": True},
    )
    check_shared(
        {"a": flat[:8].view(4, 2)[:, 0], "b": flat[1:4]}, {"a": False, "b": False}
    )


def test_places_have_copies(monkeypatch):
    monkeypatch.setenv("TORCHKV_PLACES", "cpu,cpu")
    model = make_model()
    check_copies(model, make(model), {key for key, _ in model.named_parameters()})


@pytest.mark.cuda
def test_one_gpu_shares_and_a_local_store_has_copies():
    model = make_model().cuda()
    assert all(shares(make(model), *item) for item in model.named_parameters())
    model = make_model().cuda()
    trainer = make(model, kvstore="local")
    assert not any(shares(trainer, *item) for item in model.named_parameters())
