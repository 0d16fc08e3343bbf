"""StoreEmbedding and sparse parameters in jobs of several processes."""

import pytest
import torch
import torch.nn.functional as F

import ranks
import torchkv

ROWS, DIM = 3000, 16


def batch_of(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(ROWS, (8, 4), generator=generator)


def make_table():
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))


class Model(torch.nn.Module):
    def __init__(self, table):
        super().__init__()
        torch.manual_seed(2)
        self.table = table
        self.linear = torch.nn.Linear(DIM, 3)

    def forward(self, ids):
        return self.linear(self.table(ids).mean(1))


def train(form, kv, positions, steps=5):
    """The table and a parameter after some steps on the batches of `positions`."""
    if form == "StoreEmbedding":
        kv.init("table.weight", make_table())
        table = torchkv.nn.StoreEmbedding(ROWS, DIM, kv, "table.weight")
    else:
        table = torch.nn.Embedding(ROWS, DIM, sparse=form == "sparse")
        table.weight.data = make_table()
    model = Model(table)
    trainer = torchkv.Trainer(
        model, "adagrad", {"lr": 0.1}, kvstore=kv, update_on_kvstore=True
    )
    for step in range(steps):
        for rank in positions:
            ids = batch_of(step, rank)
            F.cross_entropy(model(ids), ids[:, 0] % 3).backward()
        trainer.step()
        trainer.zero_grad()
    return kv.pull("table.weight"), model.linear.weight.detach().clone()


def train_rank(rank, form):
    with torchkv.create("dist_sync") as kv:
        found = train(form, kv, [rank])
        kv.barrier()
        return found


@pytest.mark.parametrize("form", ["StoreEmbedding", "sparse"])
def test_tables_learn_as_parameters_do(form):
    expected = train("dense", torchkv.create("local"), range(2))
    assert not torch.equal(expected[0], make_table())
    for found in ranks.run(train_rank, 2, form):
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two)
