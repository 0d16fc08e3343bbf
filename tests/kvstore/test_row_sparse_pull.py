"""row_sparse_pull: rows of dense values, by their numbers."""

import pytest
import torch

import torchkv
from error_scene import Wrapper, fake
from helpers import assert_same, bits, script

VALUE = torch.arange(60, dtype=torch.float32).view(10, 2, 3)


@pytest.fixture
def rows(kv):
    """A store with values of ten rows."""
    kv.init("x", VALUE)
    kv.init("half", VALUE.bfloat16())
    kv.init("vector", torch.arange(7))
    kv.init("empty", torch.empty(0, 4))
    kv.init("scalar", torch.tensor(3.0))
    return kv


IDS = [
    torch.tensor([3]),
    torch.tensor([9, 0, 9, 9, 4]),
    torch.tensor([[1, 2], [2, 1]], dtype=torch.int32),
    torch.tensor(5),
    torch.empty(0, dtype=torch.int64),
    torch.empty(2, 0, dtype=torch.int32),
    torch.arange(20).remainder(10)[::3],
]


@pytest.mark.parametrize("ids", IDS, ids=lambda ids: str(ids.tolist()))
@pytest.mark.parametrize("key", ["x", "half"])
def test_a_dense_out_gets_the_rows_in_the_order_asked(rows, key, ids):
    expected = rows.pull(key)[ids.long()]
    assert_same(rows.row_sparse_pull(key, row_ids=ids), expected)
    out = torch.full_like(expected, -1)
    assert rows.row_sparse_pull(key, out, row_ids=ids) is None
    assert_same(out, expected)


def test_rows_of_a_vector_are_its_elements(rows):
    ids = torch.tensor([[6, 6], [0, 3]])
    assert_same(rows.row_sparse_pull("vector", row_ids=ids), ids)


