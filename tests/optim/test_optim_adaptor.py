"""Classes of torch.optim on a store."""

import contextlib
import copy
import pickle

import pytest
import torch

import torchkv
from helpers import assert_same, full, run_threads, snapshot, stored


@contextlib.contextmanager
def default_device():
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


class ReplacesData(torch.optim.SGD):
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


class ReplacesParameter(torch.optim.SGD):
    def step(self):
        group = self.param_groups[0]
        group["params"][0] = torch.nn.Parameter(group["params"][0] - 1)


class Transposes(torch.optim.SGD):
    def step(self):
        p = self.param_groups[0]["params"][0]
        p.data = p.data.t()


@pytest.mark.parametrize("cls", [ReplacesData, ReplacesParameter, Transposes])
def test_a_step_that_replaces_the_weight_is_an_error(kv, cls):
    value = torch.arange(4.0).view(2, 2)
    kv.init([3, 5], [value, value])
    kv.set_optimizer(cls, lr=0.5)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=rf"{cls.__name__}.step\(\) to write .*\(key 3\)"
        ):
            kv.push([3, 5], [torch.ones(2, 2)] * 2)
    assert_same(stored(kv, 3), value)
    assert_same(stored(kv, 5), value)


def test_a_value_without_elements_has_no_memory_to_replace(kv):
    kv.init(3, torch.ones(0))
    kv.set_optimizer(ReplacesData, lr=0.5)
    kv.push(3, torch.ones(0))
    assert stored(kv, 3).numel() == 0


def test_sparse_adam_is_rejected_when_it_is_set(kv):
    kv.init(3, full(1))
    with pytest.raises(ValueError, match="set_optimizer: .*SparseAdam.*sparse"):
        kv.set_optimizer(torch.optim.SparseAdam, lr=0.5)
    assert kv.optimizer is None


@pytest.mark.parametrize("cls", [torch.optim.NAdam, torch.optim.Adam])
@pytest.mark.parametrize("scope", [lambda: torch.device("meta"), default_device])
def test_the_default_device_does_not_matter(kv, cls, scope):
    expected = torchkv.create(kv.type)
    for store in (kv, expected):
        store.init(3, full(1))
        store.set_optimizer(cls, lr=0.5)
        store.push(3, full(2))
    value, gradient = full(1), full(2)
    with scope():
        kv.init(4, value)
        kv.push([3, 4], [gradient] * 2)
        state = kv.optimizer.state_dict()
        assert all(
            x.device.type == "cpu"
            for x in state["state"][4].values()
            if isinstance(x, torch.Tensor)
        )
        kv.optimizer.load_state_dict(state)
        kv.push([3, 4], [gradient] * 2)
    expected.init(4, value)
    for _ in range(2):
        expected.push([3, 4], [gradient] * 2)
    for key in (3, 4):
        assert_same(stored(kv, key), stored(expected, key))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"lr": True}, TypeError),
        ({"lr": float("nan")}, ValueError),
        ({"lr": float("inf")}, ValueError),
        ({"lr": 10**400}, ValueError),
        ({"lr": 0.5, "weight_decay": float("nan")}, ValueError),
    ],
)
def test_numbers_that_would_step_to_nan_are_rejected(kv, options, error):
    kv.init(3, full(1))
    with pytest.raises(error, match="set_optimizer: expected"):
        kv.set_optimizer(torch.optim.SGD, **options)
    assert kv.optimizer is None
    kv.set_optimizer(torch.optim.SGD, lr=0.5)
    for name, value in options.items():
        if value != 0.5:
            with pytest.raises(error, match="SGD: expected"):
                kv.optimizer.param_groups[0][name] = value
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(0.5))


