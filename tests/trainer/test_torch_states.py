"""States go from torch.optim to a Trainer and back."""

import copy
import io

import pytest
import torch

import torchkv
from helpers import assert_same
from training import assert_near, fill_gradients, make_model, weights

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    "Adam": {"lr": 0.1, "amsgrad": True},
    "AdamW": {"lr": 0.1, "weight_decay": 0.2},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
}


class Theirs:
    """A model that torch.optim trains."""

    def __init__(self, name, by_name=False, groups=None, **options):
        self.model = make_model()
        parameters = self.model.named_parameters if by_name else self.model.parameters
        self.optimizer = getattr(torch.optim, name)(
            groups(self.model) if groups else parameters(), **options
        )

    def step(self, value):
        fill_gradients(self.model, value)
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                parameter.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()


class Ours:
    """One that a Trainer trains."""

    def __init__(self, name, model=None, **options):
        self.model = model or make_model()
        optimizer = getattr(torchkv.optim, name)(**options)
        self.trainer = torchkv.Trainer(self.model, optimizer)

    @property
    def optimizer(self):
        return self.trainer.optimizer

    def step(self, value):
        fill_gradients(self.model, value)
        self.trainer.step(1)


class OfClass(Ours):
    """A model that a Trainer trains with a class of torch.optim."""

    def __init__(self, name, **options):
        self.model = make_model()
        self.trainer = torchkv.Trainer(self.model, getattr(torch.optim, name), options)


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_trainer_goes_on_from_torchs_state(name, by_name):
    theirs = Theirs(name, by_name, **OPTIONS[name])
    for value in (1.0, -2.0):
        theirs.step(value)
    ours = Ours(name)  # its options are those of the state
    ours.model.load_state_dict(theirs.model.state_dict())
    ours.optimizer.load_state_dict(through_a_file(theirs.optimizer.state_dict()))
    for value in (0.5, 3.0, -1.0):
        theirs.step(value)
        ours.step(value)
        assert_near(weights(ours.model), weights(theirs.model))
    assert ours.optimizer.lr == OPTIONS[name]["lr"]


@pytest.mark.parametrize("name", OPTIONS)
def test_torch_goes_on_from_a_trainers_state(name):
    ours = Ours(name, **OPTIONS[name])
    for value in (1.0, -2.0):
        ours.step(value)
    theirs = Theirs(name)
    theirs.model.load_state_dict(ours.model.state_dict())
    theirs.optimizer.load_state_dict(through_a_file(ours.optimizer.torch_state_dict()))
    for value in (0.5, 3.0, -1.0):
        theirs.step(value)
        ours.step(value)
        assert_near(weights(ours.model), weights(theirs.model))
    assert theirs.optimizer.param_groups[0]["lr"] == OPTIONS[name]["lr"]


@pytest.mark.parametrize("name", OPTIONS)
def test_there_and_back_are_the_same_bits(name):
    ours = Ours(name, **OPTIONS[name])
    ours.step(1.0)
    before = ours.optimizer.state_dict()
    other = Ours(name)
    other.optimizer.load_state_dict(ours.optimizer.torch_state_dict())
    after = other.optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, state in before["state"].items():
        # torch's SGD counts no steps.
        assert name == "SGD" or after["state"][key]["step"] == state["step"]
        for part, value in state.items():
            if isinstance(value, torch.Tensor):
                assert_same(after["state"][key][part], value)


def test_a_state_without_a_step():
    ours = Ours("Adam")
    ours.step(1.0)
    ours.optimizer.load_state_dict(Theirs("Adam", lr=0.5).optimizer.state_dict())
    assert all(state["step"] == 0 for state in ours.optimizer.state.values())
    assert ours.optimizer.lr == 0.5
    new = Ours("Adam")
    assert new.optimizer.torch_state_dict()["state"] == {}


