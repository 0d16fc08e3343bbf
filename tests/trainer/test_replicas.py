"""torchkv.replicate: equal replicas, shards of a batch, gathered outputs."""

import copy
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import torchkv
from helpers import assert_same


def make_model():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def test_replicas_are_the_module_and_equal_copies(devices):
    model = make_model()
    replicas = torchkv.replicate(model, devices)
    assert len(replicas) == 4 and replicas[0] is model
    assert replicas.devices == devices
    for device, replica in zip(devices, replicas, strict=True):
        for copied, parameter in zip(
            replica.parameters(), model.parameters(), strict=True
        ):
            assert copied.device == device and copied.requires_grad
            assert_same(copied, parameter)
    assert len({id(p) for r in replicas for p in r.parameters()}) == 16
    assert repr(replicas).startswith("Replicas(Sequential, devices=['")


def test_default_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert torchkv.replicate(make_model()).devices == [torch.device("cpu")]
    assert torchkv.replicate(make_model(), "cpu").devices == [torch.device("cpu")]


def test_outputs_and_gradients_are_those_of_the_whole_batch(devices):
    model = make_model()
    replicas = torchkv.replicate(model, devices)
    x, y = torch.randn(10, 3), torch.randint(0, 2, (10,))
    whole = [
        model.cpu()(x),
        *torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters())),
    ]
    model.to(devices[0])
    output = replicas(x)
    assert output.device == devices[0]
    torch.testing.assert_close(output.cpu(), whole[0])
    F.cross_entropy(output, y.to(devices[0])).backward()
    for expected, *copies in zip(
        whole[1:], *(r.parameters() for r in replicas), strict=True
    ):
        total = sum(p.grad.cpu() for p in copies)
        torch.testing.assert_close(total, expected, rtol=0, atol=1e-6)


def test_scatter_and_gather():
    replicas = torchkv.replicate(make_model(), ["cpu"] * 3)
    shards = replicas.scatter(torch.arange(7), None, torch.arange(14).view(7, 2))
    assert [shard[0].tolist() for shard in shards] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [shard[1] for shard in shards] == [None] * 3
    assert [len(shard[2]) for shard in shards] == [3, 2, 2]
    assert replicas.gather([shard[0] for shard in shards]).tolist() == list(range(7))
    assert replicas.gather([torch.tensor(1.0), torch.tensor(2.0)]).tolist() == [1, 2]


def test_a_batch_of_fewer_rows_than_replicas():
    replicas = torchkv.replicate(make_model(), ["cpu"] * 3)
    trainer = torchkv.Trainer(replicas, "sgd")
    assert replicas(torch.randn(2, 3)).shape == (2, 2)

    def loss(model, x):
        assert len(x) == 1
        return model(x).mean()

    assert replicas.backward(loss, torch.randn(2, 3)).shape == (2,)
    assert all(p.grad.count_nonzero() == 0 for p in replicas[2].parameters())
    trainer.step(2)


def test_buffers_depend_on_each_replicas_shards():
    replicas = torchkv.replicate(nn.BatchNorm1d(2, momentum=1.0), ["cpu"] * 2)
    replicas(torch.tensor([[1.0, 1.0], [3.0, 3.0], [5.0, 5.0], [7.0, 7.0]]))
    assert [r.running_mean.tolist() for r in replicas] == [[2.0, 2.0], [6.0, 6.0]]
    assert replicas.state_dict()["running_mean"].tolist() == [2.0, 2.0]
    replicas.load_state_dict(replicas.state_dict())
    assert replicas[1].running_mean.tolist() == [2.0, 2.0]


def test_modes():
    replicas = torchkv.replicate(make_model(), ["cpu"] * 2)
    assert replicas.eval() is replicas
    assert not any(module.training for module in replicas)
    assert all(module.training for module in replicas.train())


def test_replicas_of_one_device_run_in_order_in_the_callers_thread():
    replicas = torchkv.replicate(make_model(), ["cpu"] * 3)
    seen = []

    def loss(model, x):
        seen.append((list(replicas).index(model), threading.get_ident()))
        return model(x).sum()

    replicas.backward(loss, torch.randn(6, 3))
    assert seen == [(i, threading.get_ident()) for i in range(3)]


