"""Row-sparse keys: init, pushes and pulls."""

import pytest
import torch

import torchkv
from dtypes import FLOATS
from helpers import assert_same, bits
from kv_model import OPMATH
from row_values import (
    ROW_OPTIMIZERS,
    check_rows,
    dense_of,
    model_sum,
    numbers,
    row_ids_of,
    some_rows,
    sparse,
)
from torchkv import optim

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

SHAPES = [(11,), (7, 3), (50, 64), (40, 2, 3), (9, 1), (6, 0)]


@pytest.fixture
def kv(each_kv):
    return each_kv


# -- init


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_init_with_a_sparse_tensor(kv, shape):
    value = some_rows(shape, 4)
    kv.init([1, 3], [torch.ones(2), value])
    expected, has = model_sum([value], shape, torch.float32)
    check_rows(kv, expected, has.nonzero().flatten().tolist())
    assert kv.shape(3) == shape and kv.version(3) == 0


def test_init_keeps_a_copy(kv):
    value = sparse([2, 5], torch.ones(2, 3), (7, 3))
    kv.init(3, value)
    value._values().zero_()
    value._indices().zero_()
    assert row_ids_of(kv) == [2, 5] and dense_of(kv).sum() == 6


def test_init_rows(kv):
    kv.init_rows(3, (4,), num_rows=10)
    check_rows(kv, torch.zeros(10, 4), [])
    kv.init_rows(5, (), dtype=torch.int64, num_rows=3)
    kv.push(5, sparse([2], torch.tensor([7]), (3,)))
    assert_same(kv.row_sparse_pull(5, row_ids=torch.tensor(2)), torch.tensor(7))
    assert kv.dtype(5) is torch.int64 and kv.shape(5) == (3,)


def test_broadcast(kv):
    outs = [torch.ones(5, 3), torch.ones(5, 3, dtype=torch.float64)]
    kv.broadcast(3, sparse([4], torch.ones(1, 3), (5, 3)), outs)
    expected = torch.zeros(5, 3)
    expected[4] = 1
    assert_same(outs[0], expected)
    assert_same(outs[1], expected.double())


# -- push


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_replicas", [1, 2, 4, 11])
def test_assign_replaces_the_whole_value(kv, shape, num_replicas):
    kv.init(3, some_rows(shape, 5))
    for count in (num_replicas, 1):
        values = [some_rows(shape, 1 + 2 * i) for i in range(count)]
        kv.push(3, values)
        total, has = model_sum(values, shape, torch.float32)
        check_rows(kv, total, has.nonzero().flatten().tolist())


def test_dense_values_have_all_rows(kv):
    kv.init_rows(3, (4,), num_rows=6)
    values = [numbers((6, 4)), some_rows((6, 4), 3), numbers((4, 6)).t()]
    kv.push(3, values)
    check_rows(kv, model_sum(values, (6, 4), torch.float32)[0], range(6))


def test_pushes_without_rows(kv):
    kv.init(3, some_rows((6, 4), 3))
    kv.push(3, some_rows((6, 4), 0))
    check_rows(kv, torch.zeros(6, 4), [])
    kv.set_optimizer(optim.Adam(lr=0.1))
    kv.push(3, some_rows((6, 4), 0))
    check_rows(kv, torch.zeros(6, 4), [])
    assert kv.version(3) == 2


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64], ids=str)
@pytest.mark.parametrize("name", ROW_OPTIMIZERS)
def test_optimizers_do_as_for_a_dense_key(kv, name, dtype):
    """The same pushes give the bits of a dense key that begins with zeros."""
    if dtype.is_complex and name in ("Lion", "MXNet's Ftrl", "clip_value"):
        pytest.skip("not defined for complex numbers")
    shape = (40, 5)
    kv.init_rows(3, shape[1:], dtype, num_rows=shape[0])
    kv.init(5, torch.zeros(shape, dtype=dtype))
    kv.set_optimizer(ROW_OPTIMIZERS[name]())
    pushed = torch.zeros(shape[0], dtype=torch.bool)
    for step in range(6):
        values = [some_rows(shape, 2 + step, dtype) for _ in range(1 + step % 3)]
        pushed |= model_sum(values, shape, OPMATH.get(dtype, dtype))[1]
        kv.push([3, 5], [values, values])
        check_rows(kv, kv.pull(5), pushed.nonzero().flatten().tolist())
    sparse_state, dense_state = dict(kv.optimizer.state[3]), kv.optimizer.state[5]
    assert_same(sparse_state.pop("row_ids"), pushed.nonzero().flatten())
    assert sparse_state.keys() == dense_state.keys()
    for which, state in sparse_state.items():
        if isinstance(state, torch.Tensor):
            assert_same(state, dense_state[which][pushed])
        else:
            assert state == dense_state[which]


