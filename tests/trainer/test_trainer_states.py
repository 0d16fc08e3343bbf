"""What a Trainer keeps between steps: learning rates, states, weights."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchkv
from training import (
    assert_near,
    assert_same_weights,
    fill_gradients,
    make_batches,
    make_model,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_learning_rate():
    trainer = torchkv.Trainer(make_model(), "adam", {"learning_rate": 0.5})
    assert trainer.learning_rate == 0.5
    trainer.set_learning_rate(0.25)
    assert trainer.learning_rate == trainer.optimizer.lr == 0.25
    with pytest.raises(ValueError, match="a lr of"):
        trainer.set_learning_rate(-1)
    assert trainer.learning_rate == 0.25


def test_learning_rates_of_groups():
    """As MXNet's lr_mult, a rate of a group's own stays; all others follow."""
    trainer = torchkv.Trainer(make_model(), torchkv.optim.Adam, {"lr": 0.5})
    trainer.optimizer.set_param_groups(
        [
            {"keys": ["0.bias"], "weight_decay": 0.1},
            {"keys": ["2.bias"], "lr": 0.125},
        ]
    )
    trainer.set_learning_rate(0.25)
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [
        *(0.25, 0.25, 0.125)
    ]


def compiled(model):
    """Its parameters' names begin with `_orig_mod.`; nothing is compiled before a call.

    Blocks compiled on their own have that in the middle.
    """
    model[0] = torch.compile(model[0])
    return torch.compile(model)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("how", ["before", "after", "class of torch"])
def test_options_of_parameters_of_a_compiled_model(is_compiled, named, how):
    """Their names may be those of the compiled model or of the plain one."""
    model = make_model()
    plain = [name for name, _ in model.named_parameters()]
    both = compiled(model)
    names = [name for name, _ in both.named_parameters()] if named else plain
    trained = both if is_compiled else make_model()
    groups = [{"keys": [names[0]], "lr": 0.25}]
    optimizer = torchkv.optim.SGD(lr=1.0)
    if how == "before":
        optimizer.set_param_groups(groups)
        optimizer.set_lr_mult({names[1]: 0.0})
    is_class = how == "class of torch"
    trainer = torchkv.Trainer(
        trained,
        torch.optim.SGD if is_class else optimizer,
        {"lr": 1.0} if is_class else None,
        kvstore="device",
        update_on_kvstore=True,
        compression_params=[{"keys": [names[3]], "type": "2bit", "threshold": 8.0}],
    )
    if how != "before":
        trainer.optimizer.set_param_groups(groups)
        trainer.optimizer.set_lr_mult({names[1]: 0.0})
    keys = [name for name, _ in trained.named_parameters()]
    assert trainer.optimizer.param_groups[1]["keys"] == [keys[0]]
    start = weights(trained)
    fill_gradients(trained, 1.0)
    trainer.step()
    steps = [0.25, 0.0, 1.0, 0.0]
    expected = {k: start[k] - step for k, step in zip(keys, steps, strict=True)}
    assert_near(weights(trained), expected)
    with pytest.raises(KeyError, match="unknown"):
        trainer.optimizer.set_wd_mult({"unknown": 1.0})
    # A parameter under both names.
    both = {"2.weight": 0.5, "_orig_mod.2.weight": 0.5}
    with pytest.raises(ValueError, match="with and without '_orig_mod.'"):
        trainer.optimizer.set_wd_mult(both)
    with pytest.raises(ValueError, match="in more than one group"):
        trainer.optimizer.set_param_groups([{"keys": [*both]}])


def test_a_name_that_two_parameters_have_without_torch_compile():
    """Neither of them is meant."""
    names = "_orig_mod.a.b", "a._orig_mod.b"
    parameters = {name: nn.Parameter(torch.ones(2)) for name in names}
    trainer = torchkv.Trainer(parameters, torchkv.optim.SGD)
    trainer.optimizer.set_lr_mult({names[0]: 0.5, names[1]: 0.25})
    with pytest.raises(KeyError, match="a.b"):
        trainer.optimizer.set_lr_mult({"a.b": 0.5})


@pytest.mark.parametrize("how", ["state_dict", "states", "optimizer", "torch"])
@pytest.mark.parametrize("first, second", [(True, False), (False, True)])
def test_names_with_and_without_torch_compile_fit_each_other(
    how, first, second, tmp_path
):
    def make(is_compiled):
        model = make_model()
        trained = compiled(model) if is_compiled else model
        trainer = torchkv.Trainer(trained, torchkv.optim.Adam, {"lr": 0.5})
        bias = next(
            key
            for key in trainer.optimizer.param_groups[0]["params"]
            if key.endswith("0.bias") or key.endswith("0._orig_mod.bias")
        )
        trainer.optimizer.set_param_groups([{"keys": [bias], "lr": 0.25}])
        if how != "torch":
            trainer.optimizer.set_lr_mult({bias: 0.5})
        return model, trainer

    model, trainer = make(first)
    fill_gradients(model, 1.0)
    trainer.step()
    other, resumed = make(second)
    if how == "state_dict":
        resumed.load_state_dict(trainer.state_dict())
    else:
        with torch.no_grad():
            for a, b in zip(other.parameters(), model.parameters(), strict=True):
                a.copy_(b)
    if how == "states":
        trainer.save_states(tmp_path / "states")
        resumed.load_states(tmp_path / "states")
    elif how == "optimizer":
        resumed.optimizer.load_state_dict(trainer.optimizer.state_dict())
    elif how == "torch":
        resumed.optimizer.load_state_dict(trainer.optimizer.torch_state_dict())
    for each, its_trainer in ((model, trainer), (other, resumed)):
        fill_gradients(each, 2.0)
        its_trainer.step()
    for a, b in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=10),
        lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(
            o, max_lr=0.1, total_steps=12, cycle_momentum=False
        ),
    ],
    ids=["cosine", "step", "one cycle"],
)
def test_schedulers(make, on_store):
    model, plain_model = make_model(), make_model()
    trainer = torchkv.Trainer(
        model, torchkv.optim.Adam, {"lr": 0.1}, update_on_kvstore=on_store
    )
    plain = torch.optim.Adam(plain_model.parameters(), lr=0.1)
    schedule, plain_schedule = make(trainer.optimizer), make(plain)
    for x, y in make_batches():
        F.cross_entropy(model(x), y).backward()
        trainer.step()
        schedule.step()
        plain.zero_grad()
        F.cross_entropy(plain_model(x), y).backward()
        plain.step()
        plain_schedule.step()
        assert trainer.learning_rate == plain.param_groups[0]["lr"]
    assert_near(weights(model), weights(plain_model), 2e-6)


@pytest.mark.parametrize("weights_first", [True, False])
@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("resumed_on_store", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["adamw", torch.optim.AdamW])
def test_training_from_saved_states_is_bitwise_equal(
    tmp_path, optimizer, dtype, on_store, resumed_on_store, weights_first
):
    def start(on_store):
        model = make_model().to(dtype)
        return model, torchkv.Trainer(model, optimizer, update_on_kvstore=on_store)

    def train(model, trainer, batches):
        for x, y in batches:
            F.cross_entropy(model(x.to(dtype)), y).backward()
            trainer.step()

    batches = make_batches()
    model, trainer = start(on_store)
    trainer.set_learning_rate(0.05)
    train(model, trainer, batches[:5])
    trainer.save_states(tmp_path / "states")
    state = copy.deepcopy(model.state_dict())
    train(model, trainer, batches[5:])

    other, resumed = start(resumed_on_store)
    if weights_first:
        other.load_state_dict(state)
    resumed.load_states(tmp_path / "states")
    if not weights_first:
        other.load_state_dict(state)
    assert resumed.learning_rate == 0.05
    train(other, resumed, batches[5:])
    assert_same_weights(weights(other), weights(model))


@pytest.mark.parametrize("optimizer", ["adamw", torch.optim.Adam])
def test_states_without_options_leave_those_of_the_trainer(tmp_path, optimizer):
    model, other = make_model(), make_model()
    trainer = torchkv.Trainer(model, optimizer, {"lr": 0.5})
    fill_gradients(model, 1.0)
    trainer.step()
    trainer.kvstore.save_optimizer_states(tmp_path / "states")
    resumed = torchkv.Trainer(other, optimizer, {"lr": 0.25})
    resumed.optimizer.set_param_groups([{"keys": ["0.bias"], "lr": 0.125}])
    resumed.load_states(tmp_path / "states")
    assert [group["lr"] for group in resumed.optimizer.param_groups] == [0.25, 0.125]
    state = resumed.optimizer.state["2.bias"]
    assert state["step"] == 1
    assert torch.equal(state["exp_avg"], trainer.optimizer.state["2.bias"]["exp_avg"])


def test_states_of_other_parameters_are_rejected(tmp_path):
    torchkv.Trainer(nn.Linear(2, 2), "adam").save_states(tmp_path / "states")
    for params in ([nn.Parameter(torch.ones(2, 2))], make_model()):
        trainer = torchkv.Trainer(params, "adam")
        before = repr(trainer.optimizer.state_dict())
        with pytest.raises(ValueError, match="load_states: .*parameters") as refused:
            trainer.load_states(tmp_path / "states")
        assert "strict" not in str(refused.value)
        assert repr(trainer.optimizer.state_dict()) == before


@pytest.mark.parametrize("content", [b"", b"x" * 99])
def test_a_damaged_file_changes_nothing(tmp_path, content):
    (tmp_path / "states").write_bytes(content)
    trainer = torchkv.Trainer(make_model(), "adam")
    before = repr(trainer.optimizer.state_dict())
    with pytest.raises(ValueError, match="load_states: expected a file"):
        trainer.load_states(tmp_path / "states")
    assert repr(trainer.optimizer.state_dict()) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("optimizer", ["sgd", torch.optim.SGD])
def test_training_continues_from_weights_written_between_steps(optimizer, dtype):
    """Momentum is kept, as with torch.optim, and so is the new weight."""
    parameter = nn.Parameter(torch.zeros(3, dtype=dtype))
    word = "learning_rate" if optimizer == "sgd" else "lr"
    trainer = torchkv.Trainer([parameter], optimizer, {word: 1.0, "momentum": 0.5})
    parameter.grad = torch.full_like(parameter, 4.0)
    trainer.step()
    assert parameter.tolist() == [-4.0] * 3
    with torch.no_grad():
        parameter.fill_(100.0)
    parameter.grad = torch.full_like(parameter, 4.0)
    trainer.step()
    assert parameter.tolist() == [94.0] * 3  # 100 - (4 + 4 / 2)
    parameter.data = torch.zeros(3, dtype=dtype)
    parameter.grad = torch.full_like(parameter, 1.0)
    trainer.step()
    assert parameter.tolist() == [-4.0] * 3  # -(1 + 6 / 2)


def test_a_module_may_change_its_dtype():
    model = nn.Linear(2, 2)
    trainer = torchkv.Trainer(model, "adamw")
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        fill_gradients(model)
        trainer.step()
        model.to(dtype)
        fill_gradients(model)
        trainer.step()
        assert trainer.kvstore.dtype("weight") == model.weight.dtype == dtype
    assert trainer.optimizer.state_dict()["state"]["weight"]["step"] == 6


@pytest.mark.parametrize("optimizer", ["sgd", torch.optim.SGD])
def test_a_rejected_weight_loses_no_state(optimizer):
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    trainer = torchkv.Trainer(parameters, optimizer)
    trainer.optimizer.lr = 1.0
    trainer.optimizer.set_param_groups([{"keys": [0, 1], "momentum": 0.5}])

    def step():
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 4.0)
        trainer.step()

    step()
    parameters[0].data = torch.zeros(4)
    with pytest.raises(ValueError, match="shape"):
        step()
    parameters[0].data = torch.full((3,), 100.0)
    step()
    assert parameters[0].tolist() == [94.0] * 3  # 100 - (4 + 4 / 2)
    assert parameters[1].tolist() == [-10.0] * 3
