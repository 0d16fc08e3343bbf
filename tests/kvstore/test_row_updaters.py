"""Updaters that take sums of rows as they are: set_updater(..., sparse=True)."""

import contextlib
import copy

import pytest
import torch

import torchkv
from helpers import assert_same, bits, jit_save_load, script
from row_values import (
    check_rows,
    dense_of,
    model_sum,
    numbers,
    row_ids_of,
    some_rows,
    sparse,
)
from torchkv.initializers import Normal

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

SHAPE = (9, 4)


@pytest.fixture
def kv(each_kv):
    return each_kv


def subtract(key, input, stored):
    stored.sub_(input * 2)


class Subtract(torch.nn.Module):
    """Works for dense and sparse stored values."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, key: int, input: torch.Tensor, stored: torch.Tensor):
        self.calls += 1
        if input.is_sparse:
            stored.sub_(input * 2)
        else:
            stored.sub_(input, alpha=2.0)


UPDATERS = {
    "python": lambda: subtract,
    "method": lambda: Subtract().forward,
    "script": lambda: script(Subtract()),
}


class Recorder:
    """Copies of what an updater got."""

    def __init__(self, update=lambda input, stored: None):
        self.calls = []
        self.update = update

    def __call__(self, key, input, stored):
        self.calls.append((key, input.clone(), stored.clone()))
        self.update(input, stored)


@pytest.mark.parametrize("name", UPDATERS)
def test_a_row_sparse_key_gets_what_the_updater_writes(kv, name):
    kv.init_rows(3, (4,), num_rows=9)
    kv.set_updater(UPDATERS[name](), sparse=True)
    expected, has = torch.zeros(SHAPE), torch.zeros(9, dtype=torch.bool)
    for count in (3, 5, 1):
        values = [some_rows(SHAPE, count), some_rows(SHAPE, 2)]
        total, pushed = model_sum(values, SHAPE, torch.float32)
        kv.push(3, values)
        expected[pushed] -= total[pushed] * 2
        has |= pushed
        check_rows(kv, expected, has.nonzero().flatten().tolist())
    assert kv.version(3) == 3 and kv.stats()[3]["pushes"] == 3


@pytest.mark.parametrize("name", UPDATERS)
def test_a_dense_key_gets_sparse_sums(kv, name):
    before = numbers(SHAPE)
    kv.init(3, before)
    kv.set_updater(UPDATERS[name](), sparse=True)
    values = [some_rows(SHAPE, 5), some_rows(SHAPE, 2)]
    kv.push(3, values)
    total, _ = model_sum(values, SHAPE, torch.float32)
    assert_same(kv.pull(3), before - total * 2)


def test_what_the_updater_gets(kv):
    kv.init_rows("rows", (4,), torch.float16, num_rows=9, init=Normal(seed=2))
    kv.init("dense", torch.ones(SHAPE))
    initial = kv.row_sparse_pull("rows", row_ids=torch.tensor([2, 7]))
    recorder = Recorder()
    kv.set_updater(recorder, sparse=True)
    value = sparse([7, 2, 7], torch.ones(3, 4, dtype=torch.float16), SHAPE)
    kv.push(["rows", "dense"], [value, [value.float(), value.float()]])
    (key, input, stored), (other, of_dense, whole) = recorder.calls
    assert (key, other) == ("rows", "dense")
    for tensor, rows in (
        (input, torch.tensor([[1.0] * 4, [2.0] * 4], dtype=torch.float16)),
        (stored, initial),
        (of_dense, torch.tensor([[2.0] * 4, [4.0] * 4])),
    ):
        assert tensor.is_sparse and tensor.is_coalesced() and tensor.shape == SHAPE
        assert tensor.indices().tolist() == [[2, 7]]
        assert_same(tensor.values(), rows)
    assert_same(whole, torch.ones(SHAPE))
    assert row_ids_of(kv, "rows") == [2, 7]  # they have been pushed


def test_mixed_and_dense_values(kv):
    """A dense key then gets a dense sum; a row-sparse one all rows."""
    kv.init_rows(3, (4,), num_rows=9)
    kv.init(5, torch.zeros(SHAPE))
    recorder = Recorder()
    kv.set_updater(recorder, sparse=True)
    values = [some_rows(SHAPE, 3), numbers(SHAPE)]
    total, _ = model_sum(values, SHAPE, torch.float32)
    kv.push([3, 5], [values, values])
    kv.push(5, values[1])
    (_, rows, _), (_, whole, _), (_, again, _) = recorder.calls
    assert rows.is_sparse and rows.indices()[0].tolist() == [*range(9)]
    assert_same(rows.to_dense(), total)
    assert_same(whole, total)
    assert_same(again, values[1])


def test_without_sparse_a_dense_key_gets_a_dense_sum(kv):
    kv.init(3, torch.zeros(SHAPE))
    recorder = Recorder()
    kv.set_updater(recorder)
    kv.push(3, some_rows(SHAPE, 3))
    assert not recorder.calls[0][1].is_sparse


def test_pushes_without_rows(kv):
    kv.init_rows(3, (4,), num_rows=9)
    kv.init(5, torch.ones(SHAPE))
    kv.set_updater(subtract, sparse=True)
    kv.push([3, 5], [some_rows(SHAPE, 0), [some_rows(SHAPE, 0)] * 2])
    assert kv.num_rows(3) == 0
    assert_same(kv.pull(5), torch.ones(SHAPE))


def test_unlimited_rows(kv):
    kv.init_rows(3, (4,))
    kv.set_updater(lambda key, input, stored: stored.add_(input), sparse=True)
    far = 2**60
    kv.push(3, sparse([far, 1], torch.ones(2, 4), (far + 1, 4)))
    assert row_ids_of(kv) == [1, far]
    assert kv.pull(3).values().sum() == 8


WRITES = {
    "values": lambda input, stored: stored.values().fill_(7),
    "values returned": lambda input, stored: stored.values().fill_(7).add_(0),
    "copy_": lambda input, stored: stored.copy_(input * 0 + stored * 0).values(),
    "other rows": lambda input, stored: stored.add_(
        sparse([0, 0], torch.ones(2, 4), SHAPE)
    ),
}


@pytest.mark.parametrize("how", WRITES)
def test_ways_to_write(kv, how):
    kv.init(3, sparse([2, 5], torch.ones(2, 4), SHAPE))
    kv.set_updater(lambda key, i, s: WRITES[how](i, s), sparse=True)
    kv.push(3, sparse([5, 6], torch.ones(2, 4), SHAPE))
    expected = torch.zeros(SHAPE)
    expected[2] = 1
    if how.startswith("values"):
        expected[[5, 6]] = 7
    elif how == "other rows":
        expected[5], expected[0] = 1, 2
    rows = [0, 2, 5, 6] if how == "other rows" else [2, 5, 6]
    check_rows(kv, expected, rows)


def test_tensors_that_an_updater_keeps(kv):
    kept = []
    kv.init_rows(3, (4,), num_rows=9)
    kv.init(5, torch.zeros(SHAPE))
    kv.set_updater(lambda key, i, s: kept.extend([i, s.add_(i)]), sparse=True)
    value = sparse([5, 6], torch.ones(2, 4), SHAPE)
    kv.push([3, 5], [value, value])
    for tensor in kept:
        (tensor.values() if tensor.is_sparse else tensor).fill_(9)
    assert dense_of(kv).sum() == kv.pull(5).sum() == 8
    kv.push([3, 5], [value, value])
    assert dense_of(kv).sum() == kv.pull(5).sum() == 16


def test_an_updater_that_raises(kv):
    def fail(input, stored):
        stored.values().fill_(7)
        raise KeyError("mine")

    kv.init([3, 5], [sparse([1], torch.ones(1, 4), SHAPE), torch.ones(SHAPE)])
    kv.set_updater(Recorder(fail), sparse=True)
    with pytest.raises(KeyError, match="mine"):
        kv.push([3, 5], [sparse([2], torch.ones(1, 4), SHAPE), torch.ones(SHAPE)])
    expected = torch.zeros(SHAPE)
    expected[1], expected[2] = 1, 7  # what it has written stays
    check_rows(kv, expected, [1, 2])
    assert_same(kv.pull(5), torch.ones(SHAPE))
    assert kv.version(3) == 0


def resize(input, stored):
    stored.sparse_resize_((20, 4), 1, 1).add_(sparse([15], torch.ones(1, 4), (20, 4)))


def resize_and_raise(input, stored):
    resize(input, stored)
    raise RuntimeError("push: replaced (key 3)")


@pytest.mark.parametrize(
    ("update", "kind", "message"),
    [
        (lambda input, stored: stored + input, TypeError, "returned a new tensor"),
        (resize, RuntimeError, "replaced"),
        (resize_and_raise, RuntimeError, "replaced"),
    ],
)
def test_what_an_updater_must_not_do(kv, update, kind, message):
    kv.init(3, sparse([1], torch.ones(1, 4), SHAPE))
    before = bits(dense_of(kv))
    kv.set_updater(lambda key, i, s: update(i, s), sparse=True)
    with pytest.raises(kind, match=rf"push: .*{message}.*\(key 3\)"):
        kv.push(3, sparse([1], torch.ones(1, 4), SHAPE))
    assert bits(dense_of(kv)) == before


def test_calling_the_store(kv):
    kv.init_rows(3, (4,), num_rows=9)
    kv.set_updater(lambda key, i, s: kv.pull(3), sparse=True)
    with pytest.raises(RuntimeError, match="inside its own updater"):
        kv.push(3, sparse([1], torch.ones(1, 4), SHAPE))


@pytest.mark.parametrize("sparse_flag", [None, 1, "yes"])
def test_the_argument_is_a_bool(kv, sparse_flag):
    with pytest.raises(TypeError, match="^set_updater: .* as sparse"):
        kv.set_updater(subtract, sparse=sparse_flag)


COPIES = {
    "deepcopy": lambda kv, path: copy.deepcopy(kv),
    "folder": lambda kv, path: (kv.save(path), torchkv.load(path))[1],
    "state_dict": lambda kv, path: loaded(kv.state_dict()),
    "TorchScript": lambda kv, path: by_torchscript(kv),
}


def loaded(state):
    kv = torchkv.create()
    kv.load_state_dict(state)
    return kv


def by_torchscript(kv):
    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.kv = kv.script_object

        def forward(self):
            return len(self.kv)

    return torchkv.KVStore.from_script_object(jit_save_load(script(Holder())).kv)


@pytest.mark.parametrize("takes_rows", [True, False])
@pytest.mark.parametrize("how", COPIES)
def test_saved_with_the_store(how, takes_rows, tmp_path):
    kv = torchkv.create()
    kv.init_rows(3, (4,), num_rows=9)
    kv.set_updater(script(Subtract()), sparse=takes_rows)
    other = COPIES[how](kv, tmp_path / "saved")
    value = sparse([1], torch.ones(1, 4), SHAPE)
    if takes_rows:
        other.push(3, value)
        assert dense_of(other).sum() == -8
    else:
        with pytest.raises(NotImplementedError, match="sparse=True"):
            other.push(3, value)


def test_set_inside_torchscript():
    class Holder(torch.nn.Module):
        def __init__(self, kv):
            super().__init__()
            self.kv = kv.script_object
            self.updater = Subtract()

        def forward(self, value: torch.Tensor):
            self.kv.set_updater(self.updater, sparse=True)
            self.kv.push(3, value)
            return self.updater.calls

    kv = torchkv.create("local")
    kv.init_rows(3, (4,), num_rows=9)
    calls = script(Holder(kv))(sparse([1], torch.ones(1, 4), SHAPE))
    assert calls == 1 and dense_of(kv).sum() == -8


def zero_and_raise(key, input, stored):
    stored.zero_()
    raise RuntimeError("afterwards")


@pytest.mark.parametrize(
    "updater, last",
    [
        (lambda key, i, s: s.zero_(), 0.0),
        (lambda key, i, s: s.copy_(sparse([4], torch.full((1, 4), 7.0), SHAPE)), 7.0),
        (zero_and_raise, 0.0),
    ],
    ids=["zero_", "copy_", "raises"],
)
def test_pushed_rows_that_an_updater_drops_become_zero(kv, updater, last):
    kv.init(3, sparse([1, 2, 4], torch.full((3, 4), 5.0), SHAPE))
    kv.set_updater(updater, sparse=True)
    raises = updater is zero_and_raise
    with pytest.raises(RuntimeError) if raises else contextlib.nullcontext():
        kv.push(3, sparse([1, 4, 6], torch.ones(3, 4), SHAPE))
    assert dense_of(kv)[1:7, 0].tolist() == [0.0, 5.0, 0.0, last, 0.0, 0.0]
    assert row_ids_of(kv) == [1, 2, 4, 6]


@pytest.mark.parametrize("row", [-5, 99])
def test_rows_that_the_key_cannot_have(kv, row):
    kv.init(3, sparse([1], torch.ones(1, 4), SHAPE))
    before = bits(dense_of(kv))
    kv.set_updater(
        lambda key, i, s: s.copy_(sparse([row], torch.ones(1, 4), SHAPE)), sparse=True
    )
    with pytest.raises(IndexError, match=rf"^push: .* it wrote row {row} \(key 3\)"):
        kv.push(3, sparse([1], torch.ones(1, 4), SHAPE))
    assert bits(dense_of(kv)) == before and row_ids_of(kv) == [1]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn, torch.bool])
def test_dtypes_that_torch_cannot_index(kv, dtype):
    kv.init_rows(3, (4,), dtype, num_rows=9)
    kv.set_updater(lambda key, i, s: s.values().copy_(i.values()), sparse=True)
    kv.push(3, sparse([2, 5], torch.ones(2, 4).to(dtype), SHAPE))
    rows = kv.row_sparse_pull(3, row_ids=torch.tensor([5, 0]))
    assert rows.float().tolist() == [[1.0] * 4, [0.0] * 4]