both = threading.Barrier(2)


class Place(nn.Module):
    """Records its thread and modes, and waits until two of them run."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen = []

    def forward(self, x):
        self.seen.append(
            (
                threading.get_ident(),
                torch.is_grad_enabled(),
                torch.is_autocast_enabled("cpu"),
            )
        )
        both.wait(timeout=30)
        return x * self.weight


def test_several_devices_have_threads_in_the_callers_modes():
    """`cpu` and `cpu:0` are two devices to torch, so no GPU is needed."""
    replicas = torchkv.replicate(Place(), ["cpu", "cpu:0"])
    with torch.no_grad(), torch.autocast("cpu"):
        output = replicas(torch.arange(4.0))
    assert output.tolist() == [0.0, 1.0, 2.0, 3.0]
    (first,), (second,) = (replica.seen for replica in replicas)
    assert first[0] != second[0]
    assert first[1:] == second[1:] == (False, True)
    losses = replicas.backward(lambda m, x: m(x).sum(), torch.arange(4.0))
    assert losses.tolist() == [1.0, 5.0]
    assert [r.weight.grad.tolist() for r in replicas] == [[1.0], [5.0]]


def test_what_a_thread_raises_reaches_the_caller():
    replicas = torchkv.replicate(make_model(), ["cpu", "cpu:0"])

    def loss(model, x):
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        replicas.backward(loss, torch.randn(2, 3))


def test_errors():
    replicas = torchkv.replicate(make_model(), ["cpu"] * 2)
    for call, kind, message in [
        (lambda: torchkv.replicate("model"), TypeError, "expected a module"),
        (lambda: torchkv.replicate(make_model(), []), ValueError, "one device"),
        (lambda: torchkv.replicate(make_model(), ["meta"]), ValueError, "'meta'"),
        (lambda: replicas.to("meta"), ValueError, "'meta'"),
        (lambda: replicas.to(["cpu"] * 3), ValueError, "2 devices, .* but got 3"),
        (
            lambda: replicas.scatter(torch.tensor(1)),
            ValueError,
            r"dimension to split, but got one of shape \[\] as inputs\[0\]; .*repeat=",
        ),
        (
            lambda: replicas.scatter(torch.zeros(2), {"y": [torch.zeros(3)]}),
            ValueError,
            r"of one length, but got 2 as inputs\[0\], 3 as inputs\[1\]\['y'\]\[0\]",
        ),
        (
            lambda: replicas(torch.zeros(2, 3), scale=2.0),
            TypeError,
            r"but got float as kwargs\['scale'\]; .*repeat=\{'name': value\}",
        ),
        (
            lambda: replicas({"x": torch.zeros(2, 3), "n": 2}),
            TypeError,
            r"but got int as args\[0\]\['n'\]",
        ),
        (
            lambda: replicas.scatter(["a", "b"]),
            TypeError,
            r"got str as inputs\[0\]\[0\]",
        ),
        (
            lambda: replicas.scatter(pack_sequence([torch.ones(2), torch.ones(1)])),
            TypeError,
            "got PackedSequence",
        ),
        (lambda: replicas(torch.zeros(2, 3), repeat=[1]), TypeError, "repeat: .*list"),
        (
            lambda: replicas(x=torch.zeros(2, 3), repeat={"x": 1}),
            TypeError,
            "unexpected 'x'",
        ),
        (lambda: replicas.gather([]), ValueError, "at least one tensor"),
        (lambda: replicas.gather([1]), TypeError, "but got int as output"),
        (
            lambda: replicas.gather([{"x": torch.ones(1)}, {"y": torch.ones(1)}]),
            ValueError,
            "the same structure, but got dict of 1 and dict of 1",
        ),
        (
            lambda: replicas.gather([{"x": torch.ones(1)}, torch.ones(1)]),
            ValueError,
            "but got dict of 1 and Tensor",
        ),
        (lambda: replicas.gather([None, torch.ones(1)]), TypeError, "got NoneType"),
    ]:
        with pytest.raises(kind, match=message):
            call()


# --- Nested batches


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    more: dict


class Model(nn.Module):
    """Takes a batch in any form, and returns two nested outputs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, *args, scale=None, **kwargs):
        tensors = [*leaves_of(args), *leaves_of(kwargs)]
        result = sum(self.linear(x) for x in tensors)
        if scale is not None:
            result = result * scale
        return {"sum": result, "parts": (result[:, :1], [result[:, 1:], None])}


