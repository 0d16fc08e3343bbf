"""Trainers that compress: the same as a store by hand; states; which steps compress."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchkv
from compression_model import ALL
from helpers import assert_same
from torchkv.compression import FP8, TopK, TwoBit
from training import (
    assert_same_weights,
    fill_gradients,
    make_batches,
    make_model,
    summed_loss,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = {"learning_rate": 0.25, "momentum": 0.5}


def make(compression, num_replicas=2, **options):
    replicas = torchkv.replicate(make_model(), ["cpu"] * num_replicas)
    trainer = torchkv.Trainer(
        replicas, "sgd", OPTIONS, compression_params=compression, **options
    )
    return replicas, trainer


def train(replicas, trainer, batches):
    for x, y in batches:
        replicas.backward(summed_loss, x, y)
        trainer.step(len(x))


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_a_trainer_pushes_compressed_gradients(codec):
    replicas, trainer = make(codec)
    kv = torchkv.create("device")
    other = torchkv.replicate(make_model(), ["cpu"] * 2)
    names = [name for name, _ in other[0].named_parameters()]
    copies = [[dict(r.named_parameters())[n] for r in other] for n in names]
    kv.init(names, [first.detach() for first, _ in copies])
    kv.set_optimizer("sgd", **OPTIONS)
    kv.set_gradient_compression(codec)
    for x, y in make_batches():
        train(replicas, trainer, [(x, y)])
        other.backward(summed_loss, x, y)
        kv.optimizer.rescale_grad = 1 / len(x)
        kv.pushpull(names, [[p.grad for p in of_key] for of_key in copies], copies)
        for of_key in copies:
            for parameter in of_key:
                parameter.grad = None
    assert_same_weights(weights(replicas[0]), weights(other[0]))


def test_groups_of_parameters():
    replicas, trainer = make([TwoBit(8.0), {"keys": ["0.weight"], "type": "none"}])
    before = weights(replicas[0])
    for replica in replicas:
        fill_gradients(replica)
    trainer.step(1)
    after = weights(replicas[0])
    assert [name for name in before if not torch.equal(before[name], after[name])] == [
        "0.weight"
    ]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_gradients_that_are_only_summed(num_replicas):
    replicas, trainer = make(TwoBit(0.5), num_replicas, update_on_kvstore=False)
    for replica in replicas:
        fill_gradients(replica, 0.75)
    trainer.allreduce_grads()
    for parameter in replicas[0].parameters():
        assert_same(parameter.grad, torch.full_like(parameter, 0.5 * num_replicas))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("codec", [TwoBit(), FP8(), TopK(k=3)], ids=str)
@pytest.mark.parametrize("way", ["state_dict", "torch.distributed.checkpoint"])
def test_training_resumes_with_the_same_bits(codec, way, tmp_path):
    replicas, trainer = make(codec)
    batches = make_batches()
    train(replicas, trainer, batches[:5])
    resumed_replicas, resumed = make(codec)
    if way == "state_dict":
        torch.save(trainer.state_dict(), tmp_path / "file")
        state = torch.load(tmp_path / "file", weights_only=True)
        resumed.load_state_dict(state)
    else:
        dcp.save({"trainer": trainer}, checkpoint_id=tmp_path, no_dist=True)
        dcp.load({"trainer": resumed}, checkpoint_id=tmp_path, no_dist=True)
    train(replicas, trainer, batches[5:])
    train(resumed_replicas, resumed, batches[5:])
    assert_same_weights(weights(resumed_replicas[0]), weights(replicas[0]))


def test_a_frozen_parameter_of_a_group():
    model = make_model()
    model[0].weight.requires_grad_(False)
    groups = [TwoBit(), {"keys": ["0.weight"], "type": "none"}]
    trainer = torchkv.Trainer(model, "sgd", OPTIONS, compression_params=groups)
    trainer.load_state_dict(trainer.state_dict())


def test_states_of_trainers_whose_gradients_are_only_summed():
    compressing = make(TwoBit(1.0))[1]
    replicas, trainer = make(TwoBit(1.0), update_on_kvstore=False)
    trainer.load_state_dict(compressing.state_dict())
    assert trainer._store.gradient_compression is None
    assert trainer.kvstore.gradient_compression == TwoBit(1.0)
    state = trainer.state_dict()
    assert state["compression"] is None
    compressing.load_state_dict(state)
    assert compressing.kvstore.gradient_compression == TwoBit(1.0)


def test_a_refused_trainer_leaves_the_store():
    store = torchkv.create("device")
    with pytest.raises(KeyError, match="'missing'"):
        torchkv.Trainer(
            make_model(),
            "sgd",
            kvstore=store,
            compression_params=[{"keys": "missing", "type": "2bit"}],
        )
    assert store.gradient_compression is None
