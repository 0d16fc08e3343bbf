"""row_sparse_pull in stores of several processes: servers send the rows asked for."""

import os

import pytest
import torch

import ranks
import torchkv
from counted import counted
from helpers import assert_same
from row_values import numbers, some_rows

TYPES = ["dist_sync", "dist_async"]
# As in test_sparse_values.py: the last four are split over the servers.
SHAPES = [(11,), (7, 3), (5, 0), (3001, 67), (44, 2048), (33, 4096), (20, 2003)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


def value_of(shape, dtype):
    generator = torch.Generator().manual_seed(shape[0])
    return torch.randint(0, 99, shape, generator=generator).to(dtype)


def ids_of(shape, rank):
    """In any order, with repeats and without; ascending; few, all, none."""
    rows = shape[0]
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randint(rows, (2, 3), generator=generator),
        torch.randint(rows, (rows // 3,), generator=generator, dtype=torch.int32),
        torch.tensor([rows - 1]),
        torch.randperm(rows, generator=generator)[: rows // 2].sort().values,
        torch.arange(rows),
        torch.tensor([], dtype=torch.int64),
    ]


def pull_all(rank, type, dtype):
    with torchkv.create(type) as kv:
        keys = [str(shape) for shape in SHAPES]
        kv.init(keys, [value_of(shape, dtype) for shape in SHAPES])
        found = []
        for key, shape in zip(keys, SHAPES, strict=True):
            for ids in ids_of(shape, rank):
                out = torch.empty(*ids.shape, *shape[1:], dtype=dtype)
                kv.row_sparse_pull(key, out, row_ids=ids)
                found.append((kv.row_sparse_pull(key, row_ids=ids), out))
        kv.barrier()
        return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_shapes(num_ranks, dtype):
    of_ranks = ranks.run(pull_all, num_ranks, TYPES[num_ranks % 2], dtype)
    for rank, found in enumerate(of_ranks):
        expected = [
            value_of(shape, dtype)[ids.long()]
            for shape in SHAPES
            for ids in ids_of(shape, rank)
        ]
        for (new, out), rows in zip(found, expected, strict=True):
            assert_same(new, rows)
            assert_same(out, rows)


SHAPE = (3000, 64)


def pull_after_pushes(rank):
    """Each pull has what its rank has pushed before, and in dist_sync the others."""
    with torchkv.create("dist_sync") as kv:
        kv.init("w", numbers(SHAPE))
        kv.set_optimizer("adagrad", learning_rate=0.1)
        found = []
        for step in range(6):
            torch.manual_seed(10 * step + rank)
            value = some_rows(SHAPE, 40, coalesced=True)
            kv.push("w", value)
            ids = torch.cat([value.indices()[0], torch.randint(3000, (9,))])
            found.append((kv.row_sparse_pull("w", row_ids=ids), kv.pull("w")[ids]))
        return found


def test_pulls_follow_pushes():
    torch.manual_seed(0)
    for found in ranks.run(pull_after_pushes, 2):
        for rows, expected in found:
            assert_same(rows, expected)


def pull_into(rank):
    with torchkv.create("dist_sync") as kv:
        kv.init([3, 5], [value_of(SHAPE, torch.float32)] * 2)
        ids = torch.tensor([7, 2000, 7])
        outs = {
            "sparse": torch.zeros(SHAPE).to_sparse(1),
            "transposed": torch.zeros(64, 3).t(),
            "half": torch.zeros(3, 64, dtype=torch.float16),
            "plain": torch.zeros(3, 64),
        }
        kv.row_sparse_pull(3, list(outs.values()), row_ids=ids)
        several = [torch.zeros(3, 64), torch.zeros(1, 64), torch.zeros(2, 64)]
        kv.row_sparse_pull(
            [3, 5, 3], several, row_ids=[ids, torch.tensor([9]), torch.tensor([8, 7])]
        )
        in_order = [torch.zeros(2, 64), torch.zeros(1, 64)]  # received where they are
        kv.row_sparse_pull([5, 3], in_order, row_ids=[ids[:2], ids[1:2]])
        over_ids = torch.zeros(64, dtype=torch.int64)
        over_ids[0] = 2000
        kv.init(7, value_of(SHAPE, torch.int64))
        kv.row_sparse_pull(7, over_ids.view(1, 64), row_ids=over_ids[:1])
        kv.barrier()
        return outs, several, in_order, over_ids


def test_outs():
    value = value_of(SHAPE, torch.float32)
    rows = value[[7, 2000, 7]]
    for outs, several, in_order, over_ids in ranks.run(pull_into, 2):
        sparse = outs.pop("sparse")
        assert sparse.is_coalesced() and sparse.indices().tolist() == [[7, 2000]]
        assert_same(sparse.values(), rows[:2])
        for out in outs.values():
            assert_same(out.float().contiguous(), rows)
        for out, ids in zip(several, [[7, 2000, 7], [9], [8, 7]], strict=True):
            assert_same(out, value[ids])
        assert_same(in_order[0], rows[:2])
        assert_same(in_order[1], rows[1:2])
        assert_same(over_ids, value[2000].long())


def pull_values_into_sparse_outs(rank):
    with torchkv.create("dist_sync") as kv:
        kv.init([3, 5], [value_of(SHAPE, torch.float32)] * 2)
        sparse = [torch.zeros(SHAPE).to_sparse(1) for _ in range(2)]
        dense = torch.zeros(SHAPE)
        kv.pull([3, 5], out=[[sparse[0], dense], sparse[1]], ignore_sparse=False)
        kept = torch.zeros(SHAPE).to_sparse(1)
        kv.pull(3, out=kept)
        assert kept.to_dense().count_nonzero() == 0
        work = kv.pull(3, out=kept, ignore_sparse=False, async_op=True)
        work.wait()
        wrong = ranks.outcome(
            lambda: kv.pull(
                [3, 5], out=[dense, torch.eye(9).to_sparse(1)], ignore_sparse=False
            )
        )
        kv.barrier()
        return [*sparse, kept], dense, wrong


def test_pulls_of_values_into_sparse_outs():
    value = value_of(SHAPE, torch.float32)
    for sparse, dense, (name, text) in ranks.run(pull_values_into_sparse_outs, 2):
        for out in sparse:
            assert out.is_coalesced()
            assert_same(out.to_dense(), value)
        assert_same(dense, value)
        assert name == "ValueError" and "(key 5)" in text


def refused(rank):
    with torchkv.create("dist_sync") as kv:
        kv.init("w", value_of(SHAPE, torch.float32))
        found = [
            ranks.outcome(lambda k=key, i=ids: kv.row_sparse_pull(k, row_ids=i))
            for key, ids in [
                ("w", torch.tensor([1, 3000])),
                ("w", torch.tensor([0.5])),
                ("x", torch.tensor([1])),
            ]
        ]
        rows = kv.row_sparse_pull("w", row_ids=torch.tensor([1]))
        kv.barrier()
        return found, rows, kv.stats()["w"]


def test_refused_calls():
    for found, rows, stats in ranks.run(refused, 2):
        assert [name for name, _ in found] == ["IndexError", "TypeError", "KeyError"]
        assert_same(rows, value_of(SHAPE, torch.float32)[1:2])
        assert stats["bytes_pulled"] == 256


def bytes_received(rank, num_rows):
    os.environ["TORCHKV_SHARED_MEMORY"] = "0"
    with torchkv.create("dist_sync") as kv:
        kv.init("w", torch.zeros(10_000, 100))
        ids = torch.arange(num_rows) * (10_000 // num_rows)
        return counted(kv, lambda: kv.row_sparse_pull("w", row_ids=ids))


@pytest.mark.parametrize("num_rows", [2500, 5000])
def test_the_bytes_that_a_pull_sends(num_rows):
    for counts in ranks.run(bytes_received, 2, num_rows):
        # Half of the rows are on the other server; as many ids go there.
        assert counts["sent"] == pytest.approx(num_rows / 2 * 408, abs=128)
        assert counts["written"] == num_rows * 400
