"""StoreEmbedding as an object: copies, what the constructor takes, errors."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import torchkv
from embedding_tables import DIM, ROWS, make, stored, table
from helpers import assert_same

pytestmark = pytest.mark.usefixtures("one_thread")


# -- copies


def check_copy(embedding, other):
    """A copy has the table, its optimizer and no gradient; both then go apart."""
    assert other.store is not embedding.store
    assert_same(stored(other), stored(embedding))
    assert repr(other) == repr(embedding) and other.grad is None
    for module in (embedding, other):
        module.zero_grad()
        module(torch.tensor([1])).sum().backward()
        module.push()
    assert_same(stored(other), stored(embedding))
    other(torch.tensor([1])).sum().backward()
    other.push()
    assert not stored(other).equal(stored(embedding))


def saved_and_loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_have_a_store_of_their_own(how):
    embedding = make("adam", padding_idx=4)
    embedding(torch.tensor([1, 2])).sum().backward()
    embedding.push()
    embedding(torch.tensor([3])).sum().backward()
    check_copy(embedding, COPIES[how](embedding))


@pytest.mark.parametrize("how", COPIES)
def test_the_modules_of_a_copied_model_share_its_store(how):
    first = make("sgd")
    first.store.init("other", table(4))
    second = torchkv.nn.StoreEmbedding(None, DIM, first.store, "other")
    model = nn.ModuleList([first, second, nn.Linear(2, 2)])
    other = COPIES[how](model)
    assert other[0].store is other[1].store is not first.store
    assert sorted(other[0].store.keys()) == ["other", "table"]
    check_copy(second, other[1])


def test_the_state_dict_of_a_module_has_no_table():
    embedding = make()
    assert not embedding.state_dict() and not [*embedding.parameters()]
    model = nn.Sequential(embedding, nn.Linear(DIM, 2))
    assert sorted(model.state_dict()) == ["1.bias", "1.weight"]
    model.load_state_dict(model.state_dict())


# -- the constructor


def test_attributes():
    embedding = make(padding_idx=-1, mode="mean")
    assert (embedding.num_embeddings, embedding.embedding_dim) == (ROWS, DIM)
    assert embedding.padding_idx == ROWS - 1 and embedding.dtype == torch.float32
    assert repr(embedding) == (
        "StoreEmbedding(12, 5, key='table', padding_idx=11, mode='mean')"
    )
    assert repr(make()) == "StoreEmbedding(12, 5, key='table')"


def test_an_int_key_and_an_unknown_number_of_rows():
    store = torchkv.create("local")
    store.init(7, table())
    embedding = torchkv.nn.StoreEmbedding(None, DIM, store, 7)
    assert embedding.num_embeddings == ROWS and embedding.key == 7
    assert_same(embedding(torch.tensor([11])), table()[[11]])


def test_ints_of_numpy():
    store = torchkv.create("local")
    rows, dim = np.int64(ROWS), np.int32(DIM)
    padding = np.array(-1)
    embedding = torchkv.nn.StoreEmbedding(rows, dim, store, 7, padding_idx=padding)
    assert repr(embedding) == "StoreEmbedding(12, 5, key=7, padding_idx=11)"
    assert store.shape(7) == (ROWS, DIM)


@pytest.mark.parametrize(
    ("rows", "dim", "options", "error", "message"),
    [
        (ROWS, 4, {}, ValueError, r"of shape \(12, 4\), but got \(12, 5\) \(key"),
        (None, 4, {}, ValueError, r"of shape \(any, 4\), but got \(12, 5\) \(key"),
        (13, DIM, {}, ValueError, r"of shape \(13, 5\), but got \(12, 5\) \(key"),
        (0, DIM, {}, ValueError, "expected num_embeddings above 0, but got 0"),
        (ROWS, -1, {}, ValueError, "expected embedding_dim above 0, but got -1"),
        (2**62, DIM, {}, ValueError, r"less than 2\*\*63 elements, but got 4611686018"),
        (2.5, DIM, {}, TypeError, "an int or None as num_embeddings, but got float"),
        (ROWS, "5", {}, TypeError, "expected an int as embedding_dim, but got str"),
        (
            *(ROWS, DIM, {"dtype": torch.float64}, ValueError),
            r"expected a value of torch.float64, but got torch.float32 \(key 'table'\)",
        ),
        (ROWS, DIM, {"dtype": "x"}, TypeError, "a torch.dtype or None as dtype"),
        (
            *(ROWS, DIM, {"padding_idx": ROWS}, ValueError),
            "expected a padding_idx from -12 to 11, but got 12",
        ),
        (ROWS, DIM, {"padding_idx": 1.0}, TypeError, "an int or None as padding_idx"),
        (ROWS, DIM, {"padding_idx": True}, TypeError, "as padding_idx, but got bool"),
        (
            *(ROWS, DIM, {"mode": "avg"}, ValueError),
            "unknown mode 'avg'; expected None or one of 'sum', 'mean', 'max'",
        ),
        (
            *(ROWS, DIM, {"include_last_offset": True}, ValueError),
            "include_last_offset needs a mode",
        ),
    ],
)
def test_arguments_that_are_refused(rows, dim, options, error, message):
    store = torchkv.create("local")
    store.init("table", table())
    with pytest.raises(error, match="StoreEmbedding: .*" + message):
        torchkv.nn.StoreEmbedding(rows, dim, store, "table", **options)


def test_values_that_are_no_tables():
    store = torchkv.create("local")
    store.init(["scalar", "ints"], [torch.tensor(1.0), torch.ones(3, DIM).long()])
    with pytest.raises(ValueError, match=r"\(any, 5\), but got \(\) \(key 'scalar'\)"):
        torchkv.nn.StoreEmbedding(None, DIM, store, "scalar")
    message = r"expected a floating-point dtype, but got torch.int64 \(key 'ints'\)"
    with pytest.raises(TypeError, match=message):
        torchkv.nn.StoreEmbedding(None, DIM, store, "ints")
    with pytest.raises(TypeError, match="expected a store of torchkv's, but got dict"):
        torchkv.nn.StoreEmbedding(None, DIM, {}, "ints")
    with pytest.raises(TypeError, match="key"):
        torchkv.nn.StoreEmbedding(None, DIM, store, 1.5)


def test_errors_of_the_store_come_through():
    embedding = make("sgd")
    embedding(torch.tensor([1])).sum().backward()
    embedding.store.delete("table")
    with pytest.raises(KeyError, match="table"):
        embedding(torch.tensor([1]))
    with pytest.raises(KeyError, match="table"):
        embedding.push()
    embedding.store.close()
    with pytest.raises(RuntimeError, match="closed"):
        embedding(torch.tensor([1]))
