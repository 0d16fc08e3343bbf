"""The scripts and rules of one machine, with several processes."""

import pytest
import torch

import ranks
import torchkv

TYPES = ["dist_sync", "dist_async"]


def full(value):
    return torch.full((2, 3), float(value))


def push_and_pull(rank, type):
    kv = torchkv.create(type)
    kv.init(3, full(2 if rank == 0 else 9))
    out = full(0)
    kv.pull(3, out=out)
    seen = [out[0, 0].item()]
    kv.set_optimizer("sgd", learning_rate=1.0)
    kv.barrier()
    kv.push(3, full(-1))
    kv.barrier()
    kv.pull(3, out=out)
    seen.append(out[0, 0].item())
    kv.barrier()
    kv.close()
    return seen, kv.rank, kv.num_workers


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_init_push_pull(type, num_ranks):
    expected = [([2.0, 2.0 + num_ranks], rank, num_ranks) for rank in range(num_ranks)]
    assert ranks.run(push_and_pull, num_ranks, type) == expected


def pull_rows(rank):
    with torchkv.create("dist_sync") as kv:
        kv.init("w", torch.arange(12.0).view(6, 2))
        kv.push("w", torch.full((6, 2), float(rank)))
        rows = kv.row_sparse_pull("w", row_ids=torch.tensor([[5, 0], [5, 5]]))
        with pytest.raises(IndexError, match="but got 6"):
            kv.row_sparse_pull("w", row_ids=torch.tensor([0, 6]))
        kv.barrier()
        return rows


def test_rows_of_a_value_on_servers():
    for rows in ranks.run(pull_rows, 2):
        assert torch.equal(rows, torch.ones(2, 2, 2))


def futures(rank, folder):
    kv = torchkv.create("dist_sync", timeout=3)
    kv.init(["a", "b"], [full(0), torch.zeros(100_000)])
    out = [full(9), torch.ones(100_000)]
    work = kv.pushpull(
        ["a", "b"], [full(rank + 1), torch.ones(100_000)], out=out, async_op=True
    )
    future = work.get_future()
    seen = future.then(
        lambda done: (done.value(), out[0][0, 0].item(), out[1][7].item())
    )
    results = [seen.wait(), work.is_completed(), work.get_future().wait()]
    kv.barrier()
    if rank == 1:
        ranks.meet(folder, "end", rank, 2)
        return results
    late = kv.push("a", full(1), async_op=True).get_future()
    try:
        late.wait()
    except RuntimeError as error:
        results.append(str(error))
    ranks.meet(folder, "end", rank, 2)
    return results


def test_a_work_has_a_future(tmp_path):
    first, second = ranks.run(futures, 2, str(tmp_path))
    assert second == [([], 3.0, 2.0), True, []]
    assert first[:3] == second
    assert "push: timed out after 3 s; waited for rank 1" in first[3]
    assert "(key 'a', round 2)" in first[3]


def count_calls(rank, type):
    with torchkv.create(type) as kv:
        kv.init(["a", "b"], [full(0), torch.zeros(100_000)])
        kv.push(["a", "b"], [[full(1), full(1)], torch.ones(100_000)])
        kv.pushpull("b", torch.ones(100_000), out=torch.empty(100_000))
        kv.pull("a")
        kv.barrier()
        return kv.stats()


@pytest.mark.parametrize("type", TYPES)
def test_stats_are_of_the_calls_of_this_process(type):
    seconds = dict.fromkeys(["sum_seconds", "update_seconds", "copy_seconds"], 0.0)
    a = {"pushes": 1, "pulls": 1, "bytes_pushed": 48, "bytes_pulled": 24}
    b = {"pushes": 2, "pulls": 1, "bytes_pushed": 800_000, "bytes_pulled": 400_000}
    for stats in ranks.run(count_calls, 2, type):
        assert stats == {"a": {**a, **seconds}, "b": {**b, **seconds}}


def use_long_keys(rank):
    kv = torchkv.create("dist_sync", timeout=20)
    keys = [f"{number:060000d}" for number in range(160)]
    kv.init(keys, [torch.zeros(2)] * len(keys))
    kv.push(keys, [torch.ones(2)] * len(keys))
    kv.barrier()
    summed = {value for pulled in kv.pull(keys) for value in pulled.tolist()}
    kv.close()
    return summed


def test_keys_of_more_than_8_mib():
    """A barrier has all of them in one message."""
    assert ranks.run(use_long_keys, 2) == [{2.0}, {2.0}]
