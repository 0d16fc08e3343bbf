"""Sparse values in stores of several processes: a rank sends the rows that it has."""

import os

import pytest
import torch

import ranks
import torchkv
from counted import counted
from dtypes import FLOAT8S, FLOATS
from helpers import assert_same
from ranks import outcome
from row_values import ROW_OPTIMIZERS, numbers, some_rows, sparse
from torchkv import optim

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

TYPES = ["dist_sync", "dist_async"]
# The last four are split over the servers: between rows; between rows, of few of which
# a slice is; within rows; and between elements, as 2003 has no common divisor with 16.
SHAPES = [
    *[(11,), (7, 3), (4, 2, 3), (5, 0)],
    *[(3001, 67), (44, 2048), (33, 4096), (20, 2003)],
]
NUM_STEPS = 4


def values_of(step, shape, dtype, num_ranks):
    """One for each rank: with some rows, repeated or not, with none, and dense."""
    torch.manual_seed(100 * step + shape[0])
    most = shape[0] // 2
    forms = [
        lambda: some_rows(shape, most, dtype),
        lambda: some_rows(shape, most, dtype, coalesced=True),
        lambda: some_rows(shape, 0, dtype),
        lambda: some_rows(shape, shape[0], dtype, coalesced=True),
        lambda: numbers(shape, dtype),
    ]
    count = len(forms) - (step % 2)  # dense ones in some rounds
    return [forms[(step + i) % count]() for i in range(num_ranks)]


def train(kv, dtype, set_updater, num_ranks, positions):
    """What keys of all shapes are after each push."""
    torch.manual_seed(0)
    keys = [str(shape) for shape in SHAPES]
    kv.init(keys, [numbers(shape, dtype) for shape in SHAPES])
    set_updater(kv)
    seen = []
    for step in range(NUM_STEPS):
        pushed = []
        for shape in SHAPES:
            values = values_of(step, shape, dtype, num_ranks)
            pushed.append([values[i] for i in positions])
        kv.push(keys, pushed)
        seen.append(kv.pull(keys))
    return seen


def check_same(found, expected, name):
    for values, others in zip(found, expected, strict=True):
        for shape, value, other in zip(SHAPES, values, others, strict=True):
            if name == "max_norm":  # servers add up the norms of slices
                torch.testing.assert_close(value, other)
            else:
                assert_same(value, other, str(shape))


def train_rank(rank, num_ranks, name):
    result = []
    for dtype in FLOATS:
        with torchkv.create("dist_sync") as kv:
            result.append(train(kv, dtype, SETTERS[name], num_ranks, [rank]))
    return result


SETTERS = {
    "ASSIGN": lambda kv: None,
    "lazy=False": lambda kv: kv.set_optimizer(optim.Adam(lr=0.1, lazy=False)),
    "max_norm": lambda kv: kv.set_optimizer(optim.SGD(lr=0.1, max_norm=1.0)),
    **{
        name: lambda kv, make=make: kv.set_optimizer(make())
        for name, make in ROW_OPTIMIZERS.items()
        if name in ("momentum", "Adam", "accumulate", "skip_nonfinite")
    },
}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", SETTERS)
def test_the_same_bits_as_on_one_machine(name, num_ranks):
    expected = []
    for dtype in FLOATS:
        kv = torchkv.create("device")
        expected.append(train(kv, dtype, SETTERS[name], num_ranks, range(num_ranks)))
    for of_rank in ranks.run(train_rank, num_ranks, num_ranks, name):
        for found, one in zip(of_rank, expected, strict=True):
            check_same(found, one, name)


SHAPE = (6, 4)