def bias_apart(model):
    last = model[-1]
    others = [p for p in model.parameters() if p is not last.bias]
    return [{"params": others}, {"params": [last.bias], "lr": 0.5}]


def test_groups_are_taken_over_in_their_order():
    theirs = Theirs("Adam", groups=bias_apart, lr=0.1)
    theirs.step(1.0)
    ours = Ours("Adam")
    name = [name for name, _ in ours.model.named_parameters()][-1]
    ours.optimizer.set_param_groups([{"keys": [name], "lr": 9.0}])
    ours.model.load_state_dict(theirs.model.state_dict())
    ours.optimizer.load_state_dict(theirs.optimizer.state_dict())
    assert [group["lr"] for group in ours.optimizer.param_groups] == [0.1, 0.5]
    theirs.step(2.0)
    ours.step(2.0)
    assert_near(weights(ours.model), weights(theirs.model))
    again = Theirs("Adam", groups=bias_apart, lr=7.0)
    again.model.load_state_dict(ours.model.state_dict())
    again.optimizer.load_state_dict(ours.optimizer.torch_state_dict())
    for each in (theirs, ours, again):
        each.step(-1.0)
    assert_near(weights(again.model), weights(theirs.model))
    assert_near(weights(ours.model), weights(theirs.model))


def test_names_need_no_groups():
    theirs = Theirs(
        "Adam",
        groups=lambda model: [
            {"params": list(model[-1].named_parameters(prefix=str(len(model) - 1)))},
            {"params": list(model[0].named_parameters(prefix="0")), "lr": 0.5},
        ],
        lr=0.1,
    )
    theirs.step(1.0)
    ours = Ours("Adam")
    ours.model.load_state_dict(theirs.model.state_dict())
    ours.optimizer.load_state_dict(theirs.optimizer.state_dict())
    assert ours.optimizer.param_groups[1]["keys"] == ["0.weight", "0.bias"]
    theirs.step(2.0)
    ours.step(2.0)
    assert_near(weights(ours.model), weights(theirs.model))


@pytest.mark.parametrize("with_frozen", [False, True])
def test_frozen_parameters(with_frozen):
    theirs = Theirs(
        "Adam",
        groups=lambda model: [
            p for p in model.parameters() if with_frozen or p is not model[0].weight
        ],
        lr=0.1,
    )
    theirs.model[0].weight.requires_grad_(False)
    theirs.step(1.0)
    model = make_model()
    model[0].weight.requires_grad_(False)
    ours = Ours("Adam", model)
    ours.model.load_state_dict(theirs.model.state_dict())
    ours.optimizer.load_state_dict(theirs.optimizer.state_dict())
    theirs.step(2.0)
    ours.step(2.0)
    assert_near(weights(ours.model), weights(theirs.model))


def without(name):
    def change(state):
        for group in state["param_groups"]:
            del group[name]

    return change


def in_group(**changes):
    return lambda state: state["param_groups"][0].update(changes)


def with_moment(size):
    return lambda state: state["state"][0].update(exp_avg=torch.ones(size))


REFUSED = [
    (without("betas"), "expected the state of torch.optim.Adam.*'betas'"),
    (without("params"), "expected numbers in param_groups"),
    (in_group(params=[0]), "expected groups of 4 parameters.*groups of 1"),
    (lambda s: s["state"].update({0: 3}), "expected a dict by name"),
    (lambda s: s.update(param_groups=3), "expected a list as 'param_groups'"),
    (lambda s: s.update(state=3), "expected a dict as 'state'"),
]


