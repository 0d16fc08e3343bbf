"""Row-sparse keys whose rows are deleted or replaced; random operations."""

import pytest
import torch

import torchkv
from helpers import assert_same, script
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
from torchkv import initializers, optim

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


@pytest.fixture
def kv(each_kv):
    return each_kv


@pytest.mark.parametrize("name", ["momentum", "Adam", "Adagrad", "accumulate"])
def test_deleted_rows_start_anew(kv, name):
    shape = (30, 4)
    kv.init_rows(3, (4,), torch.float16, num_rows=30)
    kv.init_rows(5, (4,), torch.float16, num_rows=30)
    kv.set_optimizer(ROW_OPTIMIZERS[name]())
    first = some_rows(shape, 12, torch.float16, coalesced=True)
    kv.push([3, 5], [first, first])
    gone = first.indices()[0][torch.randperm(12)[:5]]
    kv.delete(3, row_ids=torch.cat([gone, gone[:2], torch.arange(3)]).int())
    left = {*first.indices()[0].tolist()} - {*gone.tolist(), 0, 1, 2}
    assert {*row_ids_of(kv)} == left
    assert kv.num_rows(5) == 12
    # Rows that stay go on as before.
    kept = torch.tensor(sorted(left))
    assert_same(dense_of(kv)[kept], dense_of(kv, 5)[kept])
    again = sparse([*gone, *kept], numbers((len(gone) + len(kept), 4)).half(), shape)
    kv.push([3, 5], [again, again])
    assert_same(dense_of(kv)[kept], dense_of(kv, 5)[kept])
    for name, state in kv.optimizer.state[3].items():
        if isinstance(state, torch.Tensor) and name != "row_ids":
            assert state.shape == (kv.num_rows(3), 4)


def test_all_rows_can_be_deleted_and_memory_is_freed(kv):
    kv.init_rows(3, (64,), num_rows=100_000)
    value = torch.sparse_coo_tensor(
        torch.arange(50_000)[None], torch.ones(50_000, 64), (100_000, 64)
    )
    kv.push(3, value)
    kv.delete([3], row_ids=[torch.arange(100_000)])
    assert kv.num_rows(3) == 0 and "bytes=0)" in repr(kv)
    kv.push(3, value)
    assert kv.pull(3).values().sum() == 50_000 * 64


def test_delete_the_key(kv):
    kv.init_rows(3, (4,), num_rows=10)
    kv.delete(3)
    assert kv.keys() == []
    kv.init(3, torch.ones(2))
    assert kv.pull(3).sum() == 2


def test_assign(kv):
    kv.init([3, 5], [some_rows((6, 4), 3), torch.ones(2)])
    kv.set_optimizer(optim.Adam(lr=0.1))
    kv.push(3, sparse([1, 2], torch.ones(2, 4), (6, 4)))
    state = kv.optimizer.state[3]["exp_avg"]
    slot = row_ids_of(kv).index(2)
    kv.assign([3, 5], [sparse([2, 5], torch.full((2, 4), 7.0), (6, 4)), torch.zeros(2)])
    expected = torch.zeros(6, 4)
    expected[[2, 5]] = 7
    check_rows(kv, expected, [2, 5])
    assert kv.pull(5).sum() == 0 and kv.version(3) == 2
    after = kv.optimizer.state[3]["exp_avg"]
    assert_same(after[0], state[slot])  # row 2 keeps what the optimizer has of it
    assert after[1].count_nonzero() == 0
    kv.assign(3, torch.ones(6, 4))
    check_rows(kv, torch.ones(6, 4), range(6))


# -- the random operations


@pytest.mark.parametrize("seed", range(12))
def test_random_operations(seed):
    """Against a dict of rows."""
    torch.manual_seed(seed)
    num_rows, size = 30, 3
    init = initializers.Uniform(-1, 1, seed=seed) if seed % 2 else None
    kv = torchkv.create("device" if seed % 3 else "local")
    kv.init_rows(3, (size,), num_rows=num_rows, init=init)
    initial = kv.row_sparse_pull(3, row_ids=torch.arange(num_rows))
    lr, momentum = 0.5, 0.75  # exact in binary
    rows, state, stepping = {}, {}, False

    def pushed(values):
        total, has = model_sum(values, (num_rows, size), torch.float32)
        for row in has.nonzero().flatten().tolist():
            yield row, total[row]

    for _ in range(60):
        operation = int(torch.randint(8, ()))
        values = [some_rows((num_rows, size), int(torch.randint(5, ())))
                  for _ in range(1 + int(torch.randint(3, ())))]  # fmt: skip
        if operation <= 2:
            kv.push(3, values)
            if not stepping:
                rows, state = {}, {}
            for row, total in pushed(values):
                if stepping:
                    zero = torch.zeros(size)
                    state[row] = momentum * state.get(row, zero) + total
                    rows[row] = rows.get(row, initial[row]) - lr * state[row]
                else:
                    rows[row] = total
        elif operation == 3:
            ids = torch.randint(num_rows, (4,))
            kv.delete(3, row_ids=ids)
            for row in ids.tolist():
                rows.pop(row, None)
                state.pop(row, None)
        elif operation == 4:
            stepping, state = not stepping, {}
            kv.set_optimizer(optim.SGD(lr=lr, momentum=momentum)) if stepping else (
                kv.set_updater(None)
            )
        elif operation == 5:
            kv.assign(3, values[0])
            rows = dict(pushed(values[:1]))
            state = {row: state[row] for row in state if row in rows}
        elif operation == 6:
            saved, type = kv.state_dict(), kv.type
            kv = torchkv.create(type)
            kv.load_state_dict(saved)
        else:
            ids = torch.randint(num_rows, (3, 2), dtype=torch.int32)
            found = kv.row_sparse_pull(3, row_ids=ids)
            for row, value in zip(
                ids.flatten().tolist(), found.view(-1, size), strict=True
            ):
                assert_same(value, rows.get(row, initial[row]))
        assert row_ids_of(kv) == sorted(rows)
        expected = initial.clone()
        for row, value in rows.items():
            expected[row] = value
        out = torch.empty(num_rows, size)
        kv.pull(3, out=out)
        assert_same(out, expected)


# -- the TorchScript API


def test_torchscript_api():
    def use(kv: torch.classes.torchkv.KVStore, value: torch.Tensor):
        kv.init_rows("a", [3], num_rows=5)
        kv.init_rows(
            "b", [3], torch.float64, init="uniform", numbers={"low": 1.0, "high": 1.0}
        )
        kv.push("a", value)
        kv.delete("a", row_ids=torch.tensor([4]))
        ids = torch.tensor([1, 4])
        return (
            kv.row_sparse_pull("a", row_ids=ids),
            kv.row_sparse_pull("b", row_ids=ids),
            kv.num_rows("a"),
        )

    store = torchkv.create("local")
    value = sparse([1, 4], torch.ones(2, 3), (5, 3))
    a, b, count = script(use)(store.script_object, value)
    assert_same(a, torch.tensor([[1.0] * 3, [0.0] * 3]))
    assert_same(b, torch.ones(2, 3, dtype=torch.float64))
    assert count == store.num_rows("a") == 1
