"""The steps of a Trainer of a model with a StoreEmbedding, against nn.Embedding."""

import math

import pytest
import torch
from torch import nn

import torchkv
from embedding_training import (
    BATCH,
    DIM,
    ROWS,
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


# -- parity with a dense table

# Optimizers without momentum: rows without a gradient do not move.


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_a_run_is_that_of_a_dense_table(optimizer, replicas):
    expected = train(*make_dense(optimizer))
    trainer, copies = make(optimizer, replicas)
    assert_close(train(trainer, copies), expected)
    assert not expected["table"].equal(rows())
    stats = trainer.kvstore.stats()["table"]
    assert stats["pushes"] == 8
    assert stats["pulls"] == 8 * replicas + 1  # that of weights()
    # At most 12 of 20 rows are in a batch.
    assert stats["bytes_pushed"] < 8 * ROWS * DIM * 4


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_lazy_optimizers_are_those_of_the_store(optimizer):
    """As with the gradients of nn.Embedding(sparse=True)."""
    trainer, model = make(optimizer)
    reference = Model(nn.Embedding.from_pretrained(rows(), freeze=False, sparse=True))
    expected = train(
        torchkv.Trainer(reference, optimizer, {"lr": 0.3}, kvstore="local"), reference
    )
    assert_close(train(trainer, model), expected)


def test_without_lazy_a_run_is_that_of_a_dense_table():
    expected = train(*make_dense("adam"))
    assert_close(train(*make("adam", lazy=False)), expected)


def test_compression_leaves_the_table_as_it_is():
    tables, others = [], []
    for compression in (None, {"type": "2bit", "threshold": 0.01}):
        store = torchkv.create("device")
        model = Model(table_in(store))
        trainer = torchkv.Trainer(
            model, "sgd", {"lr": 0.3}, kvstore=store, compression_params=compression
        )
        found = train(trainer, model, batches(1))
        tables.append(found.pop("table"))
        others.append(found)
    assert_same(*tables)
    assert not any(torch.equal(others[0][name], others[1][name]) for name in others[0])


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_clip_grad_norm_includes_the_table(replicas, norm_type):
    dense, expected = make_dense()
    trainer, model = make(replicas=replicas)
    for ids, labels in batches(4):
        norms = []
        for one, module in ((dense, expected), (trainer, model)):
            loss_of(module, ids, labels).backward()
            norms.append(one.clip_grad_norm_(0.1, norm_type))
            one.step()
            assert one.grad_norm == norms[-1].item() > 0.1
        torch.testing.assert_close(*norms)
    assert_close(weights(model), weights(expected))


def test_a_table_alone_may_be_what_is_clipped():
    store = torchkv.create("local")
    store.init("table", rows())
    embedding = torchkv.nn.StoreEmbedding(ROWS, DIM, store, "table")
    trainer = torchkv.Trainer(embedding, "sgd", {"lr": 1.0}, kvstore=store)
    assert trainer.clip_grad_norm_(1.0) == 0
    embedding(torch.tensor([3, 3])).sum().backward()
    assert trainer.clip_grad_norm_(1.0).item() == pytest.approx(4.0)
    trainer.step()
    moved = rows() - store.pull("table")
    assert moved.norm().item() == pytest.approx(1.0, rel=1e-5)
    assert moved.nonzero()[:, 0].unique().tolist() == [3]


def test_max_norm_is_that_of_one_push_of_all():
    options = {"max_norm": 0.1}
    dense, expected = make_dense(**options)
    trainer, model = make(replicas=2, **options)
    for ids, labels in batches(4):
        for one, module in ((dense, expected), (trainer, model)):
            loss_of(module, ids, labels).backward()
            one.step()
        assert trainer.grad_norm == pytest.approx(dense.grad_norm, rel=1e-5)
    assert_close(weights(model), weights(expected))


def test_a_clipped_norm_is_forgotten_with_another_backward():
    trainer, model = make()
    (ids, labels), *_ = batches(1)
    loss_of(model, ids, labels).backward()
    trainer.clip_grad_norm_(0.1)
    loss_of(model, ids, labels).backward()
    trainer.step()
    assert trainer.grad_norm is None


def test_accumulation_and_batch_sizes():
    dense, expected = make_dense()
    trainer, model = make(replicas=2)
    for i, (ids, labels) in enumerate(batches()):
        for one, module in ((dense, expected), (trainer, model)):
            (loss_of(module, ids, labels) * BATCH).backward()
            if i % 2:
                one.step(2 * BATCH)
    assert_close(weights(model), weights(expected))
    assert trainer.kvstore.stats()["table"]["pushes"] == 4


def test_the_option_accumulate():
    dense, expected = make_dense(accumulate=2)
    trainer, model = make(accumulate=2)
    some = batches(6)
    step = lambda trainer: trainer.step(3)  # noqa: E731
    assert_close(train(trainer, model, some, step), train(dense, expected, some, step))


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_grad_scaler_skips_infinities_of_the_table(unscale, replicas):
    trainer, model = make(replicas=replicas)
    dense, expected = make_dense()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10**6)
    for i, (ids, labels) in enumerate(batches()):
        trainer.zero_grad()
        scaler.scale(loss_of(model, ids, labels)).backward()
        if i == 3:
            (some,) = list(model)[-1].embedding.rows_with_grad()
            some.grad[0, 0] = math.inf
        if unscale:
            scaler.unscale_(trainer)
        before, scale = weights(model), scaler.get_scale()
        scaler.step(trainer)
        scaler.update()
        if i == 3:
            assert scaler.get_scale() == scale / 2
            assert_close(weights(model), before)
            continue
        assert scaler.get_scale() == scale
        loss_of(expected, ids, labels).backward()
        dense.step()
    assert_close(weights(model), weights(expected))