@pytest.mark.parametrize(
    "make, change, expected",
    [
        *((make, *case) for make in (Ours, OfClass) for case in REFUSED),
        (Ours, in_group(lr=-1.0), "lr"),
        (OfClass, in_group(lr=-1.0), "learning rate"),
        (Ours, with_moment(7), "expected shape"),
        (OfClass, with_moment(7), "expected 'exp_avg'"),
        (Ours, lambda s: s["state"][0].pop("exp_avg"), "exp_avg"),
    ],
)
def test_a_state_that_does_not_load_changes_nothing(make, change, expected):
    theirs = Theirs("Adam", lr=0.5)
    theirs.step(1.0)
    state = copy.deepcopy(theirs.optimizer.state_dict())
    change(state)
    ours = make("Adam", lr=0.25)
    ours.step(1.0)
    before = ours.optimizer.state_dict()
    with pytest.raises(ValueError, match=expected):
        ours.optimizer.load_state_dict(state)
    after = ours.optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, parts in before["state"].items():
        for part, value in parts.items():
            if isinstance(value, torch.Tensor):
                assert_same(after["state"][key][part], value)


def test_what_torch_lacks_is_refused():
    ours = Ours("SGD", lr=0.1)
    ours.optimizer.set_lr_mult({"0.bias": 2.0})
    with pytest.raises(ValueError, match="no lr_mult.*set_param_groups.*'0.bias'"):
        ours.optimizer.torch_state_dict()
    trainer = torchkv.Trainer(make_model(), "sgd", {"learning_rate": 0.1})
    with pytest.raises(TypeError, match="expected an optimizer with torch.optim's"):
        trainer.optimizer.torch_state_dict()
    state = Theirs("SGD", lr=0.1).optimizer.state_dict()
    with pytest.raises(ValueError, match="which optimizers with its formulas load"):
        trainer.optimizer.load_state_dict(state)


OF_CLASSES = {**OPTIONS, "NAdam": {"lr": 0.1}, "Rprop": {"lr": 0.1}}


@pytest.mark.parametrize("name", OF_CLASSES)
def test_a_trainer_with_a_class_goes_on_from_torchs_state_and_back(name):
    first, ours = Theirs(name, **OF_CLASSES[name]), OfClass(name)
    last = Theirs(name)
    for value in (1.0, -2.0):
        first.step(value)
    for before, after, save in (
        (first, ours, first.optimizer.state_dict),
        (ours, last, ours.optimizer.torch_state_dict),
    ):
        after.model.load_state_dict(before.model.state_dict())
        after.optimizer.load_state_dict(through_a_file(save()))
        for value in (0.5, 3.0):
            before.step(value)
            after.step(value)
            expected = weights(after.model)
            for key, value in weights(before.model).items():
                assert_same(value, expected[key])
    assert last.optimizer.param_groups[0]["lr"] == OF_CLASSES[name]["lr"]


def test_a_learning_rate_in_a_tensor_is_copied():
    theirs = Theirs("Adam", lr=torch.tensor(0.5))
    ours = OfClass("Adam", lr=torch.tensor(0.25))
    ours.optimizer.load_state_dict(theirs.optimizer.state_dict())
    state = ours.optimizer.torch_state_dict()
    theirs.optimizer.param_groups[0]["lr"].fill_(7)
    assert ours.optimizer.param_groups[0]["lr"] == 0.5
    ours.optimizer.param_groups[0]["lr"].fill_(9)
    assert state["param_groups"][0]["lr"] == 0.5


def test_a_class_keeps_its_own_implementation():
    theirs = Theirs("Adam", lr=0.5, foreach=True)
    theirs.step(1.0)
    ours = OfClass("Adam", lr=0.25, foreach=False)
    ours.optimizer.load_state_dict(theirs.optimizer.state_dict())
    assert ours.optimizer.param_groups[0]["foreach"] is False
    assert ours.optimizer.lr == 0.5


def test_a_class_without_a_step_has_no_state_in_torchs_form():
    ours = OfClass("Adam", lr=0.5)
    assert ours.optimizer.torch_state_dict()["state"] == {}
    ours.step(1.0)
    ours.optimizer.load_state_dict(Theirs("Adam", lr=0.25).optimizer.state_dict())
    assert ours.optimizer.torch_state_dict()["state"] == {}
    assert ours.optimizer.lr == 0.25
