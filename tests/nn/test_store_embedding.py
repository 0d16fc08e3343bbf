"""StoreEmbedding: lookups, gradients and pushes, against torch's own embeddings."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import torchkv
from embedding_tables import DIM, ROWS, make, plain, stored, table, weighted
from helpers import assert_same, run_threads

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
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
@pytest.mark.parametrize("device", DEVICES)
def test_output_and_gradient_are_those_of_nn_embedding(ids, padding_idx, device):
    embedding = make(padding_idx=padding_idx)
    reference = plain(padding_idx, sparse=False)
    output, expected = embedding(ids.to(device)), reference(ids)
    assert output.device.type == device
    output = output.to("cpu")
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


def test_gradients_that_no_step_takes_do_not_pile_up():
    """As of a module that is not the Trainer's: memory is that of the distinct rows."""
    store = torchkv.create("local")
    store.init("table", torch.zeros(6000, 1))
    embedding = torchkv.nn.StoreEmbedding(6000, 1, store, "table")
    count = 0
    for begin in range(0, 60_000, 500):
        ids = torch.arange(begin, begin + 500).remainder(6000)
        embedding(ids).sum().backward()
        count = max(count, sum(len(x.ids) for x in embedding._gradients._pulled))
    assert count <= 12_500
    assert_same(embedding.grad.to_dense(), torch.full((6000, 1), 10.0))


def test_backward_in_several_threads():
    embedding = make()
    some = [ids_of(seed, (50, 4)) for seed in range(8)]
    run_threads([lambda ids=ids: embedding(ids).sum().backward() for ids in some])
    expected = torch.bincount(torch.cat(some).flatten(), minlength=ROWS)
    assert_same(embedding.grad.to_dense(), expected[:, None].expand(-1, DIM).float())


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


def test_threads_push_each_gradient_once():
    store = torchkv.create("local")
    store.init("table", torch.zeros(4, 2))
    store.set_optimizer(torchkv.optim.SGD(lr=1.0))
    embedding = torchkv.nn.StoreEmbedding(4, 2, store, "table")
    failures = []

    def work():
        for _ in range(100):
            embedding(torch.tensor([1])).sum().backward()
            try:
                embedding.push()
            except RuntimeError as error:  # another thread has pushed it
                if "expected a gradient" not in str(error):
                    failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if embedding.grad is not None:
        embedding.push()
    assert not failures
    assert store.pull("table")[1].tolist() == [-300.0, -300.0]


def test_a_refused_push_keeps_the_gradient():
    store = torchkv.create("local")
    store.init_rows("table", (2,), num_rows=4)
    store.set_optimizer(torchkv.optim.LAMB(lr=1.0))  # which needs the whole table
    embedding = torchkv.nn.StoreEmbedding(4, 2, store, "table")
    embedding(torch.tensor([1, 1])).sum().backward()
    with pytest.raises(NotImplementedError, match="row-sparse"):
        embedding.push()
    store.set_optimizer(torchkv.optim.SGD(lr=1.0))
    embedding.push()
    assert store.row_sparse_pull("table", row_ids=torch.tensor(1)).tolist() == [-2, -2]
