"""StoreEmbeddings that make their key, whose rows exist once they are pushed."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import torchkv
from embedding_tables import DIM, ROWS, weighted
from helpers import assert_same

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT = (2**63 - 1) // DIM  # a tensor has less than 2**63 elements


def make(num_embeddings=None, optimizer="sgd", key="table", store=None, **options):
    if store is None:
        store = torchkv.create("local")
        store.set_optimizer(optimizer, learning_rate=0.5)
    return torchkv.nn.StoreEmbedding(num_embeddings, DIM, store, key, **options)


def values(embedding, ids):
    return embedding.store.row_sparse_pull(embedding.key, row_ids=ids)


def test_a_new_key():
    embedding = make(ROWS, dtype=torch.bfloat16, init=torchkv.initializers.Zeros())
    assert embedding.store.shape("table") == (ROWS, DIM)
    assert embedding.store.dtype("table") == embedding.dtype == torch.bfloat16
    assert_same(embedding(torch.tensor([3])), torch.zeros(1, DIM, dtype=torch.bfloat16))
    with pytest.raises(IndexError, match="12"):
        embedding(torch.tensor([ROWS]))


def test_a_new_key_without_a_number_of_rows():
    embedding = make()
    assert embedding.num_embeddings is None and embedding.dtype == torch.float32
    assert embedding.store.shape("table")[1] == DIM
    assert repr(embedding) == "StoreEmbedding(None, 5, key='table')"
    again = make(
        store=embedding.store, init=torchkv.initializers.Zeros()
    )  # whose init is not used
    ids = torch.tensor([0, 10**15, LIMIT - 1])
    assert_same(again(ids), embedding(ids))


def test_the_default_values_are_normal_and_those_of_torchs_seed():
    torch.manual_seed(1)
    first = make()(torch.arange(2000))
    torch.manual_seed(1)
    assert_same(make()(torch.arange(2000)), first)
    assert not make()(torch.arange(2000)).equal(first)
    assert abs(first.mean().item()) < 0.05 and abs(first.std().item() - 1) < 0.05


def test_other_initial_values():
    output = make(init=torchkv.initializers.Uniform(2.0, 3.0, seed=0))(
        torch.arange(100)
    )
    assert output.min() >= 2 and output.max() <= 3
    output = make(init=torchkv.initializers.Normal(5.0, 0.1, seed=0))(torch.arange(100))
    assert abs(output.mean().item() - 5) < 0.1


@pytest.mark.parametrize("ids", [[LIMIT], [0, 2**63 - 1]])
def test_ids_that_no_gradient_can_have(ids):
    with pytest.raises(IndexError, match=rf"got {ids[-1]}\b.*\(key 'table'\)"):
        make()(torch.tensor(ids))


def test_negative_ids_are_the_stores_error():
    with pytest.raises(IndexError, match=r"-1.*\(key 'table'\)"):
        make()(torch.tensor([3, -1]))


def test_padding():
    message = r"expected a padding_idx from 0 to \d+, but got -1 \(key 'table'\)"
    store = torchkv.create("local")
    with pytest.raises(ValueError, match=message):
        make(store=store, padding_idx=-1)
    assert "table" not in store
    embedding = make(padding_idx=10**12)
    output = embedding(torch.tensor([10**12, 3]))
    assert_same(output[0], torch.zeros(DIM))
    weighted(output).backward()
    assert embedding.grad.indices().tolist() == [[3]]
    embedding.push()
    assert make(ROWS, padding_idx=-1).padding_idx == ROWS - 1


@pytest.mark.parametrize("rows", [None, ROWS])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_training_is_that_of_a_dense_table(rows, optimizer):
    embedding = make(rows, optimizer)
    dense = values(embedding, torch.arange(ROWS))
    store = torchkv.create("local")
    store.init("table", dense)
    store.set_optimizer(optimizer, learning_rate=0.5)
    reference = torchkv.nn.StoreEmbedding(ROWS, DIM, store, "table")
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(ROWS, (3, 2), generator=generator)
        for module in (embedding, reference):
            weighted(module(ids).square()).backward()
            module.push()
    assert_same(values(embedding, torch.arange(ROWS)), store.pull("table"))
    assert not store.pull("table").equal(dense)


def test_gradients_of_any_ids():
    embedding = make()
    before = values(embedding, torch.tensor([7, LIMIT - 1]))
    for ids in ([7, 3, 7], [LIMIT - 1], []):
        weighted(embedding(torch.tensor(ids, dtype=torch.int64))).backward()
        assert embedding.grad.shape == (LIMIT, DIM)
        assert embedding.grad.indices()[0].tolist() == sorted({*ids})
        embedding.push()
    assert not values(embedding, torch.tensor([7])).equal(before[:1])
    assert not values(embedding, torch.tensor([LIMIT - 1])).equal(before[1:])


def test_rows_exist_once_they_are_pushed():
    embedding = make(padding_idx=0)
    output = embedding(torch.tensor([0, 7, 3, 10**12, 7]))
    assert embedding.store.num_rows("table") == 0
    output.sum().backward()
    embedding.push()
    assert embedding.store.num_rows("table") == 3


def test_a_forgotten_row_begins_anew():
    embedding = make()
    ids = torch.tensor([4, 10**9])
    before = values(embedding, ids)
    embedding(ids).sum().backward()
    embedding.push()
    assert_same(values(embedding, ids), before - 0.5)
    embedding.store.delete("table", row_ids=ids[:1])
    assert_same(values(embedding, ids), torch.stack([before[0], before[1] - 0.5]))


def test_shapes_that_are_refused():
    embedding = make()
    with pytest.raises(ValueError, match=r"of shape \(12, 5\), but got \(\d+, 5\)"):
        make(ROWS, store=embedding.store)
    with pytest.raises(ValueError, match="expected a value of torch.float64"):
        make(store=embedding.store, dtype=torch.float64)
    with pytest.raises(TypeError, match="a floating-point dtype, but got torch.int64"):
        make(dtype=torch.int64)


def saved_by_torch(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), saved_by_torch],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies(copied):
    embedding = make(optimizer="adam")
    ids = torch.tensor([4, 10**9])
    embedding(ids).sum().backward()
    embedding.push()
    other = copied(embedding)
    for module in (embedding, other):
        weighted(module(ids)).backward()
        module.push()
    assert_same(other(ids), embedding(ids))
    assert_same(other(ids + 1), embedding(ids + 1))  # not pushed yet


def make_trainer(replicas):
    """The same table in each run: its seed is torch's."""
    torch.manual_seed(2)
    store = torchkv.create("local")
    model = nn.Sequential(make(store=store), nn.Linear(DIM, 2))
    copies = torchkv.replicate(model, ["cpu"] * replicas)
    options = {"learning_rate": 0.1}
    return torchkv.Trainer(copies, "adam", options, kvstore=store), copies


IDS = torch.tensor([3, 10**9, 5, 10**15, 3, 8])


def run(trainer, copies, steps):
    norms = []
    for _ in range(steps):
        weighted(copies(IDS)).backward()
        norms.append(trainer.clip_grad_norm_(1.0).item())
        trainer.step()
    return norms


def test_replicas():
    trainer, copies = make_trainer(1)
    expected = run(trainer, copies, 4)
    others, more = make_trainer(3)
    assert run(others, more, 4) == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(more(IDS), copies(IDS))


def test_a_resumed_trainer_goes_on_with_the_same_bits():
    trainer, copies = make_trainer(2)
    run(trainer, copies, 3)
    saved = copy.deepcopy(trainer.state_dict())
    expected = run(trainer, copies, 3)
    resumed, others = make_trainer(2)
    run(resumed, others, 1)
    resumed.load_state_dict(saved)
    assert run(resumed, others, 3) == expected
    assert_same(others(IDS), copies(IDS))