@pytest.mark.parametrize("ids", IDS, ids=lambda ids: str(ids.tolist()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sparse_out_gets_the_distinct_rows_in_ascending_order(rows, ids, dtype):
    rows_of_out = torch.ones(2, 2, 3, dtype=dtype)
    out = torch.sparse_coo_tensor(
        [[8, 8]], rows_of_out, (10, 2, 3), check_invariants=True
    )
    rows.row_sparse_pull("x", out, row_ids=ids)
    distinct = ids.long().flatten().unique()
    assert out.is_coalesced() and out.shape == VALUE.shape
    assert_same(out.indices()[0], distinct)
    assert_same(out.values(), VALUE[distinct].to(dtype))


def test_outs_of_other_strides_and_dtypes(rows):
    ids = torch.tensor([7, 1, 7])
    strided = torch.zeros(3, 2, 6)[:, :, ::2]
    double = torch.zeros(3, 2, 3, dtype=torch.float64, requires_grad=True)
    transposed = torch.zeros(3, 2, 3).transpose(0, 2).contiguous().transpose(0, 2)
    outs = [strided, double, transposed]
    rows.row_sparse_pull("x", outs, row_ids=ids)
    for out in outs:
        assert torch.equal(out, VALUE[ids].to(out.dtype))


def test_each_out_may_have_its_own_ids(rows):
    ids = [torch.tensor([1]), torch.tensor([2, 3])]
    outs = [torch.empty(1, 2, 3), torch.empty(2, 2, 3)]
    rows.row_sparse_pull("x", outs, row_ids=ids)
    for out, of_out in zip(outs, ids, strict=True):
        assert_same(out, VALUE[of_out])


def test_lists_of_keys(rows):
    ids = [torch.tensor([4, 2]), torch.tensor([0])]
    first, second = rows.row_sparse_pull(["x", "vector"], row_ids=ids)
    assert_same(first, VALUE[ids[0]])
    assert_same(second, torch.tensor([0]))
    dense, sparse = torch.empty(2, 2, 3), torch.zeros(7, dtype=torch.long).to_sparse()
    rows.row_sparse_pull(["x", "vector"], [dense, [sparse]], row_ids=ids)
    assert_same(dense, first)
    assert_same(sparse.indices()[0], ids[1])


def test_ids_that_are_the_out(rows):
    ids = torch.tensor([6, 1, 4])
    rows.row_sparse_pull("vector", ids, row_ids=ids)
    assert_same(ids, torch.tensor([6, 1, 4]))
    rows.push("vector", torch.arange(10, 17))
    rows.row_sparse_pull("vector", ids, row_ids=ids)
    assert_same(ids, torch.tensor([16, 11, 14]))


def test_rows_follow_updates(rows):
    rows.set_optimizer("sgd", learning_rate=1.0)
    rows.push("x", [torch.ones(10, 2, 3)] * 2)
    ids = torch.tensor([9, 3])
    assert_same(rows.row_sparse_pull("x", row_ids=ids), VALUE[ids] - 2)


def test_a_shared_value(rows):
    value = torch.arange(12.0).view(4, 3)
    rows.init("shared", value, share=True)
    value[2] = 7
    ids = torch.tensor([2, 0])
    assert_same(rows.row_sparse_pull("shared", row_ids=ids), value[ids])
    with pytest.raises(ValueError, match="overlaps"):
        rows.row_sparse_pull("shared", value[:2], row_ids=ids)
    assert_same(value, torch.tensor([[0.0, 1, 2], [3, 4, 5], [7, 7, 7], [9, 10, 11]]))


def test_counts_the_rows(rows):
    before = rows.stats()["x"]
    rows.row_sparse_pull("x", row_ids=torch.tensor([1, 1]))
    after = rows.stats()["x"]
    assert after["pulls"] == before["pulls"] + 1
    assert after["bytes_pulled"] == before["bytes_pulled"] + 2 * 6 * 4


def sparse(*shape, dims=1):
    indices = torch.empty(dims, 0, dtype=torch.long)
    values = torch.empty(0, *shape[dims:])
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def ids_of(*ids):
    return torch.tensor(ids)


REFUSED = [
    ("too large", "x", torch.empty(3, 2, 3), ids_of(1, 10, 11), IndexError,
     r"expected row ids from 0 to 9, for a value of 10 rows, but got 10 \(key 'x'\)"),
    ("negative", "x", torch.empty(2, 2, 3), ids_of(0, -1), IndexError, "but got -1"),
    ("no rows at all", "empty", torch.empty(1, 4), ids_of(0), IndexError, "0 rows"),
    ("float ids", "x", torch.empty(1, 2, 3), torch.tensor([1.0]), TypeError,
     "expected row ids of dtype torch.int32 or torch.int64, but got torch.float32"),
    ("bool ids", "x", torch.empty(1, 2, 3), torch.tensor([True]), TypeError, "bool"),
    ("no ids", "x", torch.empty(1, 2, 3), None, TypeError, "row_ids"),
    ("a list of ints", "x", torch.empty(1, 2, 3), [1], TypeError, "expected a tensor"),
    ("ids without data", "x", torch.empty(1, 2, 3),
     torch.empty(1, dtype=torch.long, device="meta"), NotImplementedError, "meta"),
    ("wrapped ids", "x", torch.empty(1, 2, 3), Wrapper(ids_of(1)), NotImplementedError,
     "wrapper"),
    ("fake ids", "x", torch.empty(1, 2, 3), fake().to(torch.int64), NotImplementedError,
     "wrapper"),
    ("another number of rows", "x", torch.empty(3, 2, 3), ids_of(1, 2), ValueError,
     r"expected shape \[2, 2, 3\], but got \[3, 2, 3\]"),
    ("rows of another shape", "x", torch.empty(2, 6), ids_of(1, 2), ValueError,
     "expected shape"),
    ("an expanded out", "x", torch.empty(1, 2, 3).expand(2, 2, 3), ids_of(1, 2),
     ValueError, "overlapping"),
    ("a dtype that does not convert", "x", torch.empty(1, 2, 3, dtype=torch.int64),
     ids_of(1), TypeError, "converts"),
    ("more ids than outs", "x", [torch.empty(1, 2, 3)], [ids_of(1), ids_of(2)],
     ValueError, "expected one tensor of row ids, but got 2"),
    ("fewer ids than outs", "x", [torch.empty(1, 2, 3)] * 3, [ids_of(1), ids_of(2)],
     ValueError, "expected one tensor of row ids, or 3, one for each out, but got 2"),
    ("a scalar", "scalar", torch.empty(1), ids_of(0), ValueError, "dimensions"),
    ("unknown key", "y", torch.empty(1), ids_of(0), KeyError, "init"),
    ("a sparse out of another shape", "x", sparse(9, 2, 3), ids_of(0), ValueError,
     "expected shape"),
    ("two sparse dimensions", "x", sparse(10, 2, 3, dims=2), ids_of(0), ValueError,
     "expected an out with one sparse dimension, but got 2"),
    ("a sparse out of another dtype", "x", sparse(10, 2, 3).int(), ids_of(0), TypeError,
     "converts"),
    ("a compressed out", "x", torch.eye(10).to_sparse_csr(), ids_of(0),
     NotImplementedError, "layout"),
]  # fmt: skip


def content(kv):
    return {key: bits(kv.pull(key).to_dense()) for key in kv.keys()}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
@pytest.mark.parametrize("is_row_sparse", [False, True])
def test_a_refused_call_has_written_nothing(rows, case, is_row_sparse):
    _, key, out, ids, error, message = case
    if is_row_sparse:
        rows.delete("x")
        rows.init("x", VALUE.to_sparse(1))
    before = content(rows)
    good = torch.full((2, 2, 3), -5.0)
    with pytest.raises(error, match=message) as caught:
        rows.row_sparse_pull(["x", key], [good, out], row_ids=[ids_of(0, 1), ids])
    assert "row_sparse_pull" in str(caught.value)
    assert_same(good, torch.full((2, 2, 3), -5.0))
    assert content(rows) == before
    with pytest.raises(error, match=message):
        rows.row_sparse_pull(key, out, row_ids=ids)


def test_a_list_of_keys_needs_a_list_of_ids(rows):
    with pytest.raises(ValueError, match="2 row_ids, one for each key"):
        rows.row_sparse_pull(["x", "half"], row_ids=torch.tensor([1]))
    with pytest.raises(ValueError, match="2 row_ids"):
        rows.row_sparse_pull(["x", "half"], row_ids=[torch.tensor([1])])


def test_without_outs_each_key_has_one_tensor_of_ids(rows):
    with pytest.raises(ValueError, match="expected one tensor of row ids, but got 2"):
        rows.row_sparse_pull("x", row_ids=[torch.tensor([1]), torch.tensor([2])])


def test_a_closed_store(rows):
    rows.close()
    with pytest.raises(RuntimeError, match="closed"):
        rows.row_sparse_pull("x", row_ids=torch.tensor([1]))


def test_in_scripted_functions(rows):
    def lookup(kv: torchkv.KVStore, ids: torch.Tensor, out: torch.Tensor):
        kv.row_sparse_pull("x", out, 0, ids)
        return kv.row_sparse_pull("x", None, 0, ids)

    ids, out = torch.tensor([[3], [8]]), torch.empty(2, 1, 2, 3)
    result = script(lookup)(rows.script_object, ids, out)
    assert_same(result, VALUE[ids])
    assert_same(out, VALUE[ids])


def test_many_random_lookups_equal_indexing(kv):
    torch.manual_seed(0)
    value = torch.randn(1000, 33)
    kv.init(1, value)
    for count in (1, 17, 4000):
        ids = torch.randint(1000, (count,))
        assert_same(kv.row_sparse_pull(1, row_ids=ids), value[ids])


@pytest.mark.cuda
def test_values_ids_and_outs_on_a_gpu():
    with torchkv.create("device") as kv:
        value = torch.arange(60.0, device="cuda").view(10, 6)
        kv.init(3, value)
        ids = torch.tensor([9, 2, 9], device="cuda")
        result = kv.row_sparse_pull(3, row_ids=ids)
        assert result.is_cuda and torch.equal(result, value[ids])
        out = torch.empty(3, 6)
        kv.row_sparse_pull(3, out, row_ids=ids)
        assert torch.equal(out, result.cpu())
        sparse_out = torch.zeros(10, 6, device="cuda").to_sparse(1)
        kv.row_sparse_pull(3, sparse_out, row_ids=ids)
        assert sparse_out.indices()[0].tolist() == [2, 9]
        assert torch.equal(sparse_out.values(), value[[2, 9]])
        out.zero_()
        with pytest.raises(IndexError, match="but got 10 "):
            kv.row_sparse_pull(3, out, row_ids=torch.tensor([0, 10, -1]).cuda())
        assert not out.any()


@pytest.mark.parametrize("is_row_sparse", [True, False])
def test_autograd_sees_that_outs_are_written(is_row_sparse):
    kv = torchkv.create("local")
    value = torch.ones(4, 3)
    kv.init(3, value.to_sparse(1) if is_row_sparse else value)
    ids = torch.tensor([1, 2])
    outs = [torch.zeros(2, 3), torch.zeros(3, 2).t(), torch.zeros(4, 3).to_sparse(1)]
    for out in outs:
        before = out._version
        kv.row_sparse_pull(3, out=out, row_ids=ids)
        assert out._version > before
    before = outs[2]._version
    kv.pull(3, out=outs[2], ignore_sparse=False)
    assert outs[2]._version > before
