"""Training of a small model with a StoreEmbedding, or with nn.Embedding."""

import torch
import torch.nn.functional as F
from torch import nn

import torchkv

ROWS, DIM, BATCH = 20, 4, 6


class Model(nn.Module):
    """Classifies two ids."""

    def __init__(self, embedding):
        super().__init__()
        torch.manual_seed(5)
        self.embedding = embedding
        self.linear = nn.Linear(2 * DIM, 3)

    def forward(self, ids):
        return self.linear(self.embedding(ids).flatten(1))


def rows():
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(4))


def batches(count=8):
    generator = torch.Generator().manual_seed(6)
    return [
        (
            torch.randint(ROWS // 2, (BATCH, 2), generator=generator),
            torch.randint(3, (BATCH,), generator=generator),
        )
        for _ in range(count)
    ]


def make(optimizer="sgd", replicas=1, key="table", **options):
    """A trainer whose table is in its store, and the replicas."""
    store = torchkv.create("local")
    store.init(key, rows())
    model = Model(torchkv.nn.StoreEmbedding(ROWS, DIM, store, key))
    copies = torchkv.replicate(model, ["cpu"] * replicas)
    trainer = torchkv.Trainer(copies, optimizer, {"lr": 0.3, **options}, kvstore=store)
    return trainer, copies


def make_dense(optimizer="sgd", **options):
    """The same with a parameter as table."""
    model = Model(nn.Embedding.from_pretrained(rows(), freeze=False))
    return torchkv.Trainer(model, optimizer, {"lr": 0.3, **options}), model


def loss_of(model, ids, labels):
    return F.cross_entropy(model(ids), labels)


def weights(model):
    """The table and the parameters, by name, of either kind of model."""
    model = model.module if isinstance(model, torchkv.Replicas) else model
    embedding = model.embedding
    if isinstance(embedding, nn.Embedding):
        table = embedding.weight.detach()
    else:
        table = embedding.store.pull(embedding.key)
    named = model.linear.named_parameters()
    return {"table": table, **{name: p.detach().clone() for name, p in named}}


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], msg=name)


def train(trainer, model, some=None, step=lambda trainer: trainer.step()):
    for ids, labels in some or batches():
        loss_of(model, ids, labels).backward()
        step(trainer)
    return weights(model)


def table_in(store, key="table"):
    if key not in store:
        store.init(key, rows())
    return torchkv.nn.StoreEmbedding(ROWS, DIM, store, key)