def refused(rank, type):
    with torchkv.create(type) as kv:
        kv.init(["w", "n"], [torch.zeros(SHAPE), torch.zeros(6, 4, dtype=torch.int64)])
        good = sparse([1], torch.ones(1, 4), SHAPE)
        found = [
            outcome(lambda bad=bad, key=key: kv.push(["w", key], [good, bad]))
            for key, bad in [
                ("n", good),  # floating-point numbers to integers
                ("w", [torch.ones(SHAPE), sparse([6], torch.ones(1, 4), SHAPE)]),
                ("w", sparse([-1], torch.ones(1, 4), SHAPE)),
                ("w", sparse([1], torch.ones(1, 4), (7, 4))),
                ("w", torch.ones(SHAPE).to_sparse(2)),
                ("w", torch.ones(SHAPE).to_sparse_csr()),
                ("x", good),
            ]
        ]
        kv.barrier()
        kv.push("w", sparse([rank, 5], torch.ones(2, 4), SHAPE))
        kv.barrier()
        return found, kv.pull("w")


@pytest.mark.parametrize("type", TYPES)
def test_a_refused_call_sends_nothing(type):
    for found, value in ranks.run(refused, 2, type):
        names = ["TypeError", "IndexError", "IndexError", "ValueError", "ValueError"]
        assert [name for name, _ in found] == [
            *names,
            "NotImplementedError",
            "KeyError",
        ]
        for (_, text), key in zip(found, "nwwwwwx", strict=True):
            assert f"'{key}'" in text
        if type == "dist_sync":
            expected = torch.zeros(SHAPE)
            expected[:2], expected[5] = 1, 2
            assert torch.equal(value, expected)


def push_alone(rank):
    """Each rank updates when it pushes, whatever the others do."""
    with torchkv.create("dist_async") as kv:
        kv.init("w", torch.zeros(1000, 64))
        kv.set_optimizer("sgd", learning_rate=1.0)
        for step in range(10):
            value = sparse([400 * rank + step, 999], torch.ones(2, 64), (1000, 64))
            if step % 2 == 0:
                kv.push("w", value)
            else:
                kv.push("w", [value, value], async_op=True).wait()
        kv.barrier()
        return kv.pull("w"), kv.version("w")


def test_dist_async():
    expected = torch.zeros(1000, 64)
    for rank in range(2):
        for step in range(10):
            expected[[400 * rank + step, 999]] -= 1 + step % 2
    for value, version in ranks.run(push_alone, 2):
        assert torch.equal(value, expected)
        assert version == 20


def take_rows(key, input, stored):
    """What an updater sees of a key's sum: the pushed rows, once each."""
    assert input.is_sparse and input.is_coalesced()
    stored.index_add_(0, input.indices()[0], input.values(), alpha=-0.5)


@torch.jit.script
def step_rows(key: str, input: torch.Tensor, stored: torch.Tensor):
    stored.index_add_(0, input.indices()[0], input.values(), alpha=-0.5)


def see_dense(key, input, stored):
    stored.sub_(0.5 * input)


UPDATERS = {
    "Python, rows": lambda kv: kv.set_updater(take_rows, sparse=True),
    "TorchScript, rows": lambda kv: kv.set_updater(step_rows, sparse=True),
    "Python, dense": lambda kv: kv.set_updater(see_dense),
    "torch.optim": lambda kv: kv.set_optimizer(torch.optim.SGD, lr=0.5),
}


def update_rows(rank, name):
    with torchkv.create("dist_sync") as kv:
        UPDATERS[name](kv)  # first, so that no key is split
        kv.init("w", torch.zeros(3000, 64))
        value = sparse([2999, rank, rank], torch.ones(3, 64), (3000, 64))
        out = torch.empty(3000, 64)
        kv.pushpull("w", value, out=out)
        kv.pushpull("w", [value, value], out=out)
        return out


@pytest.mark.parametrize("name", UPDATERS)
def test_updaters_get_the_sum(name):
    expected = torch.zeros(3000, 64)
    expected[:2], expected[2999] = -3, -3
    for out in ranks.run(update_rows, 2, name):
        assert torch.equal(out, expected)


