"""Pushes of sparse values: their rows, merged by id; what is refused."""

import pytest
import torch

import torchkv
from dtypes import FLOATS
from helpers import assert_same, bits, script, snapshot, stored
from kv_model import OPMATH
from row_values import LARGE, model_sum, numbers, some_rows, sparse
from torchkv import optim

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

SHAPES = [(11,), (7, 3), (5, 64), (4, 2, 3), (9, 1)]


@pytest.fixture
def kv(each_kv):
    return each_kv


def check_assign(kv, values, shape, dtype=torch.float32):
    if 3 not in kv:
        kv.init(3, numbers(shape, dtype))
    kv.push(3, values)
    total, _ = model_sum(values, shape, OPMATH.get(dtype, dtype))
    assert_same(stored(kv, 3), total.to(dtype))


# -- ASSIGN


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_replicas", [1, 2, 4, 11])
def test_assign_replaces_the_whole_value(kv, shape, num_replicas):
    values = [some_rows(shape, 1 + 2 * i) for i in range(num_replicas)]
    check_assign(kv, values, shape)
    check_assign(kv, values[:1], shape)  # rows that are not pushed are zero again


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_half_types_are_summed_in_fp32(kv, dtype):
    check_assign(kv, [some_rows((6, 5), 30, dtype) for _ in range(3)], (6, 5), dtype)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int8, torch.uint8, torch.complex64], ids=str
)
def test_other_dtypes(kv, dtype):
    check_assign(kv, [some_rows((6, 5), 9, dtype) for _ in range(3)], (6, 5), dtype)


def test_mixed_dtypes(kv):
    shape = (6, 5)
    kv.init(3, torch.zeros(shape, dtype=torch.float16))
    values = [
        some_rows(shape, 9, torch.bfloat16),
        numbers(shape, torch.float16),
        some_rows(shape, 9, torch.float32),
    ]
    kv.push(3, values)
    assert_same(stored(kv, 3), model_sum(values, shape, torch.float32)[0].half())


