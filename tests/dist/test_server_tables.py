"""Row-sparse keys in stores of several processes: each server has some of the rows."""

import os

import pytest
import torch

import ranks
import torchkv
from counted import counted
from dtypes import FLOAT8S, FLOATS
from helpers import assert_same
from ranks import outcome
from row_values import ROW_OPTIMIZERS, numbers, row_ids_of, some_rows, sparse
from server_tables import FAR, INIT, SHAPE, check_same
from torchkv import initializers, optim

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

TYPES = ["dist_sync", "dist_async"]

# -- pushes

NUM_STEPS = 4


def values_of(step, shape, dtype, num_ranks):
    """One for each rank: with some rows, repeated or not, with none, and dense."""
    torch.manual_seed(step)
    forms = [
        lambda: some_rows(shape, shape[0], dtype),
        lambda: some_rows(shape, 5, dtype, coalesced=True),
        lambda: some_rows(shape, 0, dtype),
        lambda: some_rows(shape, 4, dtype),
        lambda: numbers(shape, dtype),
    ]
    count = len(forms) - (step % 2)
    return [forms[(step + i) % count]() for i in range(num_ranks)]


SHAPES = [(11,), SHAPE, (5, 2, 3), (6, 0)]


def train(kv, dtype, set_updater, num_ranks, positions):
    """What keys of all shapes are after each push, and what is kept of them."""
    keys = [str(shape) for shape in SHAPES]
    for key, shape in zip(keys, SHAPES, strict=True):
        kv.init_rows(key, shape[1:], dtype, num_rows=shape[0], init=INIT)
    set_updater(kv)
    seen = []
    for step in range(NUM_STEPS):
        pushed = []
        for shape in SHAPES:
            values = values_of(step, shape, dtype, num_ranks)
            pushed.append([values[i] for i in positions])
        kv.push(keys, pushed)
        seen += kv.pull(keys)
        for key, shape in zip(keys, SHAPES, strict=True):
            ids = torch.arange(shape[0]).flip(0)
            seen.append(kv.row_sparse_pull(key, row_ids=ids))
    states = kv.optimizer.state_dict()["state"] if kv.optimizer else {}
    return seen, states


SETTERS = {
    "ASSIGN": lambda kv: None,
    "lazy=False": lambda kv: kv.set_optimizer(optim.Adam(lr=0.1, lazy=False)),
    **{
        name: lambda kv, make=make: kv.set_optimizer(make())
        for name, make in ROW_OPTIMIZERS.items()
    },
}


def train_rank(rank, num_ranks, name):
    result = []
    for dtype in FLOATS:
        with torchkv.create("dist_sync") as kv:
            result.append(train(kv, dtype, SETTERS[name], num_ranks, [rank]))
    return result


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", SETTERS)
def test_the_same_bits_as_on_one_machine(name, num_ranks):
    expected = []
    for dtype in FLOATS:
        kv = torchkv.create("device")
        expected.append(train(kv, dtype, SETTERS[name], num_ranks, range(num_ranks)))
    for of_rank in ranks.run(train_rank, num_ranks, num_ranks, name):
        for (seen, states), (others, other_states) in zip(
            of_rank, expected, strict=True
        ):
            for value, other in zip(seen, others, strict=True):
                if value.is_sparse:
                    check_same(value, other)
                else:
                    assert_same(value, other)
            assert states.keys() == other_states.keys()
            for key, state in states.items():
                assert state.keys() == other_states[key].keys()
                for field, value in state.items():
                    other = other_states[key][field]
                    if isinstance(value, torch.Tensor):
                        assert_same(value, other, f"{key} {field}")
                    else:
                        assert value == other


def clip(rank):
    with torchkv.create("dist_sync") as kv:
        kv.init_rows(3, (4,), num_rows=30)
        kv.set_optimizer(optim.SGD(lr=1.0, max_norm=2.0))
        kv.push(3, sparse([rank, 9 + rank], torch.full((2, 4), 3.0), (30, 4)))
        return kv.pull(3).to_dense(), kv.optimizer.grad_norm