@pytest.mark.parametrize("name", ["momentum", "Adam"])
def test_without_lazy_all_rows_step(kv, name):
    shape = (20, 5)
    kv.init_rows(3, shape[1:], num_rows=shape[0])
    kv.init(5, torch.zeros(shape))
    kv.set_optimizer(ROW_OPTIMIZERS[name](lazy=False))
    for _ in range(4):
        value = some_rows(shape, 3)
        kv.push([3, 5], [value, value])
        assert_same(dense_of(kv), kv.pull(5))


def test_clipping_by_norm(kv):
    shape = (40, 5)
    kv.init_rows(3, shape[1:], num_rows=shape[0])
    kv.init(5, torch.zeros(shape))
    for key in (3, 5):
        kv.set_optimizer(optim.SGD(lr=1.0, max_norm=0.5))
        value = sparse([7, 2, 7, 39], torch.arange(20.0).view(4, 5), shape)
        kv.push(key, value)
        expected = model_sum([value], shape, torch.float64)[0].norm().item()
        assert kv.optimizer.grad_norm == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(dense_of(kv), kv.pull(5))


def test_a_skipped_step_changes_no_row(kv):
    kv.init(3, sparse([1], torch.ones(1, 3), (4, 3)))
    kv.set_optimizer(optim.SGD(lr=1.0, skip_nonfinite=True))
    kv.push(3, sparse([1, 2], torch.full((2, 3), torch.inf), (4, 3)))
    assert kv.optimizer.num_skipped == 1
    assert_same(dense_of(kv), sparse([1], torch.ones(1, 3), (4, 3)).to_dense())


def test_repeated_keys_and_key_lists(kv):
    shape = (6, 4)
    kv.init_rows(3, (4,), num_rows=6)
    kv.init(5, numbers(shape))
    a, b, c = some_rows(shape, 3), some_rows(shape, 2), numbers(shape)
    kv.push([3, 5, 3], [a, [c, b], b])
    total, has = model_sum([a, b], shape, torch.float32)
    check_rows(kv, total, has.nonzero().flatten().tolist())
    assert_same(kv.pull(5), model_sum([c, b], shape, torch.float32)[0])


def test_pushpull_and_async(kv):
    kv.init_rows(3, (4,), num_rows=6)
    value, out = some_rows((6, 4), 3), torch.ones(6, 4)
    kv.pushpull(3, value, out=out)
    expected = model_sum([value], (6, 4), torch.float32)[0]
    assert_same(out, expected)
    kv.push(3, value, async_op=True).wait()
    kv.pull(3, out=out.zero_(), async_op=True).wait()
    assert_same(out, expected)


def test_rows_that_assign_adds_begin_with_the_optimizers_state(kv):
    kv.init_rows(3, (1,), num_rows=6)
    kv.set_optimizer(optim.Adagrad(lr=0.1, initial_accumulator_value=3))
    kv.push(3, sparse([1], torch.ones(1, 1), (6, 1)))
    kv.assign(3, sparse([1, 5], torch.ones(2, 1), (6, 1)))
    kv.push(3, sparse([5], torch.ones(1, 1), (6, 1)))
    state = kv.optimizer.state_dict()["state"][3]
    sums = dict(zip(state["row_ids"].tolist(), state["sum"].flatten(), strict=True))
    assert sums == {1: 4, 5: 4}


