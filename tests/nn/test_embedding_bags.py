"""StoreEmbedding with a mode, against nn.EmbeddingBag."""

import pytest
import torch

import torchkv
from embedding_tables import DIM, make, plain_bag, stored, weighted
from helpers import assert_same

pytestmark = pytest.mark.usefixtures("one_thread")

FLAT = torch.tensor([4, 2, 4, 9, 0, 2, 2, 11])
MODES = ["sum", "mean", "max"]


def check(embedding, reference, *arguments, **keywords):
    output = embedding(*arguments, **keywords)
    expected = reference(*arguments, **keywords)
    torch.testing.assert_close(output, expected)
    weighted(output).backward()
    weighted(expected).backward()
    gradient = embedding.grad
    torch.testing.assert_close(gradient.to_dense(), reference.weight.grad)
    return gradient.indices()[0].tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_rows_of_ids(mode, padding_idx, dtype):
    embedding = make(mode=mode, padding_idx=padding_idx)
    ids = check(embedding, plain_bag(mode, padding_idx), FLAT.to(dtype).view(2, 4))
    assert ids == [i for i in (0, 2, 4, 9, 11) if i != padding_idx]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("last", [False, True])
def test_offsets(mode, padding_idx, last):
    embedding = make(mode=mode, padding_idx=padding_idx, include_last_offset=last)
    reference = plain_bag(mode, padding_idx, include_last_offset=last)
    offsets = torch.tensor([0, 3, 3, 5, 8] if last else [0, 3, 3, 5])
    check(embedding, reference, FLAT, offsets)  # the second bag is empty
    assert embedding(FLAT, offsets).shape == (4, DIM)


def test_offsets_of_another_dtype_than_the_ids():
    output = make(mode="sum")(FLAT, torch.tensor([0, 3], dtype=torch.int32))
    assert_same(output, plain_bag("sum")(FLAT, torch.tensor([0, 3])))


@pytest.mark.parametrize("with_offsets", [False, True])
def test_weights_and_their_gradients(with_offsets):
    embedding, reference = make(mode="sum"), plain_bag("sum")
    ids = FLAT if with_offsets else FLAT.view(4, 2)
    offsets = torch.tensor([0, 3, 3, 5]) if with_offsets else None
    gradients = []
    for module in (embedding, reference):
        weights = torch.linspace(-1, 1, 8).view(ids.shape).requires_grad_()
        weighted(module(ids, offsets, weights)).backward()
        gradients.append(weights.grad)
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(embedding.grad.to_dense(), reference.weight.grad)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding_idx", [None, 2])
def test_bags_without_ids(mode, padding_idx):
    embedding = make(mode=mode, padding_idx=padding_idx)
    none = torch.empty(0, dtype=torch.int64)
    reference = plain_bag(mode, padding_idx)
    assert check(embedding, reference, none, torch.tensor([0, 0])) == []
    if padding_idx is not None:
        only_padding = torch.full((2, 3), padding_idx)
        assert check(embedding, reference, only_padding) == []


def test_what_embedding_bag_refuses():
    with pytest.raises(ValueError, match="offsets"):
        make(mode="sum")(FLAT)
    with pytest.raises(NotImplementedError, match="per_sample_weights"):
        make(mode="mean")(FLAT.view(2, 4), per_sample_weights=torch.ones(2, 4))


@pytest.mark.parametrize("mode", MODES)
def test_training(mode):
    embedding, reference = make(torchkv.optim.Adagrad(lr=0.3), mode=mode), None
    reference = plain_bag(mode)
    optimizer = torch.optim.Adagrad(reference.parameters(), 0.3)
    for step in range(5):
        ids = (FLAT * (step + 1) + step).remainder(12).view(2, 4)
        for module in (embedding, reference):
            weighted(module(ids).square()).backward()
        embedding.push()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(stored(embedding), reference.weight.detach())