def test_clipping_by_the_norm_of_all_rows():
    gradient = torch.zeros(30, 4)
    gradient[[0, 1, 9, 10]] = 3
    found = ranks.run(clip, 2)
    assert found[0][1] == pytest.approx(12)  # rank 0 decides
    for value, _ in found:
        torch.testing.assert_close(value, -gradient / 6)


def push_odd_dtypes(rank):
    with torchkv.create("dist_sync") as kv:
        found = []
        for dtype in [*FLOAT8S, torch.uint16, torch.bool]:
            kv.init_rows(str(dtype), (3,), dtype, num_rows=40)
            rows = sparse([3, 9, 4, 17], torch.ones(4, 3).to(dtype), SHAPE)
            kv.push(str(dtype), rows if rank == 0 else rows.to(dtype))
            ids = torch.tensor([17, 0, 3])
            found_rows = kv.row_sparse_pull(str(dtype), row_ids=ids)
            out = torch.empty(SHAPE, dtype=dtype)
            kv.pull(str(dtype), out=out)
            found.append((dtype, found_rows.tolist(), out.double().sum().item()))
        kv.barrier()
        return found


def test_dtypes_that_torch_cannot_index():
    for found in ranks.run(push_odd_dtypes, 2):
        for dtype, rows, total in found:
            two = 1 if dtype is torch.bool else 2
            assert rows == [[two] * 3, [0] * 3, [two] * 3], dtype
            assert total == 4 * 3 * two, dtype


def add_noise(rank):
    with torchkv.create("dist_sync") as kv:
        kv.init_rows("w", (4,), num_rows=64)
        kv.set_optimizer(optim.mxnet.SGLD(seed=3))
        kv.push("w", sparse([*range(64)], torch.zeros(64, 4), (64, 4)))
        return kv.pull("w").values()


def test_rows_on_two_servers_have_noise_of_their_own():
    one, two = ranks.run(add_noise, 2)
    assert torch.equal(one, two)
    assert len(one.flatten().unique()) > 250  # of 256


def push_alone(rank):
    """Each rank updates when it pushes, whatever the others do."""
    with torchkv.create("dist_async") as kv:
        kv.init_rows("w", (4,))
        kv.set_optimizer("sgd", learning_rate=1.0)
        for step in range(10):
            ids = [FAR * rank + step, 999]
            kv.push("w", sparse(ids, torch.ones(2, 4), (2 * FAR, 4)))
        kv.barrier()
        return kv.pull("w"), kv.version("w"), kv.num_rows("w")


def test_dist_async():
    for value, version, num_rows in ranks.run(push_alone, 2):
        assert version == 20 and num_rows == 21
        assert value.shape == (FAR + 10, 4)
        rows = dict(zip(value.indices()[0].tolist(), value.values(), strict=True))
        assert [*rows] == sorted([*range(10), 999, *(FAR + i for i in range(10))])
        for id, row in rows.items():
            assert torch.equal(row, torch.full((4,), -20.0 if id == 999 else -1.0))


def take_rows(key, input, stored):
    assert input.is_sparse and stored.is_sparse
    stored.values().sub_(0.5 * input.values())


@torch.jit.script
def step_rows(key: str, input: torch.Tensor, stored: torch.Tensor):
    stored.values().sub_(0.5 * input.values())


UPDATERS = {
    "Python": lambda kv: kv.set_updater(take_rows, sparse=True),
    "TorchScript": lambda kv: kv.set_updater(step_rows, sparse=True),
}


def update_rows(rank, name):
    with torchkv.create("dist_sync") as kv:
        UPDATERS[name](kv)  # first, so that one server has all rows
        kv.init_rows("w", (2,), num_rows=50)
        out = torch.empty(50, 2)
        kv.pushpull("w", sparse([49, rank, rank], torch.ones(3, 2), (50, 2)), out=out)
        return out


@pytest.mark.parametrize("name", UPDATERS)
def test_updaters_get_rows(name):
    expected = torch.zeros(50, 2)
    expected[:2], expected[49] = -1, -1
    for out in ranks.run(update_rows, 2, name):
        assert torch.equal(out, expected)


# -- init