def clip_and_step(trainer):
    trainer.clip_grad_norm_(0.1)
    trainer.step()


def test_a_grad_scaler_with_clipping():
    trainer, model = make(replicas=2)
    dense, expected = make_dense()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for ids, labels in batches():
        scaler.scale(loss_of(model, ids, labels)).backward()
        scaler.unscale_(trainer)
        trainer.clip_grad_norm_(0.1)
        scaler.step(trainer)
        scaler.update()
        loss_of(expected, ids, labels).backward()
        clip_and_step(dense)
    assert_close(weights(model), weights(expected))


def test_autocast():
    trainer, model = make("adagrad")
    dense, expected = make_dense("adagrad")
    for ids, labels in batches():
        for one, module in ((dense, expected), (trainer, model)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(module, ids, labels)
            loss.backward()
            one.step()
    assert_close(weights(model), weights(expected))


# -- replicas


def test_replicas_share_the_store_and_see_each_steps_table():
    trainer, copies = make(replicas=3)
    stores = {id(replica.embedding.store) for replica in copies}
    assert stores == {id(trainer.kvstore)}
    assert len({id(replica.embedding) for replica in copies}) == 3
    train(trainer, copies, batches(2))
    ids = torch.tensor([[1, 2]])
    assert_same(copies[0](ids), copies[2](ids))


def test_replicas_without_rows():
    trainer, copies = make("adagrad", replicas=3)
    dense, expected = make_dense("adagrad")
    some = [(ids[:1], labels[:1]) for ids, labels in batches(3)]
    assert_close(train(trainer, copies, some), train(dense, expected, some))


def test_losses_of_each_replica():
    trainer, copies = make(replicas=2)
    dense, expected = make_dense()
    for ids, labels in batches(3):
        copies.backward(
            lambda model, *batch: loss_of(model, *batch) * len(batch[0]), ids, labels
        )
        trainer.step(BATCH)
        loss_of(expected, ids, labels).backward()
        dense.step()
    assert_close(weights(copies), weights(expected))


def test_modules_with_one_key_add_up():
    """An input and an output embedding, as tied weights."""
    store = torchkv.create("local")
    store.init("table", rows())
    model = nn.ModuleList(
        torchkv.nn.StoreEmbedding(None, DIM, store, "table") for _ in range(2)
    )
    trainer = torchkv.Trainer(model, "sgd", {"lr": 0.5}, kvstore=store)
    reference = nn.Embedding.from_pretrained(rows(), freeze=False)
    ids, others = torch.tensor([1, 2, 2]), torch.tensor([2, 3, 7])
    (model[0](ids) * model[1](others)).sum().backward()
    (reference(ids) * reference(others)).sum().backward()
    trainer.step()
    torch.optim.SGD(reference.parameters(), 0.5).step()
    torch.testing.assert_close(store.pull("table"), reference.weight.detach())
    model[0](ids).sum().backward()  # one of them is enough for a step
    trainer.step()


def test_replicas_that_share_a_module():
    store = torchkv.create("local")
    store.init("table", rows())
    embedding = torchkv.nn.StoreEmbedding(ROWS, DIM, store, "table")
    models = [Model(embedding), Model(embedding)]
    trainer = torchkv.Trainer(models, "sgd", {"lr": 0.3}, kvstore=store)
    dense, expected = make_dense()
    for ids, labels in batches(4):
        for model, half, half_labels in zip(
            models, ids.chunk(2), labels.chunk(2), strict=True
        ):
            (loss_of(model, half, half_labels) / 2).backward()
        trainer.step()
        loss_of(expected, ids, labels).backward()
        dense.step()
    assert_close(weights(models[0]), weights(expected))


# -- gradients that are missing or dropped


def test_a_table_without_a_gradient():
    trainer, copies = make(replicas=2)
    (ids, labels), *_ = batches(1)
    loss_of(copies[0], ids, labels).backward()
    copies[1].linear(torch.ones(1, 2 * DIM)).sum().backward()
    before = weights(copies)
    message = r"got none for 1 of 3 \(key 'table', replica 1\)"
    with pytest.raises(UserWarning, match=message):
        trainer.step()
    assert_close(weights(copies), before)
    trainer.step(ignore_stale_grad=True)
    assert not weights(copies)["table"].equal(before["table"])
    copies.zero_grad()
    copies[0].linear(torch.ones(1, 2 * DIM)).sum().backward()
    before = weights(copies)
    trainer.step(ignore_stale_grad=True)
    assert weights(copies)["table"].equal(before["table"])
    assert not weights(copies)["weight"].equal(before["weight"])


def test_a_frozen_table_is_not_stepped():
    trainer, copies = make(replicas=2)
    for replica in copies:
        replica.embedding.requires_grad_(False)
    after = train(trainer, copies, batches(2))
    assert_same(after["table"], rows())


def test_the_first_replica_freezes_the_table():
    trainer, copies = make(replicas=2)
    [first, _] = [replica.embedding for replica in copies]
    first.requires_grad_(False)
    after = train(trainer, copies, batches(2))
    assert_same(after["table"], rows())
    for replica in copies:
        replica.embedding.zero_grad()


def test_a_frozen_other_replica_has_no_gradient():
    """Its rows would not be trained, so it is reported as a missing gradient."""
    trainer, copies = make(replicas=2)
    [_, second] = [replica.embedding for replica in copies]
    second.requires_grad_(False)
    ids, labels = batches(1)[0]
    loss_of(copies, ids, labels).backward()
    with pytest.raises(UserWarning, match="'table', replica 1"):
        trainer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    trainer, copies = make(replicas=2)
    (ids, labels), *_ = batches(1)
    loss_of(copies, ids, labels).backward()
    trainer.zero_grad(set_to_none)
    before = weights(copies)
    if set_to_none:
        with pytest.raises(UserWarning, match="key 'table', replica 0"):
            trainer.step()
    else:
        trainer.step()
    assert_close(weights(copies), before)
    loss_of(copies, ids, labels).backward()
    copies.zero_grad()
    assert all(replica.embedding.grad is None for replica in copies)


def test_allreduce_grads_of_one_replica():
    trainer, model = make()
    (ids, labels), *_ = batches(1)
    dense, expected = make_dense()
    for one, module in ((dense, expected), (trainer, model)):
        loss_of(module, ids, labels).backward()
        one.allreduce_grads()
        one.clip_grad_norm_(0.1)
        one.update()
    assert_close(weights(model), weights(expected))


# torch.compile looks at .grad of what passes a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model():
    """The graph breaks at the lookup; the rest is compiled."""
    trainer, model = make("adagrad")
    dense, expected = make_dense("adagrad")
    compiled = torch.compile(model.module, backend="eager")
    for ids, labels in batches(3):
        for one, forward in ((dense, expected), (trainer, compiled)):
            loss_of(forward, ids, labels).backward()
            one.step()
        assert_close(weights(model), weights(expected))