def leaves_of(nest):
    if isinstance(nest, torch.Tensor):
        return [nest]
    if isinstance(nest, dict):
        nest = list(nest.values())
    elif isinstance(nest, Batch):
        nest = [nest.x, nest.more]
    return [x for child in nest or () for x in leaves_of(child)]


FORMS = {
    "tensors": lambda x, y: ((x, y), {}),
    "keywords": lambda x, y: ((), {"x": x, "y": y}),
    "mixed": lambda x, y: ((x,), {"y": y}),
    "dict": lambda x, y: (({"x": x, "y": y},), {}),
    "list": lambda x, y: (([x, y],), {}),
    "tuple": lambda x, y: (((x, y), None), {}),
    "NamedTuple": lambda x, y: ((Pair(x, y),), {}),
    "dataclass": lambda x, y: ((Batch(x, {"y": y}),), {}),
    "OrderedDict": lambda x, y: ((OrderedDict(x=x, y=y),), {}),
    "nested": lambda x, y: (({"a": [x, {"b": (y, None)}]},), {}),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_nested_batches_are_scattered(form, devices):
    torch.manual_seed(1)
    model = Model()
    plain = copy.deepcopy(model)
    replicas = torchkv.replicate(model, devices)
    x, y = torch.randn(10, 3), torch.randn(10, 3)
    args, kwargs = form(x, y)
    output = replicas(*args, **kwargs)
    expected = plain(*args, **kwargs)
    torch.testing.assert_close(output["sum"].cpu(), expected["sum"])
    first, (second, nothing) = output["parts"]
    assert isinstance(output["parts"], tuple) and nothing is None
    torch.testing.assert_close(torch.cat([first, second], 1), output["sum"])
    output["sum"].pow(2).sum().backward()
    expected["sum"].pow(2).sum().backward()
    assert_gradients(replicas, plain)

    replicas.zero_grad()
    plain.zero_grad()
    losses = replicas.backward(
        lambda m, *a, **k: m(*a, **k)["sum"].pow(2).sum(), *args, **kwargs
    )
    loss = plain(*args, **kwargs)["sum"].pow(2).sum()
    loss.backward()
    torch.testing.assert_close(losses.sum().cpu(), loss.detach())
    assert_gradients(replicas, plain)


def assert_gradients(replicas, plain):
    """The replicas' gradients sum to those of the whole batch."""
    for expected, *copies in zip(
        plain.parameters(), *(r.parameters() for r in replicas), strict=True
    ):
        total = sum(p.grad.cpu() for p in copies)
        torch.testing.assert_close(total, expected.grad, rtol=1e-4, atol=1e-4)


def test_repeated_arguments_are_copied_to_each_device(devices):
    replicas = torchkv.replicate(Model(), devices)
    x = torch.randn(8, 3)
    scale = torch.tensor(2.0, requires_grad=True)
    output = replicas(x, repeat={"scale": scale})["sum"]
    torch.testing.assert_close(
        output.cpu(), 2 * replicas.module(x.to(devices[0]))["sum"].cpu()
    )
    output.sum().backward()
    torch.testing.assert_close(scale.grad, output.sum().detach().cpu() / 2)

    seen = []

    def loss(module, x, *, options):
        seen.append((len(x), options))
        assert options["weight"].device == x.device
        return module(x)["sum"].sum()

    weight = torch.arange(5.0)
    replicas.backward(loss, x, repeat={"options": {"weight": weight, "name": "ce"}})
    assert [n for n, _ in seen] == [2] * 4
    assert all(o["name"] == "ce" and len(o["weight"]) == 5 for _, o in seen)


def test_a_nested_batch_of_fewer_rows_than_replicas():
    replicas = torchkv.replicate(Model(), ["cpu"] * 4)
    output = replicas({"x": torch.ones(2, 3), "y": None})
    assert output["sum"].shape == (2, 2)
    output["sum"].sum().backward()
    assert all(p.grad is not None for r in replicas for p in r.parameters())
    assert replicas({"x": torch.ones(0, 3)})["sum"].shape == (0, 2)


# --- Methods of a module


def test_replicas_have_the_methods_of_their_module():
    model = make_model()
    replicas = torchkv.replicate(model, ["cpu"] * 3)
    assert replicas.module is model
    assert [id(p) for p in replicas.parameters()] == [id(p) for p in model.parameters()]
    named = dict(replicas.named_parameters(prefix="a"))
    assert list(named) == ["a.0.weight", "a.0.bias", "a.2.weight", "a.2.bias"]
    assert replicas.training
    assert replicas.eval() is replicas
    assert not replicas.training and not replicas[2].training
    assert replicas.train().training and replicas[2].training

    replicas(torch.ones(6, 3)).sum().backward()
    replicas.zero_grad(set_to_none=False)
    assert all(p.grad.eq(0).all() for r in replicas for p in r.parameters())
    replicas.zero_grad()
    assert all(p.grad is None for r in replicas for p in r.parameters())


def test_a_state_is_loaded_into_all_replicas():
    replicas = torchkv.replicate(make_model(), ["cpu"] * 2)
    state = make_model().state_dict()
    result = replicas.load_state_dict(state)
    assert result.missing_keys == result.unexpected_keys == []
    for replica in replicas:
        for name, value in replica.state_dict().items():
            assert_same(value, state[name])
    del state["0.bias"]
    with pytest.raises(RuntimeError, match="0.bias"):
        replicas.load_state_dict(state)
    assert replicas.load_state_dict(state, strict=False).missing_keys == ["0.bias"]


@pytest.mark.parametrize(
    "arguments",
    [
        ((torch.float64,), {}),
        ((float,), {}),
        (("cpu", torch.float64), {}),
        ((["cpu", "cpu"], torch.float64), {}),
        ((), {"dtype": torch.float64}),
        ((), {"device": "cpu", "dtype": torch.float64}),
        ((torch.ones(1, dtype=torch.float64),), {}),
        ((), {"tensor": torch.ones(1, dtype=torch.float64)}),
    ],
)
def test_to_casts_all_replicas(arguments):
    args, kwargs = arguments
    replicas = torchkv.replicate(make_model(), ["cpu"] * 2)
    parameters = [p for r in replicas for p in r.parameters()]
    assert replicas.to(*args, **kwargs) is replicas
    assert all(p.dtype == torch.float64 for p in parameters)
    assert replicas.devices == [torch.device("cpu")] * 2


def test_wrong_devices():
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="Replicas: expected devices .*'meta'"):
        torchkv.Replicas([module], ["meta"])
    with pytest.raises(ValueError, match="Replicas: expected 1 devices"):
        torchkv.Replicas([module], ["cpu"] * 2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, 2).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.ones(2)] * 2),
    ],
    ids=["sparse", "nested"],
)
def test_tensors_that_are_not_dense(make):
    copies = torchkv.replicate(nn.Linear(2, 2), ["cpu"] * 2)
    with pytest.raises(NotImplementedError, match=r"scatter: .*dense.*inputs\[0\]"):
        copies.scatter(make())


@pytest.mark.cuda
def test_to_moves_all_replicas():
    replicas = torchkv.replicate(make_model(), ["cpu"] * 2)
    replicas.to(["cpu", "cuda:0"])
    assert replicas.devices == [torch.device("cpu"), torch.device("cuda:0")]
    assert [next(r.parameters()).device.type for r in replicas] == ["cpu", "cuda"]
    replicas.to("cuda:0")
    assert replicas.devices == [torch.device("cuda:0")] * 2
    assert replicas(torch.ones(4, 3)).device == torch.device("cuda:0")