def begin(rank, type):
    with torchkv.create(type) as kv:
        # Rank 0's rows and initial value count.
        kv.init(
            ["a", "d"],
            [
                some_rows(SHAPE, 12)
                if rank
                else sparse([7, 2, 7, 30], torch.full((4, 3), 1.5), SHAPE),
                torch.full((2,), float(rank)),
            ],
        )
        kv.init_rows("b", (3,), init=initializers.Normal(seed=rank))
        found = [kv.pull("a"), kv.pull("d"), kv.pull("b")]
        ids = torch.tensor([[FAR, 2], [7, 0]])
        found += [kv.row_sparse_pull(key, row_ids=ids % (40 if key == "a" else 2**60))
                  for key in "ab"]  # fmt: skip
        numbers_of_rows = [kv.num_rows(key) for key in ("a", "b", "d")]
        kv.set_optimizer("sgd", learning_rate=1.0)
        kv.push("a", sparse([2], torch.ones(1, 3), SHAPE))
        kv.barrier()
        return found, numbers_of_rows, kv.pull("a")


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("type", TYPES)
def test_rank_0s_first_value_counts(type, num_ranks):
    one = torchkv.create("local")
    one.init_rows("b", (3,), init=initializers.Normal(seed=0))
    ids = torch.tensor([[FAR, 2], [7, 0]])
    a = torch.zeros(SHAPE)
    a[[2, 30]], a[7] = 1.5, 3.0
    for found, numbers_of_rows, after in ranks.run(begin, num_ranks, type):
        assert numbers_of_rows == [3, 0, 2]
        assert found[0].indices().tolist() == [[2, 7, 30]]
        assert_same(found[0].to_dense(), a)
        assert_same(found[1], torch.zeros(2))
        assert found[2].shape == (0, 3)
        assert_same(found[3], a[ids % 40])
        assert_same(found[4], one.row_sparse_pull("b", row_ids=ids))
        stepped = a.clone()
        stepped[2] -= num_ranks
        assert_same(after.to_dense(), stepped)


# -- pulls


def pull_all(rank, type):
    with torchkv.create(type) as kv:
        kv.init([1, 3], [torch.ones(2), some_rows(SHAPE, 0)])
        kv.init_rows(5, (3,), torch.bfloat16, num_rows=40, init=INIT)
        kv.init_rows(7, (), torch.int64)
        rows = sparse([4, 21, 33], torch.full((3, 3), 2.0), SHAPE)
        far = sparse([FAR, 1], torch.tensor([5, 6]), (FAR + 1,))
        kv.push([3, 5, 7], [rows, rows.to(torch.bfloat16), far])
        kv.barrier()
        whole = torch.empty(2, *SHAPE)
        strided = torch.empty(3, 40, dtype=torch.float64).t()
        out = sparse([0], torch.ones(1, 3), SHAPE)
        dense = torch.empty(2)
        kv.pull(
            [5, 1, 3, 3], out=[[strided], [dense], [whole[0], whole[1]], [whole[0]]]
        )
        kv.pull([3, 1], out=[[out, torch.empty(SHAPE)], [dense]], ignore_sparse=False)
        kv.pull(5, out=torch.empty(SHAPE), async_op=True).wait()
        ids = torch.tensor([[33, 0], [4, 33]], dtype=torch.int32)
        looked_up = [kv.row_sparse_pull(key, row_ids=ids) for key in (3, 5)]
        to_sparse = sparse([], torch.empty(0, 3), SHAPE)
        kv.row_sparse_pull(3, to_sparse, row_ids=ids)
        several = torch.empty(1, 3), torch.empty(2, dtype=torch.int64)
        kv.row_sparse_pull(
            [3, 7], [*several], row_ids=[ids[1, :1], torch.tensor([FAR, 3])]
        )
        pulled = kv.pull([3, 1, 7])
        kv.barrier()
        return whole, strided, out, dense, looked_up, to_sparse, several, pulled


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_pulls(num_ranks):
    one = torchkv.create("local")
    one.init_rows(5, (3,), torch.bfloat16, num_rows=40, init=INIT)
    rows = sparse([4, 21, 33], torch.full((3, 3), 2.0), SHAPE)
    one.push(5, rows.to(torch.bfloat16))
    initial = torch.empty(SHAPE, dtype=torch.bfloat16)
    one.pull(5, out=initial)
    for found in ranks.run(pull_all, num_ranks, "dist_sync"):
        whole, strided, out, dense, looked_up, to_sparse, several, pulled = found
        # Without an updater, the sum of the ranks' rows is the value.
        expected = num_ranks * rows.to_dense()
        initial[[4, 21, 33]] = 2.0 * num_ranks
        assert_same(whole, expected.expand(2, *SHAPE))
        assert_same(strided, initial.double())
        check_same(out.coalesce(), expected.to_sparse(1).coalesce())
        assert_same(dense, torch.ones(2))
        ids = torch.tensor([[33, 0], [4, 33]])
        assert_same(looked_up[0], expected[ids])
        assert_same(looked_up[1], initial[ids])
        assert to_sparse.coalesce().indices().tolist() == [[0, 4, 33]]
        assert_same(to_sparse.to_dense()[[0, 4, 33]], expected[[0, 4, 33]])
        assert_same(several[0], expected[[4]])
        assert several[1].tolist() == [5 * num_ranks, 0]
        check_same(pulled[0], rows.coalesce() * num_ranks)
        assert_same(pulled[1], torch.ones(2))
        assert pulled[2].shape == (FAR + 1,)
        assert pulled[2].values().tolist() == [6 * num_ranks, 5 * num_ranks]