def push_fp8(rank, dtype):
    """More ids than rows are merged in fp32, and so are several values."""
    with torchkv.create("dist_sync") as kv:
        kv.init("w", torch.zeros(SHAPE))
        many = sparse([1] * 7, torch.ones(7, 4).to(dtype), SHAPE)
        kv.push("w", many)
        found = [kv.pull("w")]
        kv.push("w", [many, torch.ones(SHAPE).to(dtype)])
        found.append(kv.pull("w"))
        kv.push("w", [torch.ones(SHAPE).to(dtype)] * 2)
        return [*found, kv.pull("w")]


@pytest.mark.parametrize("dtype", FLOAT8S, ids=str)
def test_fp8_is_summed_in_fp32(dtype):
    rows = torch.zeros(SHAPE)
    rows[1] = 7
    for found in ranks.run(push_fp8, 2, dtype):
        expected = [2 * rows, 2 * (rows + 1), torch.full(SHAPE, 4.0)]
        for value, other in zip(found, expected, strict=True):
            assert torch.equal(value, other)


def bytes_sent(rank, num_rows):
    os.environ["TORCHKV_SHARED_MEMORY"] = "0"
    with torchkv.create("dist_sync") as kv:
        kv.init("w", torch.zeros(10_000, 100))
        kv.set_optimizer("sgd", learning_rate=1.0)
        ids = torch.arange(num_rows) * (10_000 // num_rows)
        value = sparse(ids.tolist(), torch.ones(num_rows, 100), (10_000, 100))
        kv.push("w", value)
        return counted(kv, lambda: kv.push("w", value))


@pytest.mark.parametrize("num_rows", [400, 2500])
def test_the_bytes_that_a_push_sends(num_rows):
    for counts in ranks.run(bytes_sent, 2, num_rows):
        # Half of the rows are on the other server: numbers, an id each, a header.
        assert counts["sent"] == pytest.approx(num_rows / 2 * 408, abs=128)
        assert counts["summed"] == 0


def push_beside_compression(rank):
    """Only dense values are compressed, and keep what was not sent of them."""
    with torchkv.create("dist_sync") as kv:
        kv.init("w", torch.zeros(SHAPE))
        kv.set_updater(see_dense)
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        kv.push("w", torch.full(SHAPE, 0.25))
        kv.push("w", sparse([1], torch.full((1, 4), 0.125), SHAPE))
        kv.push("w", [torch.full(SHAPE, 0.5), sparse([2], torch.ones(1, 4), SHAPE)])
        kv.push("w", torch.full(SHAPE, 0.25))
        return kv.pull("w")


def test_sparse_values_are_not_compressed():
    sent = torch.full(SHAPE, 0.5 + 0.5)  # the last push brings the first one's rest
    sent[1] += 0.125
    sent[2] += 1
    for value in ranks.run(push_beside_compression, 2):
        assert torch.equal(value, -sent)


def save(rank, folder):
    """A key that is split between its rows, with the states of its slices."""
    with torchkv.create("dist_sync") as kv:
        kv.init("w", torch.zeros(3000, 64))
        kv.set_optimizer(optim.Adam(lr=0.1))
        step(kv, 0, [rank])
        kv.save(folder)
        step(kv, 1, [rank])
        return kv.pull("w")


def go_on(rank, folder):
    with torchkv.load(folder) as kv:
        step(kv, 1, [rank])
        return kv.pull("w")


def step(kv, number, positions):
    shape = (3000, 64)
    values = values_of(number, shape, torch.float32, 2)
    kv.push("w", [values[i] for i in positions])


def test_states_of_split_keys_are_saved(tmp_path):
    folder = str(tmp_path / "saved")
    expected = ranks.run(save, 2, folder)[0]
    for value in ranks.run(go_on, 2, folder):
        assert_same(value, expected)
    kv = torchkv.load(folder, type="device")
    step(kv, 1, [0, 1])
    assert_same(kv.pull("w"), expected)
