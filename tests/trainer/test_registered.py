"""Store types of third parties: their names, and a Trainer on them."""

import pytest
import torch
import torch.nn.functional as F

import torchkv
from torchkv import KVStoreBase
from training import (
    BATCH,
    assert_near,
    make_batches,
    make_model,
    summed_loss,
    train_plainly,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@torchkv.register("my sum")
class Sum(KVStoreBase):
    """Of the replicas of one process; MXNet's example of such a store."""

    def __init__(self, **options):
        self.options = options
        self.calls = []

    def broadcast(self, key, value, out, priority=0):
        self.calls.append(("broadcast", list(key)))
        for tensor, copies in zip(value, out, strict=True):
            for copy in copies:
                copy.copy_(tensor)

    def pushpull(self, key, value, out=None, priority=0):
        self.calls.append(("pushpull", list(key)))
        for tensors, results in zip(value, out or value, strict=True):
            total = sum(tensors)
            for result in results:
                result.copy_(total)


def test_create_makes_an_instance():
    store = torchkv.create("my sum", factor=3)
    assert type(store) is Sum
    assert store.options == {"factor": 3}
    assert (store.type, store.rank, store.num_workers) == ("my sum", 0, 1)
    assert not store.is_capable(KVStoreBase.OPTIMIZER)
    store.close()


def test_mxnets_decorator_takes_the_name_of_the_class():
    @KVStoreBase.register
    class TestStore(Sum):
        pass

    assert type(torchkv.create("teststore")) is TestStore
    assert torchkv.create("teststore").type == "teststore"


def test_torchkvs_stores_are_capable():
    kv = torchkv.create("local")
    assert isinstance(kv, KVStoreBase)
    assert kv.is_capable(KVStoreBase.OPTIMIZER)


@pytest.mark.parametrize(
    "name", ["my sum", "local", "dist_sync", "dist", "local_update_cpu"]
)
def test_a_name_that_is_taken_is_refused(name):
    with pytest.raises(ValueError, match=f"a new name, but there is .* type '{name}'"):

        @torchkv.register(name)
        class Other(Sum):
            pass

    assert type(torchkv.create("my sum")) is Sum


def test_what_is_not_a_store_is_refused():
    message = "derived from torchkv.KVStoreBase, but got"
    with pytest.raises(TypeError, match=message):
        torchkv.register("not a store")(dict)
    with pytest.raises(TypeError, match=message):
        torchkv.register(3)
    with pytest.raises(ValueError, match="an empty name"):
        torchkv.register("")(Sum)
    with pytest.raises(ValueError, match="unknown store type 'not a store'"):
        torchkv.create("not a store")


def test_other_bindings_say_who_makes_it():
    with pytest.raises(NotImplementedError, match=r"'my sum' is a Python class; torch"):
        torchkv.KVStore("my sum")
    with pytest.raises(Exception, match="'my sum' is a Python class"):
        torch.classes.torchkv.KVStore("my sum")


def test_errors_list_the_name():
    with pytest.raises(ValueError, match=r"'my sum'.*did you mean 'my sum'\?"):
        torchkv.create("My sun")


def test_a_store_without_its_methods_is_refused():
    @torchkv.register("half a store")
    class Half(KVStoreBase):
        def broadcast(self, key, value, out, priority=0):
            pass

    with pytest.raises(TypeError, match="pushpull"):
        torchkv.create("half a store")


def test_a_trainer_sums_on_it():
    model = make_model()
    replicas = torchkv.replicate(model, ["cpu", "cpu"])
    trainer = torchkv.Trainer(
        replicas, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore="my sum"
    )
    for x, y in make_batches():
        halves = zip(replicas, x.chunk(2), y.chunk(2), strict=True)
        for replica, x_half, y_half in halves:
            summed_loss(replica, x_half, y_half).backward()
        trainer.step(BATCH)
    expected = train_plainly(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    for replica in replicas:
        assert_near(weights(replica), expected)
    calls = trainer.kvstore.calls
    assert [what for what, _ in calls] == ["broadcast"] + ["pushpull"] * 10
    assert all(keys == list(weights(model)) for _, keys in calls)


def test_a_trainer_takes_what_it_broadcasts():
    class Ones(Sum):
        num_workers = 2

        def broadcast(self, key, value, out, priority=0):
            for copies in out:
                for copy in copies:
                    copy.fill_(1)

    model = make_model()
    model[0].bias.requires_grad_(False)
    trainer = torchkv.Trainer(model, "sgd", {"learning_rate": 0}, kvstore=Ones())
    x, y = make_batches()[0]
    F.cross_entropy(model(x), y).backward()
    trainer.step(1)
    for value in weights(model).values():
        assert torch.equal(value, torch.ones_like(value))


def test_a_trainers_optimizer_does_not_run_on_it():
    with pytest.raises(ValueError, match="needs a store of torchkv's, but got .*Sum"):
        torchkv.Trainer(make_model(), "sgd", kvstore="my sum", update_on_kvstore=True)
