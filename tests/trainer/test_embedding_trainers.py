"""Trainers with StoreEmbeddings: their state, and what they take."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import torchkv
from embedding_training import (
    DIM,
    Model,
    assert_close,
    batches,
    loss_of,
    make,
    make_dense,
    rows,
    table_in,
    train,
    weights,
)
from helpers import assert_same

pytestmark = pytest.mark.usefixtures("one_thread")


# -- state


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_resumed_run_goes_on_with_the_same_bits(tmp_path):
    some = batches()
    trainer, copies = make("adam", replicas=2)
    train(trainer, copies, some[:4])
    saved = saved_and_loaded(trainer.state_dict())
    assert sorted(saved["keys"]) == ["linear.bias", "linear.weight", "table"]
    expected = train(trainer, copies, some[4:])
    resumed, others = make("adam", replicas=2)
    train(resumed, others, some[:1])
    resumed.load_state_dict(saved)
    actual = train(resumed, others, some[4:])
    for name, value in expected.items():
        assert_same(actual[name], value, name)


def test_states_without_weights(tmp_path):
    some = batches()
    trainer, model = make("adam")
    train(trainer, model, some[:4])
    trainer.save_states(tmp_path / "states")
    before = weights(model)
    expected = train(trainer, model, some[4:])
    trainer.load_states(tmp_path / "states")
    trainer.kvstore.assign("table", before.pop("table"))
    with torch.no_grad():
        for name, parameter in model.module.linear.named_parameters():
            parameter.copy_(before[name])
    actual = train(trainer, model, some[4:])
    for name, value in expected.items():
        assert_same(actual[name], value, name)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda things: pickle.loads(pickle.dumps(things))]
)
def test_copies_of_model_and_trainer_go_apart(copied):
    some = batches()
    trainer, copies = make("adam", replicas=2)
    train(trainer, copies, some[:2])
    loss_of(copies, *some[2]).backward()
    other, others = copied((trainer, copies))
    assert other.kvstore is others[1].embedding.store is not trainer.kvstore
    assert others[0].embedding.grad is None
    other.zero_grad()
    trainer.zero_grad()
    expected = train(trainer, copies, some[2:])
    actual = train(other, others, some[2:])
    for name, value in expected.items():
        assert_same(actual[name], value, name)


def test_options_of_the_tables_key():
    trainer, model = make()
    trainer.optimizer.set_lr_mult({"table": 0.0})
    assert_same(train(trainer, model, batches(2))["table"], rows())
    trainer.optimizer.set_param_groups([{"keys": ["table"], "lr": 0.1}])
    params = [group["params"] for group in trainer.optimizer.param_groups]
    assert params == [["linear.weight", "linear.bias"], ["table"]]
    sgd = torchkv.optim.SGD(lr=0.3)
    sgd.set_lr_mult({"table": 0.0})
    store = torchkv.create("local")
    store.init("table", rows())
    model = Model(torchkv.nn.StoreEmbedding(None, DIM, store, "table"))
    trainer = torchkv.Trainer(model, sgd, kvstore=store)
    assert_same(train(trainer, model, batches(2))["table"], rows())


def test_repr():
    assert repr(make(replicas=2)[0]).startswith(
        "Trainer(2 parameters, 1 embeddings, 2 replicas, mxnet.SGD(lr=0.3, "
    )


# -- what the constructor takes


def test_modules_may_be_passed_beside_parameters():
    store = torchkv.create("local")
    store.init("table", rows())
    model = Model(torchkv.nn.StoreEmbedding(None, DIM, store, "table"))
    params = dict(model.named_parameters())
    options = {"optimizer_params": {"lr": 0.3}, "kvstore": store}
    trainer = torchkv.Trainer(params, "sgd", embeddings=[model.embedding], **options)
    assert_close(train(trainer, model), train(*make_dense()))


def test_positions_as_keys_need_an_int():
    store = torchkv.create("local")
    store.init(100, rows())
    model = Model(torchkv.nn.StoreEmbedding(None, DIM, store, 100))
    trainer = torchkv.Trainer(
        *(model.parameters(), "sgd", {"lr": 0.3}, store), embeddings=[model.embedding]
    )
    assert_close(train(trainer, model), train(*make_dense()))


def test_a_module_that_is_found_and_passed_counts_once():
    store = torchkv.create("local")
    store.init("table", rows())
    model = Model(torchkv.nn.StoreEmbedding(None, DIM, store, "table"))
    trainer = torchkv.Trainer(
        *(model, "sgd", {"lr": 0.3}, store), embeddings=[model.embedding]
    )
    assert_close(train(trainer, model), train(*make_dense()))


def test_a_table_in_another_store():
    store = torchkv.create("local")
    model = Model(table_in(store))
    for kvstore in ("device", torchkv.create("local"), None):
        with pytest.raises(ValueError, match=r"pass kvstore= .*\(key 'table'\)"):
            torchkv.Trainer(model, "sgd", kvstore=kvstore)
    copies = [model, copy.deepcopy(model)]
    with pytest.raises(ValueError, match=r"torchkv.replicate.*\(key 'table'\)"):
        torchkv.Trainer(copies, "sgd", kvstore=store)
    assert store.optimizer is None and store.keys() == ["table"]
    torchkv.Trainer(model, "sgd", kvstore=store)


def test_stores_and_keys_that_are_refused():
    store = torchkv.create("local")
    model = Model(table_in(store))
    message = r"update_on_kvstore to be True or None.*got False \(key 'table'\)"
    with pytest.raises(ValueError, match=message):
        torchkv.Trainer(model, "sgd", kvstore=store, update_on_kvstore=False)
    with pytest.raises(
        ValueError, match=r"or int where they have no names, but got str \(key"
    ):
        torchkv.Trainer(
            *(model.parameters(), "sgd"), kvstore=store, embeddings=[model.embedding]
        )
    with pytest.raises(TypeError, match="StoreEmbedding modules as embeddings, but"):
        torchkv.Trainer(model, "sgd", kvstore=store, embeddings=[model])
    store.init("more", rows())
    message = "neither keys but those of its StoreEmbeddings nor an optimizer"
    with pytest.raises(ValueError, match=message):
        torchkv.Trainer(model, "sgd", kvstore=store)
    store.delete("more")
    store.set_optimizer("sgd")
    with pytest.raises(ValueError, match=message):
        torchkv.Trainer(model, "sgd", kvstore=store)
    store = torchkv.create("local")
    model = Model(table_in(store, "linear.bias"))
    message = r"a key of its own, but got that of a parameter \(key 'linear.bias'\)"
    with pytest.raises(ValueError, match=message):
        torchkv.Trainer(model, "sgd", kvstore=store)


def test_replicas_of_different_tables():
    store = torchkv.create("local")
    models = [Model(table_in(store)), Model(table_in(store, "other"))]
    message = r"same keys, but only one has it \(key 'other', replica 1\)"
    with pytest.raises(ValueError, match=message):
        torchkv.Trainer(models, "sgd", kvstore=store)


def test_only_some_replicas_of_a_table():
    store = torchkv.create("local")
    copies = torchkv.replicate(table_in(store), ["cpu", "cpu"])
    message = r"all 2 replicas of a StoreEmbedding.*\(key 'table'\)"
    with pytest.raises(ValueError, match=message):
        torchkv.Trainer(copies.module, "sgd", kvstore=store)
    torchkv.Trainer(copies, "sgd", kvstore=store)


def test_a_model_without_parameters_and_tables():
    with pytest.raises(ValueError, match="at least one parameter, but got none"):
        torchkv.Trainer(nn.ReLU(), "sgd")
    with pytest.raises(ValueError, match="at least one parameter, but got none"):
        torchkv.Trainer([], "sgd", embeddings=[])
