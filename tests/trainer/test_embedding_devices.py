"""Models with a StoreEmbedding on CPU and GPU, against nn.Embedding on the device."""

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
    make_dense,
    rows,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
TABLES = ["with the model", "in CPU memory", "row-sparse"]
PRECISIONS = {
    "fp32": (torch.float32, False),
    "autocast": (torch.bfloat16, False),
    "scaled": (torch.float16, True),
}


def make_store(device, table):
    store = torchkv.create("device")
    value = rows()
    if table == "with the model":
        value = value.to(device)
    store.init("table", value.to_sparse(1) if table == "row-sparse" else value)
    return store


def make_model(device, table):
    store = make_store(device, table)
    embedding = torchkv.nn.StoreEmbedding(ROWS, DIM, store, "table")
    return Model(embedding).to(device), store


def on_cpu(values):
    return {name: value.to("cpu").to_dense() for name, value in values.items()}


def run(device, precision, model, optimizer, clip_grad_norm):
    """As torch's own loop of mixed precision, with a Trainer as the optimizer, too."""
    dtype, is_scaled = PRECISIONS[precision]
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8, enabled=is_scaled)
    for ids, labels in batches():
        optimizer.zero_grad()
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = loss_of(model, ids.to(device), labels.to(device))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm()
        scaler.step(optimizer)
        scaler.update()
    return on_cpu(weights(model))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_mixed_precision_is_that_of_a_parameter(device, table, precision):
    model, store = make_model(device, table)
    trainer = torchkv.Trainer(model, "sgd", {"lr": 0.3}, kvstore=store)

    def clip():
        trainer.clip_grad_norm_(0.5)

    actual = run(device, precision, model, trainer, clip)
    dense = Model(nn.Embedding.from_pretrained(rows(), freeze=False)).to(device)
    sgd = torch.optim.SGD(dense.parameters(), 0.3)

    def clip_dense():
        nn.utils.clip_grad_norm_(dense.parameters(), 0.5)

    assert_close(actual, run(device, precision, dense, sgd, clip_dense))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_gradients_are_where_the_table_is(device, table, padding_idx):
    store = make_store(device, table)
    store.set_optimizer("sgd", learning_rate=1.0)
    embedding = torchkv.nn.StoreEmbedding(
        ROWS, DIM, store, "table", padding_idx=padding_idx
    )
    where = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    expected = rows()
    for ids in ([3, 1, 3], [7, 1]):  # the second time, of two lookups
        for _ in range(2):
            output = embedding(torch.tensor(ids, device=device))
            assert output.device == where
            output.sum().backward()
        gradient = embedding.grad
        is_there = table == "with the model"
        assert gradient.device == (where if is_there else torch.device("cpu"))
        assert gradient.is_coalesced()
        embedding.push()
        for i in ids:
            expected[i] -= 0 if i == padding_idx else 2
    torch.testing.assert_close(store.pull("table").to("cpu").to_dense(), expected)


@pytest.mark.cuda
def test_a_push_of_rows_in_cpu_memory_leaves_the_table_on_its_gpu():
    store = make_store("cuda", "with the model")
    store.set_optimizer("sgd", learning_rate=1.0)
    embedding = torchkv.nn.StoreEmbedding(ROWS, DIM, store, "table")
    for device in ("cpu", "cuda", "cpu"):  # gradients of both are added up
        embedding(torch.tensor([1, 2], device=device)).sum().backward()
    assert store._impl.row_device("table").type == "cuda"
    embedding.push()
    assert store._impl.row_device("table").type == "cuda"
    expected = rows()
    expected[1:3] -= 3
    torch.testing.assert_close(store.pull("table").to("cpu"), expected)


def test_replicas_on_several_devices(devices):
    store = make_store(devices[0].type, "with the model")
    embedding = torchkv.nn.StoreEmbedding(ROWS, DIM, store, "table")
    copies = torchkv.replicate(Model(embedding), devices)
    trainer = torchkv.Trainer(copies, "sgd", {"lr": 0.3}, kvstore=store)
    dense, expected = make_dense()
    for ids, labels in batches():
        copies.backward(
            lambda model, *batch: loss_of(model, *batch) * len(batch[0]), ids, labels
        )
        trainer.step(BATCH)
        loss_of(expected, ids, labels).backward()
        dense.step()
    assert_close(on_cpu(weights(copies)), weights(expected))