class Negates(torch.optim.SGD):
    """Makes the weight a negative view of its memory."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data = torch._neg_view(parameter.data)


def test_a_step_that_negates_the_view_is_an_error(kv):
    kv.init(3, full(1))
    kv.set_optimizer(Negates, lr=0.5)
    with pytest.raises(RuntimeError, match=r"\(key 3\)"):
        kv.push(3, full(1))
    assert_same(stored(kv, 3), full(1))


# --- All classes, and their states

ANY = {
    "ASGD": {"lr": 0.05, "t0": 10},
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "Adamax": {},
    "Muon": {},
    "NAdam": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9},
    "Rprop": {},
    "SGD": {"lr": 0.1, "momentum": 0.9},
}


def step_both(kv, parameters, theirs):
    gradients = [torch.randn_like(p) for p in parameters]
    kv.push(list(range(len(parameters))), [[g / 2, g / 2] for g in gradients])
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    theirs.step()


def torch_pair(kv, name, shapes=((4, 5), (7, 3))):
    values = [torch.randn(shape) for shape in shapes]
    parameters = [torch.nn.Parameter(v.clone()) for v in values]
    cls = getattr(torch.optim, name)
    kv.init(list(range(len(values))), values)
    kv.set_optimizer(cls, **ANY[name])
    return parameters, cls(parameters, **ANY[name])


def test_all_classes_of_torch_are_tested():
    classes = {n for n in torch.optim.__all__ if n[0].isupper()}
    assert classes - {"LBFGS", "SparseAdam", "Optimizer"} <= {*ANY}


@pytest.mark.parametrize("name", ANY)
def test_each_class_matches_torch(kv, name):
    parameters, theirs = torch_pair(kv, name)
    for step in range(20):
        if step == 10:
            kv.optimizer.lr = theirs.param_groups[0]["lr"] = 0.01
        step_both(kv, parameters, theirs)
    for key, parameter in enumerate(parameters):
        torch.testing.assert_close(stored(kv, key), parameter.detach())
    state = pickle.loads(pickle.dumps(kv.optimizer.state_dict()))
    with torchkv.create() as other:
        other.init([0, 1], kv.pull([0, 1]))
        other.set_optimizer(getattr(torch.optim, name), **ANY[name])
        other.optimizer.load_state_dict(state)
        assert repr(other.optimizer.state_dict()) == repr(state)
        for store in (kv, other):
            store.push([0, 1], [torch.ones(4, 5), torch.ones(7, 3)])
        assert snapshot(kv) == snapshot(other)
        bad = copy.deepcopy(state)
        bad["state"][1] = state["state"][0]
        if name != "Rprop":
            with pytest.raises(ValueError, match="key 1"):
                other.optimizer.load_state_dict(bad)


def test_an_adapted_optimizer_keeps_no_reference_to_stored_values(kv):
    kv.init(3, full(8))
    kv.set_optimizer(torch.optim.SGD, lr=0.5, momentum=0.5)
    kv.push(3, full(1))
    place = kv.pull(3).data_ptr()
    assert place
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(8 - 0.5 - 0.75))
    kv.delete(3)
    kv.init(3, full(8))
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(7.5), "a deleted key's state is gone")
    with pytest.raises(TypeError, match="save"):
        copy.deepcopy(kv)
    with pytest.raises(ValueError, match="(?i)learning rate"):
        kv.optimizer.lr = -1
    assert kv.optimizer.lr == 0.5
    kv.set_updater(None)
    assert kv.optimizer is None


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.SGD])
def test_an_adapted_state_is_saved_and_loaded_during_pushes(kv, cls):
    kv.init(0, full(0))
    kv.set_optimizer(cls, lr=0.5)
    kv.push(0, full(1))
    optimizer = kv.optimizer

    def push():
        for _ in range(3000):
            kv.push(0, full(1))

    def load():
        for _ in range(300):
            optimizer.load_state_dict(optimizer.state_dict())

    run_threads([push, load], 30)


def test_an_adapted_state_of_a_group_loads(kv):
    kv.init([0, 1], [full(8), full(8)])
    kv.set_optimizer(torch.optim.SGD, lr=0.5)
    kv.set_param_groups([{"keys": [1], "momentum": 0.5}])
    kv.push([0, 1], [full(1), full(1)])
    kv.optimizer.load_state_dict(kv.optimizer.state_dict())
    kv.push([0, 1], [full(1), full(1)])
    assert_same(stored(kv, 1), full(8 - 0.5 - 0.75))


LIVE = {
    "SGD": ({"momentum": 0.5, "dampening": 0.5}, {"momentum": 0.0}),
    "Adam": ({"amsgrad": True}, {"amsgrad": False}),
    "RMSprop": ({"centered": True, "momentum": 0.5}, {"centered": False}),
}


@pytest.mark.parametrize("name", LIVE)
def test_an_adapted_state_continues_after_options_have_changed(kv, name):
    kv.init([0, 1], [full(8), full(8)])
    cls, (more, less) = getattr(torch.optim, name), LIVE[name]
    kv.set_optimizer(cls, lr=0.5)
    kv.optimizer.param_groups[0].update(more)
    kv.push(0, full(1))
    for options in (more, less):
        kv.optimizer.param_groups[0].update(options)
        with torchkv.create() as other:
            other.init([0, 1], kv.pull([0, 1]))
            other.set_optimizer(cls)
            other.optimizer.load_state_dict(kv.optimizer.state_dict())
            for store in (kv, other):
                store.push([0, 1], [full(3), full(3)])
            assert snapshot(other) == snapshot(kv)


def test_an_adapted_momentum_that_is_enabled_late(kv):
    """A zero buffer would count half of the first gradient only."""
    kv.init(0, full(8))
    kv.set_optimizer(torch.optim.SGD, lr=1.0)
    kv.push(0, full(1))
    kv.optimizer.param_groups[0].update(momentum=0.5, dampening=0.5)
    kv.optimizer.load_state_dict(kv.optimizer.state_dict())
    kv.push(0, full(1))
    assert_same(stored(kv, 0), full(6))


def test_missing_and_unexpected_items_of_an_adapted_state(kv):
    kv.init([0, 1], [full(8), full(8)])
    kv.set_optimizer(torch.optim.Adam)
    kv.push(0, full(1))
    before = repr(kv.optimizer.state_dict())
    for damage in (
        lambda state: state["state"][0].pop("exp_avg"),
        lambda state: state["state"][0].clear(),
        lambda state: state["state"][0].update(odd=full(1)),
        lambda state: state["state"][0].update(exp_avg=full(1)[0]),
        lambda state: state["param_groups"][0].update(lr=-1.0),
    ):
        state = kv.optimizer.state_dict()
        damage(state)
        with pytest.raises(ValueError, match=r"\(key 0\)|(?i:learning rate)"):
            kv.optimizer.load_state_dict(state)
        assert repr(kv.optimizer.state_dict()) == before
    for names in ({}, {"state_names": 5}, {"state_names": (5,)}):
        state = kv.optimizer.state_dict()
        del state["state_names"]
        with pytest.raises(ValueError, match="state_names"):
            kv.optimizer.load_state_dict({**state, **names})
        assert repr(kv.optimizer.state_dict()) == before


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("name", ANY)
def test_a_distributed_checkpoint_of_an_adapted_optimizer(kv, name, tmp_path):
    import torch.distributed.checkpoint as dcp

    parameters, theirs = torch_pair(kv, name)
    step_both(kv, parameters, theirs)
    kv.init(2, torch.ones(4, 5))  # has made no step
    expected = repr(kv.optimizer.state_dict())
    dcp.save({"optimizer": kv.optimizer}, checkpoint_id=tmp_path, no_dist=True)
    with torchkv.create() as other:
        other.init([0, 1, 2], kv.pull([0, 1, 2]))
        other.set_optimizer(getattr(torch.optim, name), **ANY[name])
        dcp.load({"optimizer": other.optimizer}, checkpoint_id=tmp_path, no_dist=True)
        assert repr(other.optimizer.state_dict()) == expected
        for store in (kv, other):
            store.push(
                [0, 1, 2], [torch.ones(4, 5), torch.ones(7, 3), torch.ones(4, 5)]
            )
        assert snapshot(kv) == snapshot(other)


def test_an_adapted_state_of_values_that_the_class_does_not_support(kv):
    """A store may have such keys; only pushing one is an error."""
    kv.init([0, 1, 2], [torch.ones(2, 2), torch.ones(2), torch.ones(2).long()])
    kv.set_optimizer(torch.optim.Muon)
    kv.push(0, torch.ones(2, 2))
    state = kv.optimizer.state_dict()
    assert [*state["state"][0]] == ["momentum_buffer"]
    assert state["state"][1] == state["state"][2] == {}
    kv.optimizer.load_state_dict(state)
    assert repr(kv.optimizer.state_dict()) == repr(state)
