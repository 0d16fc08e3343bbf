"""torchkv.replicate: equal replicas, shards of a batch, gathered outputs."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

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
    shards = replicas.scatter(torch.arange(7), "all", torch.arange(14).view(7, 2))
    assert [shard[0].tolist() for shard in shards] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [shard[1] for shard in shards] == ["all"] * 3
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


def test_buffers_count_each_replicas_shards():
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
    """Says in which thread and modes it runs, as soon as two of them do."""

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
        (lambda: replicas.scatter(torch.tensor(1)), ValueError, "dimension to cut"),
        (
            lambda: replicas.scatter(torch.zeros(2), torch.zeros(3)),
            ValueError,
            "of one length, but got 2, 3",
        ),
        (lambda: replicas.gather([]), ValueError, "at least one tensor"),
        (lambda: replicas.gather([1]), TypeError, "but got int"),
    ]:
        with pytest.raises(kind, match=message):
            call()