def pull_large(rank):
    """More than servers answer at once."""
    with torchkv.create("dist_sync") as kv:
        kv.init_rows("w", (128,))
        ids = torch.randperm(300_000, generator=torch.Generator().manual_seed(0))
        rows = ids[:, None] + torch.arange(128.0)
        if rank == 1:
            ids, rows = ids[:0], rows[:0]
        kv.push("w", sparse(ids.tolist(), rows, (300_000, 128)))
        value = kv.pull("w")
        expected = torch.arange(300_000)
        kv.barrier()
        return [
            torch.equal(value.indices()[0], expected),
            torch.equal(value.values(), expected[:, None] + torch.arange(128.0)),
            kv.num_rows("w") == 300_000,
        ]


def test_a_value_larger_than_an_answer():
    for found in ranks.run(pull_large, 2):
        assert all(found)


def bytes_of_calls(rank):
    os.environ["TORCHKV_SHARED_MEMORY"] = "0"
    with torchkv.create("dist_sync") as kv:
        kv.init_rows("w", (100,))
        kv.set_optimizer("sgd", learning_rate=1.0)
        value = sparse([*range(1000)], torch.ones(1000, 100), (1000, 100))
        kv.push("w", value)
        ids = torch.arange(500)
        return (
            counted(kv, lambda: kv.push("w", value))["sent"],
            counted(kv, lambda: kv.row_sparse_pull("w", row_ids=ids))["sent"],
        )


def test_half_of_the_rows_are_on_the_other_server():
    for pushed, pulled in ranks.run(bytes_of_calls, 2):
        # Numbers and an id of each row; of a pull, ids and another rank's rows.
        assert pushed == pytest.approx(500 * 408, rel=0.1)
        assert pulled == pytest.approx(250 * (8 + 400), rel=0.2)


# -- delete


def forget(rank, type):
    with torchkv.create(type) as kv:
        kv.init_rows("w", (2,), num_rows=20, init=INIT)
        kv.set_optimizer(optim.SGD(lr=0.5, momentum=0.5))
        value = sparse([*range(8)], torch.ones(8, 2), (20, 2))
        kv.push("w", value)
        kv.barrier()
        kv.delete("w", row_ids=torch.tensor([rank, 5, 19]))
        kv.barrier()
        left, version = row_ids_of(kv, "w"), kv.version("w")
        first = kv.row_sparse_pull("w", row_ids=torch.tensor([0]))
        kv.barrier()
        kv.push("w", value)
        kv.barrier()
        after = kv.pull("w").to_dense()
        kv.delete("w")
        kv.init_rows("w", (2,), num_rows=20)
        return left, version, first, after, kv.num_rows("w")