@pytest.mark.parametrize("shape", [(7, 3), LARGE], ids=str)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_mixed_with_dense_replicas(kv, shape, position):
    values = [some_rows(shape, shape[0] // 3) for _ in range(2)]
    values.insert(position, numbers(shape))
    check_assign(kv, values, shape)


def test_a_dense_replica_of_another_layout(kv):
    values = [some_rows((7, 3), 4), numbers((3, 7)).t(), numbers((1, 3)).expand(7, 3)]
    check_assign(kv, values, (7, 3))


def test_rows_in_all_shards(kv):
    values = [some_rows(LARGE, 500, coalesced=i % 2 == 1) for i in range(3)]
    check_assign(kv, values, LARGE)
    check_assign(kv, [some_rows(LARGE, 2), some_rows(LARGE, 0)], LARGE)


def test_many_ids_in_any_order(kv):
    values = [some_rows((100_000, 2), 5000) for _ in range(2)]
    check_assign(kv, values, (100_000, 2))


def test_without_rows(kv):
    check_assign(kv, [some_rows((5, 3), 0)], (5, 3))
    assert stored(kv, 3).count_nonzero() == 0
    kv.init(5, torch.zeros(0, 3))
    kv.push(5, some_rows((0, 3), 0, coalesced=True))
    kv.init(7, torch.zeros(4, 0))
    kv.push(7, [some_rows((4, 0), 2), torch.zeros(4, 0)])
    assert stored(kv, 7).shape == (4, 0)


def test_one_row_a_thousand_times(kv):
    rows = numbers((1000, 5))
    check_assign(kv, [sparse([2] * 1000, rows, (4, 5))] * 2, (4, 5))


# Rows as autograd and slicing may leave them.
ROWS = {
    "expanded": lambda: numbers((1, 4)).expand(6, 4),
    "transposed": lambda: numbers((4, 6)).t(),
    "strided": lambda: numbers((12, 4))[::2],
    "negated view": lambda: torch.complex(numbers((6, 4)), numbers((6, 4))).conj().imag,
    "requires grad": lambda: numbers((6, 4)).requires_grad_(),
}


@pytest.mark.parametrize("rows", ROWS)
def test_layouts_of_rows(kv, rows):
    value = sparse([5, 0, 3, 3, 9, 1], ROWS[rows](), (10, 4)).detach()
    check_assign(kv, [value, value], (10, 4))


def test_sparse_values_are_only_read(kv):
    kv.init(3, torch.zeros(6, 4))
    values = [some_rows((6, 4), 9), some_rows((6, 4), 3, coalesced=True)]
    before = [(bits(v._indices()), bits(v._values())) for v in values]
    kv.push(3, values)
    assert [(bits(v._indices()), bits(v._values())) for v in values] == before
    assert [v.is_coalesced() for v in values] == [False, True]
    for value in values:
        value._values().zero_()
    assert stored(kv, 3).count_nonzero() > 0


def test_repeated_and_several_keys(kv):
    shape = (6, 4)
    kv.init([3, 5, 7], [numbers(shape) for _ in range(3)])
    a, b, c = (some_rows(shape, 5) for _ in range(3))
    dense = numbers(shape)
    kv.push([5, 3, 5, 7], [[a], [b, dense], [c], [dense]])
    assert_same(stored(kv, 5), model_sum([a, c], shape, torch.float32)[0])
    assert_same(stored(kv, 3), model_sum([b, dense], shape, torch.float32)[0])
    assert_same(stored(kv, 7), dense)


def test_pushpull_with_an_out(kv):
    kv.init(3, numbers((6, 4)))
    values, out = [some_rows((6, 4), 5) for _ in range(2)], torch.zeros(6, 4)
    kv.pushpull(3, values, out=out)
    assert_same(out, model_sum(values, (6, 4), torch.float32)[0])


def test_async_push(kv):
    kv.init(3, numbers((6, 4)))
    value = some_rows((6, 4), 5)
    kv.push(3, value, async_op=True).wait()
    assert_same(stored(kv, 3), model_sum([value], (6, 4), torch.float32)[0])


def test_torchscript_api(kv):
    def push(kv: torch.classes.torchkv.KVStore, a: torch.Tensor, b: torch.Tensor):
        kv.push(3, [a, b])

    kv.init(3, numbers((6, 4)))
    values = [some_rows((6, 4), 5), numbers((6, 4))]
    script(push)(kv.script_object, *values)
    assert_same(stored(kv, 3), model_sum(values, (6, 4), torch.float32)[0])


def test_stats_count_the_rows(kv):
    kv.init(3, numbers((6, 4)))
    kv.push(3, [some_rows((6, 4), 2), some_rows((6, 4), 3)])
    assert kv.stats()[3]["bytes_pushed"] == 5 * 4 * 4


# -- errors

SHAPE = (4, 3)
GOOD = ([1, 2], torch.ones(2, 3), SHAPE)

ERRORS = {
    "id too large": (lambda: sparse([0, 4, 9], torch.ones(3, 3), SHAPE), IndexError,
                     r"push: expected row ids from 0 to 3, but got 4 at index 1 \(k"),
    "negative id": (lambda: sparse([1, -1], torch.ones(2, 3), SHAPE), IndexError,
                    "but got -1 at index 1"),
    "two sparse dimensions": (lambda: torch.ones(SHAPE).to_sparse(), ValueError,
                              r"push: expected .*one sparse dimension.* 2.*key 3"),
    "other shape": (lambda: sparse([1], torch.ones(1, 3), (5, 3)), ValueError,
                    r"push: expected shape \[4, 3\], but got \[5, 3\]"),
    "other rows": (lambda: sparse([1], torch.ones(1, 4), (4, 4)), ValueError,
                   r"push: expected shape \[4, 3\]"),
    "complex": (lambda: sparse([1], torch.ones(1, 3, dtype=torch.cfloat), SHAPE),
                TypeError, "complex64"),
    "meta": (lambda: sparse(*GOOD).to("meta"), NotImplementedError, "meta.*key 3"),
    "csr": (lambda: torch.ones(SHAPE).to_sparse_csr(), NotImplementedError,
            "(?i)sparse"),
    "beside a dense meta tensor": (
        lambda: [sparse(*GOOD), torch.ones(SHAPE, device="meta")],
        NotImplementedError, "meta"),
    "an undefined id": (lambda: [sparse(*GOOD), None], TypeError, "NoneType"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("optimizer", [None, "Adam"])
def test_errors_change_nothing(kv, error, optimizer):
    make, kind, message = ERRORS[error]
    kv.init([1, 3], [torch.ones(SHAPE), torch.ones(SHAPE)])
    if optimizer:
        kv.set_optimizer(optim.Adam(lr=0.1))
        kv.push([1, 3], [sparse(*GOOD)] * 2)
    before = snapshot(kv), kv.version(1), kv.version(3)
    for bad in (
        make(),
        [sparse(*GOOD), *(b if isinstance(b := make(), list) else [b])],
    ):
        with pytest.raises(kind, match=message):
            kv.push([1, 3], [sparse(*GOOD), bad])
    assert (snapshot(kv), kv.version(1), kv.version(3)) == before


def test_stored_values_that_are_not_contiguous(kv):
    kv.init(3, torch.ones(3, 4).t())
    with pytest.raises(NotImplementedError, match=r"push: .*contiguous.*\(key 3\)"):
        kv.push(3, sparse(*GOOD))
    assert_same(stored(kv, 3), torch.ones(4, 3))


def test_an_optimizer_on_integers(kv):
    kv.init(3, torch.ones(SHAPE, dtype=torch.int32))
    kv.set_optimizer(optim.SGD(lr=0.1))
    with pytest.raises(TypeError, match="floating-point"):
        kv.push(3, sparse([1], torch.ones(1, 3, dtype=torch.int32), SHAPE))


@pytest.mark.parametrize("call", ["assign", "pushpull"])
def test_other_calls_take_dense_tensors(kv, call):
    kv.init(3, torch.ones(SHAPE))
    value = sparse(*GOOD)
    with pytest.raises(NotImplementedError, match=rf"{call}: expected a dense tensor"):
        {
            "assign": lambda: kv.assign(3, value),
            "pushpull": lambda: kv.pushpull(3, value),
        }[call]()
    assert kv.keys() == [3]
    assert_same(stored(kv, 3), torch.ones(SHAPE))


def test_a_shared_value_as_its_own_rows(kv):
    """Rows that are the stored value itself, in another order, are read first."""
    weight = numbers((6, 4))
    kv.init(3, weight, share=True)
    expected = weight.flip(0)
    kv.push(3, sparse([5, 4, 3, 2, 1, 0], weight, (6, 4)))
    assert_same(weight, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("rule", [None, "sgd", "adam", "lamb"])
def test_values_on_gpus(kv, rule):
    """As on the CPU; fake GPUs test more (tests/cpp/mock_cuda/row_sparse_test.cpp)."""
    other = torchkv.create(kv.type)
    value = numbers((6, 4))
    pushes = [
        [sparse([5, 1, 5, 0], numbers((4, 4)), (6, 4))],
        [sparse([2, 1], numbers((2, 4)), (6, 4)), numbers((6, 4))],
        [sparse(ids, numbers((3, 4)), (6, 4)) for ids in ([4, 1, 4], [1, 0, 4])],
    ]
    for store, device in (kv, "cuda"), (other, "cpu"):
        store.init(3, value.to(device))
        if rule is not None:
            store.set_optimizer(rule, learning_rate=0.5)
        for values in pushes:
            store.push(3, [each.to(device) for each in values])
        with pytest.raises(IndexError, match="but got 6 at index 1"):
            bad = torch.sparse_coo_tensor(
                torch.tensor([[1, 6]]), torch.ones(2, 4), (6, 4), check_invariants=False
            )
            store.push(3, bad.to(device))
    ids = torch.tensor([5, 0, 5])
    rows = kv.row_sparse_pull(3, row_ids=ids.cuda())
    assert rows.is_cuda
    torch.testing.assert_close(rows.cpu(), other.row_sparse_pull(3, row_ids=ids))
    torch.testing.assert_close(stored(kv, 3), stored(other, 3))


@pytest.mark.cuda
def test_lists_on_gpus(kv):
    """Ids of all keys on a device are merged together; key 4 is there twice."""
    shapes = {3: (6, 4), 4: (9, 2), 5: (1, 8)}
    ids = [[5, 1, 5], [8, 0, 3, 8], [0, 0], [7, 3]]
    keys = [3, 4, 5, 4]
    given = [
        sparse(i, numbers((len(i), shapes[k][1])), shapes[k])
        for k, i in zip(keys, ids, strict=True)
    ]
    other = torchkv.create(kv.type)
    for store, device in (kv, "cuda"), (other, "cpu"):
        store.init(
            [*shapes], [torch.ones(shape, device=device) for shape in shapes.values()]
        )
        store.set_optimizer("adam", learning_rate=0.5)
        for _ in range(2):
            store.push(keys, [value.to(device) for value in given])
        before = stored(store, 3)
        bad = [*given[:2], sparse([1], torch.ones(1, 8), (1, 8)), given[3]]
        with pytest.raises(IndexError, match="0 to 0, but got 1 at index 0 .*key 5"):
            store.push(keys, [value.to(device) for value in bad])
        assert_same(stored(store, 3), before)
    for key in shapes:
        torch.testing.assert_close(stored(kv, key), stored(other, key))
