"""StoreEmbedding: lookups, gradients and pushes, against torch's own embeddings."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import torchkv
from helpers import assert_same
from tables import DIM, ROWS, make, plain, stored, table, weighted

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = [
    torch.tensor([3]),
    torch.tensor([9, 0, 9, 9, 4]),
    torch.tensor([[1, 2, 1], [2, 1, 11]], dtype=torch.int32),
    torch.tensor(5),
    torch.empty(0, dtype=torch.int64),
    torch.empty(2, 0, 3, dtype=torch.int32),
    torch.arange(20).remainder(10).view(4, 5).t()[::2],
]


def ids_of(seed, shape=(4, 3)):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(ROWS, shape, generator=generator)


# -- lookups and gradients


@pytest.mark.parametrize("ids", IDS, ids=lambda ids: str(ids.tolist()))
@pytest.mark.parametrize("padding_idx", [None, 9, -11])
def test_output_and_gradient_are_those_of_nn_embedding(ids, padding_idx):
    embedding = make(padding_idx=padding_idx)
    reference = plain(padding_idx, sparse=False)
    output, expected = embedding(ids), reference(ids)
    assert output.shape == (*ids.shape, DIM)
    assert_same(output, expected)
    assert embedding.grad is None  # before backward
    weighted(output).backward()
    weighted(expected).backward()
    gradient = embedding.grad
    assert gradient.is_sparse and gradient.is_coalesced()
    assert gradient.shape == (ROWS, DIM)
    assert_same(gradient.to_dense(), reference.weight.grad)
    distinct = ids.long().unique().tolist()
    skipped = [] if padding_idx is None else [padding_idx % ROWS]
    assert gradient.indices()[0].tolist() == [i for i in distinct if i not in skipped]


def test_only_distinct_rows_are_pulled():
    embedding = make()
    embedding(torch.tensor([[4, 4, 4], [4, 7, 7]]))
    stats = embedding.store.stats()["table"]
    assert (stats["pulls"], stats["bytes_pulled"]) == (1, 2 * DIM * 4)


def test_the_output_of_padding_is_zero_whatever_the_table_has():
    embedding = make(padding_idx=2)
    assert stored(embedding)[2].abs().min() > 0
    output = embedding(torch.tensor([2, 3, 2]))
    assert_same(output[[0, 2]], torch.zeros(2, DIM))
    weighted(output).backward()
    assert embedding.grad.indices().tolist() == [[3]]
    only_padding = embedding(torch.tensor([2, 2]))
    embedding.zero_grad()
    weighted(only_padding).backward()
    assert embedding.grad._nnz() == 0


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([0, ROWS]), "expected row ids from 0 to 11.*got 12"),
        (torch.tensor([[-1]]), "expected row ids from 0 to 11.*got -1"),
    ],
)
def test_an_id_that_is_no_row(ids, message):
    embedding = make()
    with pytest.raises(IndexError, match=message + r" \(key 'table'\)"):
        embedding(ids)
    assert embedding.grad is None


def test_inputs_that_are_no_ids():
    embedding = make()
    message = r"expected ids of torch.int32 or torch.int64, but got torch.float32 \(key"
    with pytest.raises(TypeError, match=message):
        embedding(torch.tensor([1.0]))
    for arguments in ({"offsets": torch.tensor([0])}, {"per_sample_weights": 1}):
        with pytest.raises(ValueError, match="expected ids only, as its mode is None"):
            embedding(torch.tensor([1]), **arguments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    embedding, reference = make(dtype=dtype), plain(dtype=dtype, sparse=False)
    ids = torch.tensor([7, 1, 7])
    output = embedding(ids)
    assert_same(output, reference(ids))
    output.abs().sum().backward()
    reference(ids).abs().sum().backward()
    assert_same(embedding.grad.to_dense(), reference.weight.grad)


# -- pushes


PAIRS = {
    "sgd": (torchkv.optim.SGD(lr=0.3), lambda p: torch.optim.SGD(p, 0.3)),
    "adagrad": (torchkv.optim.Adagrad(lr=0.3), lambda p: torch.optim.Adagrad(p, 0.3)),
    # SparseAdam adds eps before it corrects the bias, so it is almost 0 here.
    "adam": (
        torchkv.optim.Adam(lr=0.3, eps=1e-20),
        lambda p: torch.optim.SparseAdam(p, 0.3, eps=1e-20),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_training_is_that_of_torchs_sparse_optimizers(name):
    optimizer, make_plain = PAIRS[name]
    embedding, reference = make(copy.deepcopy(optimizer)), plain()
    sparse = make_plain(reference.parameters())
    for step in range(6):
        ids = ids_of(step)
        weighted(embedding(ids).square()).backward()
        weighted(reference(ids).square()).backward()
        embedding.push()
        assert embedding.grad is None
        sparse.step()
        sparse.zero_grad()
        torch.testing.assert_close(stored(embedding), reference.weight.detach())
    assert embedding.store.stats()["table"]["pushes"] == 6


def test_several_forwards_and_backwards_before_one_push():
    embedding, reference = make(torchkv.optim.SGD(lr=0.5)), plain()
    first, second, third = (ids_of(seed) for seed in range(3))
    for module in (embedding, reference):
        (weighted(module(first)) + weighted(module(second))).backward()
        weighted(module(third)).backward()
    gradient = embedding.grad
    assert gradient.is_coalesced()
    assert_same(gradient.to_dense(), reference.weight.grad.to_dense())
    embedding.push()
    torch.optim.SGD(reference.parameters(), 0.5).step()
    torch.testing.assert_close(stored(embedding), reference.weight.detach())
    assert embedding.store.stats()["table"]["pushes"] == 1


def test_a_sum_of_half_precision_gradients_is_rounded_once():
    embedding = make(dtype=torch.bfloat16)
    for value in (256.0, *[1.0] * 8):
        (embedding(torch.tensor([3])) * value).sum().backward()
    # One by one, 256 + 1 would be rounded to 256 again and again.
    gradient = embedding.grad
    assert gradient.dtype == torch.bfloat16
    assert_same(gradient.values(), torch.full((1, DIM), 264.0, dtype=torch.bfloat16))


def test_the_graph_may_be_kept_for_another_backward():
    embedding, reference = make(torchkv.optim.SGD(lr=0.5)), plain()
    ids = ids_of(0)
    outputs = [module(ids) for module in (embedding, reference)]
    for output in outputs:
        weighted(output).backward(retain_graph=True)
        weighted(output).backward(retain_graph=True)
    assert_same(embedding.grad.to_dense(), reference.weight.grad.to_dense())
    embedding.push()
    weighted(outputs[0]).backward()  # after the push: one gradient, not three
    assert_same(embedding.grad.to_dense() * 2, reference.weight.grad.to_dense())


def test_double_backward():
    embedding, reference = make(), plain(sparse=False)
    ids = torch.tensor([1, 1, 6])
    for module in (embedding, reference):
        inputs = module(ids)
        (slope,) = torch.autograd.grad(inputs.pow(3).sum(), inputs, create_graph=True)
        slope.square().sum().backward()
    torch.testing.assert_close(embedding.grad.to_dense(), reference.weight.grad)
    embedding.zero_grad()
    with pytest.warns(UserWarning, match="create_graph=True"):
        weighted(embedding(ids).square()).backward(create_graph=True)
    assert not embedding.grad.requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd_nothing_is_recorded(mode):
    embedding = make().eval()
    with mode():
        output = embedding(torch.tensor([3, 8]))
    assert not output.requires_grad and embedding.grad is None
    assert_same(output, table()[[3, 8]])
    # As with nn.Embedding, eval() alone does not change what is differentiated.
    embedding(torch.tensor([3])).sum().backward()
    assert embedding.grad._nnz() == 1


def test_a_frozen_table_has_no_gradient():
    embedding = make().requires_grad_(False)
    assert not embedding.requires_grad
    assert not embedding(torch.tensor([3])).requires_grad
    assert embedding.requires_grad_().requires_grad
    assert embedding(torch.tensor([3])).requires_grad


def test_lookups_without_backward_leave_nothing():
    embedding = make()
    output = embedding(torch.tensor([3]))
    rows = weakref.ref(output.grad_fn.next_functions[0][0].variable)
    gc.disable()
    try:
        assert rows() is not None
        del output
        assert rows() is None
    finally:
        gc.enable()
    assert embedding.grad is None and embedding.rows_with_grad() == []


def test_zero_grad():
    embedding = make()
    embedding.zero_grad(set_to_none=False)
    assert embedding.grad is None
    weighted(embedding(torch.tensor([1, 2]))).backward()
    embedding.zero_grad(set_to_none=False)
    assert embedding.grad._nnz() == 0
    embedding.zero_grad()
    assert embedding.grad is None


def test_rows_with_grad_are_clipped_with_other_parameters():
    model = nn.ModuleList([make(torchkv.optim.SGD(lr=0.5)), nn.Linear(DIM, 2)])
    torch.manual_seed(1)
    reference = nn.ModuleList([plain(sparse=False), copy.deepcopy(model[1])])
    norms = []
    for table_, linear in (model, reference):
        for seed in range(2):  # which have ids in common
            weighted(linear(table_(ids_of(seed)))).backward()
        more = table_.rows_with_grad() if table_ is model[0] else []
        parameters = [*model.parameters()] if more else [*reference.parameters()]
        norms.append(nn.utils.clip_grad_norm_([*parameters, *more], 0.1))
    torch.testing.assert_close(norms[0], norms[1])
    model[0].push()
    torch.optim.SGD(reference[0].parameters(), 0.5).step()
    torch.testing.assert_close(stored(model[0]), reference[0].weight.detach())


def test_the_stores_max_norm_holds_for_the_push():
    embedding, reference = make(torchkv.optim.SGD(lr=1.0, max_norm=0.5)), plain()
    for module in (embedding, reference):
        weighted(module(ids_of(4))).backward()
    embedding.push()
    gradient = reference.weight.grad.to_dense()
    norm = gradient.norm()
    assert embedding.store.optimizer.grad_norm == pytest.approx(norm.item())
    expected = reference.weight.detach() - gradient * (0.5 / (norm + 1e-6))
    torch.testing.assert_close(stored(embedding), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_size_divides_the_gradient(dtype):
    embedding = make(torchkv.optim.SGD(lr=1.0), dtype=dtype)
    before = stored(embedding)
    (embedding(torch.tensor([3, 5])) * 6).sum().backward()
    embedding.push(4)
    expected = before.float()
    expected[[3, 5]] -= 1.5
    assert_same(stored(embedding), expected.to(dtype))


def test_a_scaler_in_a_loop_of_ones_own():
    embedding = make(torchkv.optim.SGD(lr=0.5, skip_nonfinite=True))
    reference = plain()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    ids = ids_of(5)
    for factor in (1.0, float("inf")):
        scaler.scale(weighted(embedding(ids)) * factor).backward()
        embedding.push(scaler.get_scale())
    weighted(reference(ids)).backward()
    torch.optim.SGD(reference.parameters(), 0.5).step()
    torch.testing.assert_close(stored(embedding), reference.weight.detach())
    assert embedding.store.optimizer.num_skipped == 1


def test_pushes_that_are_refused():
    embedding = make()
    message = r"push: expected a gradient from backward\(\).* \(key 'table'\)"
    with pytest.raises(RuntimeError, match=message):
        embedding.push()
    embedding(torch.tensor([1])).sum().backward()
    message = r"push: expected a store with an optimizer.*set_optimizer\(...\) first"
    with pytest.raises(RuntimeError, match=message):
        embedding.push()
    assert_same(stored(embedding), table())
    embedding.store.set_optimizer("sgd", learning_rate=1.0)
    with pytest.raises(ValueError, match="batch_size greater than 0, but got 0"):
        embedding.push(0)
    assert embedding.grad is not None  # a refused push keeps it
    embedding.push()
    expected = table()
    expected[1] -= 1
    assert_same(stored(embedding), expected)


def test_an_updater_takes_the_place_of_an_optimizer():
    embedding = make()
    embedding.store.set_updater(lambda key, input, stored: stored.add_(input))
    embedding(torch.tensor([1])).sum().backward()
    embedding.push()
    expected = table()
    expected[1] += 1
    assert_same(stored(embedding), expected)


# -- autocast and devices


def test_autocast_is_that_of_nn_embedding():
    torch.manual_seed(2)
    linear = nn.Linear(DIM, 4)
    embedding, reference = make(), plain(sparse=False)
    ids = ids_of(6)
    results = []
    for module in (embedding, reference):
        with torch.autocast("cpu", torch.bfloat16):
            output = module(ids)
            hidden = linear(output)
        assert output.dtype == torch.float32 and hidden.dtype == torch.bfloat16
        weighted(hidden).backward()
        results.append(hidden)
    assert_same(*results)
    assert_same(embedding.grad.to_dense(), reference.weight.grad)


def test_to_and_half_do_not_change_the_table():
    embedding = make().half().to(torch.float64)
    assert embedding(torch.tensor([1])).dtype == torch.float32
    assert stored(embedding).dtype == torch.float32


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


@pytest.mark.parametrize(
    ("rows", "dim", "options", "error", "message"),
    [
        (ROWS, 4, {}, ValueError, r"of shape \(12, 4\), but got \(12, 5\) \(key"),
        (None, 4, {}, ValueError, r"of shape \(any, 4\), but got \(12, 5\) \(key"),
        (13, DIM, {}, ValueError, r"of shape \(13, 5\), but got \(12, 5\) \(key"),
        (0, DIM, {}, ValueError, "expected num_embeddings above 0, but got 0"),
        (ROWS, -1, {}, ValueError, "expected embedding_dim above 0, but got -1"),
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
