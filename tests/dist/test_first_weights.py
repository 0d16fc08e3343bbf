"""A Trainer of several processes begins with rank 0's weights."""

import pytest
import torch
from torch import nn

import ranks
import torchkv


def train(rank, type, on_store):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].bias.requires_grad_(False)
    trainer = torchkv.Trainer(
        model,
        "sgd",
        {"learning_rate": 0.1},
        kvstore=torchkv.create(type),
        update_on_kvstore=on_store,
    )
    weights = [[p.detach().clone() for p in model.parameters()]]
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        trainer.step(2)
    weights.append([p.detach().clone() for p in model.parameters()])
    keys = trainer.kvstore.keys()
    trainer.kvstore.close()
    return weights, keys


@pytest.mark.parametrize("on_store", [None, False])
def test_all_ranks_have_the_weights_of_rank_0(on_store):
    (first, keys), (second, _) = ranks.run(train, 2, "dist_sync", on_store)
    assert "0.bias" not in keys  # it is not trained
    for mine, others in zip(first, second, strict=True):
        assert all(map(torch.equal, mine, others))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    assert all(map(torch.equal, first[0], model.parameters()))