@pytest.mark.parametrize("type", TYPES)
def test_deleted_rows_begin_anew(type):
    one = torchkv.create("local")
    one.init_rows("w", (2,), num_rows=20, init=INIT)
    initial = torch.empty(20, 2)
    one.pull("w", out=initial)
    for left, version, first, after, num_rows in ranks.run(forget, 2, type):
        assert left == [2, 3, 4, 6, 7] and num_rows == 0
        assert version == (2 if type == "dist_sync" else 4)
        assert_same(first, initial[:1])
        if type == "dist_sync":
            expected = initial.clone()
            expected[[0, 1, 5]] -= 1  # their momentum is forgotten, too
            expected[[2, 3, 4, 6, 7]] -= 1 + 1.5
            torch.testing.assert_close(after[:8], expected[:8])


def forget_beside_a_push(rank):
    with torchkv.create("dist_sync") as kv:
        kv.init_rows("w", (2,), num_rows=20)
        value = sparse([1, 2], torch.ones(2, 2), (20, 2))
        kv.push("w", value)
        kv.barrier()

        def call():
            if rank == 0:
                kv.delete("w", row_ids=torch.tensor([1]))
            else:
                kv.push("w", value, async_op=True).wait()

        error = outcome(call)
        return error, row_ids_of(kv, "w")


def test_all_ranks_delete_rows():
    for (kind, text), left in ranks.run(forget_beside_a_push, 2):
        assert kind == "RemoteError" and left == [1, 2]
        assert "all ranks delete rows" in text and "'w'" in text


# -- errors


def refused(rank, type):
    with torchkv.create(type) as kv:
        kv.init_rows("w", (4,), num_rows=6)
        kv.init("d", torch.zeros(6, 4))
        good = sparse([1], torch.ones(1, 4), (6, 4))
        kv.init_rows("u", (4,))
        kv.push("u", sparse([5], torch.ones(1, 4), (6, 4)))
        written = torch.ones(6, 4)
        calls = [
            lambda: kv.init_rows("w", (4,)),
            lambda: kv.init_rows("x", (4,), torch.int64, init=INIT),
            lambda: kv.init(["y", "w"], [good, good]),
            lambda: kv.push("w", sparse([6], torch.ones(1, 4), (6, 4))),
            lambda: kv.push("w", sparse([1], torch.ones(1, 4), (7, 4))),
            lambda: kv.push("w", torch.ones(5, 4)),
            lambda: kv.push(["w", "d"], [good, torch.ones(3)]),
            lambda: kv.pushpull("w", good, out=torch.empty(5, 4)),
            lambda: kv.pull("w", out=torch.empty(6, 3)),
            lambda: kv.pull(
                ["d", "u"],
                out=[written, sparse([], torch.empty(0, 4), (3, 4))],
                ignore_sparse=False,
            ),
            lambda: kv.row_sparse_pull("w", row_ids=torch.tensor([6])),
            lambda: kv.delete("d", row_ids=torch.tensor([1])),
            lambda: kv.delete("w", row_ids=torch.tensor([-1])),
            lambda: kv.delete(["w", "z"], row_ids=[torch.tensor([1])] * 2),
        ]
        found = [outcome(call) for call in calls]
        kv.delete("u")
        found.append(outcome(lambda: kv.set_updater(take_rows, sparse=True)))
        kv.set_optimizer(optim.LAMB(lr=0.1))
        found.append(outcome(lambda: kv.push("w", good)))
        kv.set_updater(None)
        kv.barrier()
        kv.push("w", good)
        kv.barrier()
        assert written.all()
        return found, kv.pull("w"), kv.version("w"), kv.pull("d"), [*kv.keys()]


@pytest.mark.parametrize("type", TYPES)
def test_a_refused_call_changes_nothing(type):
    for found, value, version, dense, keys in ranks.run(refused, 2, type):
        assert [name for name, _ in found] == [
            *["ValueError", "ValueError", "ValueError"],
            *["IndexError", "ValueError", "ValueError", "ValueError", "ValueError"],
            *["ValueError", "ValueError", "IndexError", "ValueError", "IndexError"],
            "KeyError",
            *["ValueError", "NotImplementedError"],  # the first: its rows are split
        ]
        for (_, text), key in zip(found, "wxwwwwdwwuwdwzww", strict=True):
            assert f"'{key}'" in text
        assert keys == ["w", "d"] and version == (1 if type == "dist_sync" else 2)
        assert value.indices().tolist() == [[1]] and not dense.any()