def test_another_optimizer_starts_without_state(kv):
    kv.init_rows(3, (4,), num_rows=6)
    kv.set_optimizer(optim.Adam(lr=0.1))
    kv.push(3, sparse([1, 4], torch.ones(2, 4), (6, 4)))
    kv.set_optimizer(optim.SGD(lr=1.0, momentum=0.9))
    before = dense_of(kv)
    kv.push(3, sparse([4, 5], torch.ones(2, 4), (6, 4)))
    before[[4, 5]] -= 1
    assert_same(dense_of(kv), before)
    kv.set_updater(None)
    kv.push(3, sparse([2], torch.ones(1, 4), (6, 4)))
    assert row_ids_of(kv) == [2]


def test_compression_passes_rows(request, monkeypatch):
    with torchkv.create("device") as kv:
        kv.set_gradient_compression({"type": "2bit", "threshold": 100.0})
        kv.init_rows(3, (4,), num_rows=6)
        values = [some_rows((6, 4), 3), numbers((6, 4))]
        kv.push(3, values)
        assert_same(dense_of(kv), model_sum(values, (6, 4), torch.float32)[0])


# -- tables of unlimited and of many rows


def test_unlimited_rows(kv):
    kv.init_rows(3, (16,), init=None)
    assert kv.shape(3) == ((2**63 - 1) // 16, 16)
    assert kv.pull(3).shape == (0, 16)
    kv.set_optimizer(optim.SGD(lr=1.0))
    far = 2**58
    kv.push(3, [sparse([far, 1], torch.ones(2, 16), (far + 1, 16)),
                sparse([1], torch.ones(1, 16), (2, 16))])  # fmt: skip
    assert row_ids_of(kv) == [1, far] and kv.pull(3).shape == (far + 1, 16)
    rows = kv.row_sparse_pull(3, row_ids=torch.tensor([far, 0, 1]))
    assert rows[:, 0].tolist() == [-1, 0, -2]
    out = sparse([], torch.ones(0, 16), (far + 2, 16))
    kv.row_sparse_pull(3, out=out, row_ids=torch.tensor([[1, far], [1, 0]]))
    assert out.indices()[0].tolist() == [0, 1, far]
    assert kv.num_rows(3) == 2  # a lookup makes no rows


def test_a_billion_rows(kv):
    kv.init_rows(3, (16,), num_rows=10**9)
    kv.set_optimizer(optim.Adagrad(lr=1.0))
    ids = torch.randperm(1_000_000) * 997
    rows = torch.ones(len(ids), 16)
    kv.push(3, torch.sparse_coo_tensor(ids[None], rows, (10**9, 16)))
    assert kv.num_rows(3) == len(ids)
    rows = kv.row_sparse_pull(3, row_ids=torch.stack([ids[:5], ids[:5] + 1]))
    torch.testing.assert_close(rows[0], torch.full((5, 16), -1.0))
    assert rows[1].count_nonzero() == 0
    assert "61.0 MiB" in str(kv)


def test_many_pushes_of_new_rows(kv):
    """Memory grows many times, with what the optimizer keeps."""
    shape = (50_000, 3)
    kv.init_rows(3, (3,), torch.bfloat16, num_rows=shape[0])
    kv.init(5, torch.zeros(shape, dtype=torch.bfloat16))
    kv.set_optimizer(optim.Adam(lr=0.1))
    for _ in range(40):
        value = some_rows(shape, 2000, torch.bfloat16)
        kv.push([3, 5], [value, value])
    out = torch.ones(shape, dtype=torch.bfloat16)
    kv.pull(3, out=out)
    assert_same(out, kv.pull(5))


# -- pull


def test_pull_into_outs(kv):
    kv.init(3, sparse([1, 3], torch.ones(2, 2, 3), (5, 2, 3)))
    expected = dense_of(kv)
    outs = [
        torch.full((5, 2, 3), 9.0),
        torch.full((5, 2, 3), 9, dtype=torch.complex64),
        torch.full((3, 5, 2), 9.0).permute(1, 2, 0),
        torch.full((5, 2, 3), 9.0, requires_grad=True),
    ]
    versions = [out._version for out in outs]
    kv.pull(3, out=outs)
    for out, version in zip(outs, versions, strict=True):
        assert_same(out.detach(), expected.to(out.dtype))
        assert out._version > version


def test_outs_of_several_keys_in_one_memory(kv):
    """The last key counts, whatever its kind."""
    kv.init([3, 5, 7], [sparse([0], torch.ones(1, 2), (4, 2)),
                        torch.full((4, 2), 5.0),
                        sparse([1], torch.ones(1, 2), (4, 2))])  # fmt: skip
    out = torch.zeros(4, 2)
    for keys in ([3, 5, 7], [7, 3, 5], [5, 7, 3]):
        kv.pull(keys, out=[out] * 3)
        last = kv.pull(keys[-1])
        assert_same(out, last.to_dense() if last.is_sparse else last)


@pytest.mark.parametrize("of", ["row-sparse", "dense"])
def test_sparse_outs(kv, of):
    value = sparse([1, 3], torch.ones(2, 3), (5, 3))
    kv.init([3, 5], [value if of == "row-sparse" else value.to_dense(), torch.ones(2)])
    out, other = sparse([0], torch.ones(1, 3), (5, 3)), torch.zeros(2)
    kv.pull([3, 5], out=[out, other])  # which ignores it
    assert out._indices().tolist() == [[0]] and other.sum() == 2
    kv.pull(3, out=out)
    kv.pull(3, out=out, async_op=True).wait()
    assert out._indices().tolist() == [[0]]
    with pytest.raises(KeyError):
        kv.pull(7, out=out)
    wide = torch.full((5, 3), 9.0)
    kv.pull([3, 5], out=[[out, wide], other.zero_()], ignore_sparse=False)
    assert out.is_coalesced() and other.sum() == 2
    assert out.indices()[0].tolist() == ([1, 3] if of == "row-sparse" else [*range(5)])
    assert_same(out.to_dense(), value.to_dense())
    assert_same(wide, value.to_dense())


def test_sparse_outs_that_do_not_fit(kv):
    kv.init([3, 5, 7], [sparse([1], torch.ones(1, 3), (5, 3)), torch.ones(()),
                        torch.ones(2)])  # fmt: skip
    kv.init_rows(9, (3,))
    kv.push(9, sparse([6], torch.ones(1, 3), (7, 3)))
    seven = torch.zeros(2)
    for key, out, message in [
        (3, sparse([1], torch.ones(1, 3), (6, 3)), "expected shape"),
        (3, torch.ones(5, 3).to_sparse(), "one sparse dimension, but got 2"),
        (5, torch.ones(()).to_sparse(), "without dimensions"),
        (9, sparse([1], torch.ones(1, 3), (6, 3)), "with rows up to 6"),
        (9, sparse([1], torch.ones(1, 4), (6, 4)), r"rows of shape \[3\]"),
    ]:
        before = bits(out.to_dense())
        with pytest.raises(ValueError, match=rf"^pull: .*{message}.*\(key {key}\)"):
            kv.pull(key, out=out, ignore_sparse=False)
        assert bits(out.to_dense()) == before
    with pytest.raises(TypeError, match=r"float32 converts to, .*int64"):
        kv.pull([7, 3], out=[seven, sparse([1], torch.ones(1, 3).long(), (5, 3))],
                ignore_sparse=False)  # fmt: skip
    assert seven.sum() == 0
    kv.init(11, sparse([1], torch.ones(1, 3), (5, 3)))
    empty = [sparse([], torch.empty(0, 3), (5, 3)) for _ in range(2)]
    with pytest.raises(ValueError, match=r"with rows up to 6.*\(key 9\)"):
        kv.pull([11, 9], out=empty, ignore_sparse=False)
    assert empty[0]._nnz() == 0
    if not kv.type.startswith("dist"):  # whose servers have been asked
        assert kv.stats()[11]["pulls"] == 0


def test_stats_and_repr(kv):
    kv.init(3, sparse([1], torch.ones(1, 4), (5, 4)))
    kv.push(3, some_rows((5, 4), 2, coalesced=True))
    kv.pull(3)
    stats = kv.stats()[3]
    assert (stats["pushes"], stats["pulls"]) == (1, 1)
    assert stats["bytes_pushed"] == stats["bytes_pulled"] == 2 * 4 * 4
    assert "bytes=32)" in repr(kv) and "2 x 4" in str(kv)
