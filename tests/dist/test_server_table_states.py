"""Row-sparse keys in stores of several processes: saved, in snapshots, as tables of
embeddings, and in random operations."""

import time

import pytest
import torch
import torch.nn.functional as F

import ranks
import torchkv
from helpers import assert_same
from ranks import outcome
from row_values import model_sum, numbers, row_ids_of, some_rows, sparse
from server_tables import FAR, INIT, SHAPE, check_same
from torchkv import initializers, optim

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

# -- saving


def table_store(kv, positions, num_ranks):
    """Trains two tables and a dense key for some steps."""
    kv.init_rows("t", (3,), torch.bfloat16, init=INIT)
    kv.init("s", some_rows(SHAPE, 0))
    kv.init("d", torch.zeros(5), whole=True)
    kv.set_optimizer(optim.Adagrad(lr=0.1, initial_accumulator_value=0.1))
    step_tables(kv, positions, num_ranks, range(3))


def step_tables(kv, positions, num_ranks, steps):
    for step in steps:
        torch.manual_seed(100 + step)
        values = [
            [
                sparse([3, 8, FAR + i + step], numbers((3, 3)), (2 * FAR, 3)),
                some_rows(SHAPE, 6),
                numbers((5,)),
            ]
            for i in range(num_ranks)
        ]
        for j, key in enumerate("tsd"):
            kv.push(key, [values[i][j] for i in positions])


def content(kv):
    states = kv.optimizer.state_dict()["state"]
    return kv.pull(["t", "s", "d"]), states


def save_rank(rank, num_ranks, folder):
    with torchkv.create("dist_sync") as kv:
        table_store(kv, [rank], num_ranks)
        kv.save(folder)
        state = kv.state_dict()
        kv.barrier()
        return content(kv), state


def load_rank(rank, num_ranks, folder, state):
    with torchkv.create("dist_sync") as kv:
        if state is None:
            kv.init_rows("other", (2,))
            kv.push("other", sparse([1], torch.ones(1, 2), (9, 2)))
            kv.load(folder)
        else:
            kv.load_state_dict(state)
        loaded = content(kv)
        step_tables(kv, [rank], num_ranks, range(3, 5))
        kv.barrier()
        return loaded, content(kv), [*kv.keys()]


def check_content(found, expected):
    for value, other in zip(found[0], expected[0], strict=True):
        if value.is_sparse:
            check_same(value, other)
        else:
            assert_same(value, other)
    for key, state in found[1].items():
        for field, value in state.items():
            other = expected[1][key][field]
            if isinstance(value, torch.Tensor):
                assert_same(value, other, f"{key} {field}")
            else:
                assert value == other
    assert found[1].keys() == expected[1].keys()


@pytest.mark.parametrize("form", ["folder", "state_dict"])
@pytest.mark.parametrize("num_saving", [1, 2])
def test_saved_and_loaded_by_any_number_of_ranks(num_saving, form, tmp_path):
    """Two replicas or ranks go on with the same bits, whoever has saved."""
    one = torchkv.create("device")
    table_store(one, range(2), 2)
    before = content(one)
    if num_saving == 2:
        saved = ranks.run(save_rank, 2, 2, str(tmp_path))
        for found, _ in saved:
            check_content(found, before)
        state = saved[0][1]
    else:
        one.save(tmp_path)
        state = one.state_dict()
    other = torchkv.create("device")
    if form == "folder":
        other.load(tmp_path)
    else:
        other.load_state_dict(state)
    check_content(content(other), before)
    step_tables(one, range(2), 2, range(3, 5))
    step_tables(other, range(2), 2, range(3, 5))
    expected = content(one)
    check_content(content(other), expected)
    given = None if form == "folder" else state
    for loaded, after, keys in ranks.run(load_rank, 2, 2, str(tmp_path), given):
        check_content(loaded, before)
        check_content(after, expected)
        assert keys == ["t", "s", "d"]


def assign_after_loading(rank, state):
    """Rows that stay keep their state, whether or not there was an update."""
    with torchkv.create("dist_sync") as kv:
        kv.load_state_dict(state)
        value = sparse([3, 21, FAR], torch.ones(3, 3), (2 * FAR, 3))
        kv.assign("t", value.to(torch.bfloat16))
        assigned = content(kv)
        step_tables(kv, [rank], 2, range(3, 5))
        found = content(kv)
        kv.barrier()
        kv.state_dict()
        text = str(kv)
        return assigned, found, text


def test_assign_after_loading():
    one = torchkv.create("device")
    table_store(one, range(2), 2)
    state = one.state_dict()
    value = sparse([3, 21, FAR], torch.ones(3, 3), (2 * FAR, 3))
    one.assign("t", value.to(torch.bfloat16))
    assigned = content(one)
    step_tables(one, range(2), 2, range(3, 5))
    for *found, text in ranks.run(assign_after_loading, 2, state):
        check_content(found[0], assigned)
        check_content(found[1], content(one))
        assert "? x 3" in text  # asks no server


def restore_states(rank):
    with torchkv.create("dist_sync") as kv:
        table_store(kv, [rank], 2)
        saved = kv.optimizer.state_dict()
        value = kv.pull("t")
        step_tables(kv, [rank], 2, [1])  # no new rows
        kv.optimizer.load_state_dict(saved)
        restored = kv.optimizer.state_dict()["state"]
        step_tables(kv, [rank], 2, [7])
        kv.barrier()
        other = outcome(lambda: kv.optimizer.load_state_dict(saved))
        return saved["state"], restored, value.values(), other


def test_the_optimizers_state_comes_back_by_id():
    for saved, restored, _, other in ranks.run(restore_states, 2):
        check_content(([], restored), ([], saved))
        assert other[0] == "ValueError" and "rows" in other[1]


# -- snapshots


def train_with_snapshots(rank, folder, num_steps):
    kv = torchkv.create("dist_sync", snapshot_dir=folder, snapshot_every="2 rounds")
    kv.init_rows("t", (3,), init=INIT)
    kv.init("s", sparse([4, 2], torch.ones(2, 3), SHAPE))
    kv.set_optimizer(optim.Adam(lr=0.1))
    start = kv.version("t")
    seen = {start: kv.pull(["t", "s"])}
    for step in range(start, num_steps):
        torch.manual_seed(10 * step + rank)
        kv.push(["t", "s"], [some_rows(SHAPE, 6), some_rows(SHAPE, 3)])
        seen[step + 1] = kv.pull(["t", "s"])
        time.sleep(0.05)  # snapshots are written in the background
    kv.barrier()
    kv.close()
    return seen


def test_a_job_goes_on_from_a_snapshot(tmp_path):
    expected = ranks.run(train_with_snapshots, 2, str(tmp_path / "a"), 9)[0]
    folder = str(tmp_path / "b")
    assert [*ranks.run(train_with_snapshots, 2, folder, 6)[0]] == [*range(7)]
    for seen in ranks.run(train_with_snapshots, 2, folder, 9):
        start = min(seen)
        assert start > 0 and start % 2 == 0
        assert [*seen] == [*range(start, 10)]
        for step, values in seen.items():
            for value, other in zip(values, expected[step], strict=True):
                check_same(value, other)


def load_after_a_snapshot(rank, folder, state, num_steps):
    kv = torchkv.create("dist_sync", snapshot_dir=folder, snapshot_every="2 rounds")
    table_store(kv, [rank], 2)
    time.sleep(0.2)
    kv.load_state_dict(state)
    loaded = content(kv)
    step_tables(kv, [rank], 2, range(3, 3 + num_steps))
    found = content(kv)
    kv.barrier()
    kv.close()
    return loaded, found


def test_a_loaded_store_replaces_that_of_a_snapshot(tmp_path):
    one = torchkv.create("device")
    table_store(one, range(2), 2)
    step_tables(one, range(2), 2, [20])
    state, before = one.state_dict(), content(one)
    step_tables(one, range(2), 2, range(3, 6))
    expected = content(one)
    for _ in range(2):  # the second begins from a snapshot
        for loaded, found in ranks.run(
            load_after_a_snapshot, 2, str(tmp_path), state, 3
        ):
            check_content(loaded, before)
            check_content(found, expected)


# -- embeddings

ROWS, DIM = 300, 8


def batch_of(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(ROWS, (8, 4), generator=generator)


def train_table(kv, positions, dense=False):
    """Of ids from 0, or of any ids; what its rows are at the end."""
    far = 0 if dense else FAR
    init = initializers.Normal(seed=1)
    kv.init_rows("table", (DIM,), num_rows=None, init=init)
    used = torch.arange(ROWS) + far
    if dense:
        weight = kv.row_sparse_pull("table", row_ids=torch.arange(ROWS) + FAR)
        kv.delete("table")
        kv.init("table", weight)
    table = torchkv.nn.StoreEmbedding(ROWS if dense else None, DIM, kv, "table")
    trainer = torchkv.Trainer(table, "adagrad", {"lr": 0.1}, kvstore=kv)
    for step in range(4):
        for rank in positions:
            ids = batch_of(step, rank)
            output = table(ids + far).mean(1)
            F.mse_loss(output, torch.ones_like(output)).backward()
        trainer.step()
        trainer.zero_grad()
    return kv.row_sparse_pull("table", row_ids=used), kv.num_rows("table")


def train_table_rank(rank):
    with torchkv.create("dist_sync") as kv:
        found = train_table(kv, [rank])
        kv.barrier()
        return found


def test_an_embedding_of_any_ids_learns_as_a_dense_one():
    expected, _ = train_table(torchkv.create("local"), range(2), dense=True)
    used = {int(id) for step in range(4) for rank in range(2)
            for id in batch_of(step, rank).flatten()}  # fmt: skip
    for rows, num_rows in ranks.run(train_table_rank, 2):
        torch.testing.assert_close(rows, expected)
        assert num_rows == len(used)


def make_embedding(rank):
    """A new key: the seed of each rank's torch is another one."""
    torch.manual_seed(rank)
    with torchkv.create("dist_sync") as kv:
        table = torchkv.nn.StoreEmbedding(None, 4, kv, "table")
        with torch.no_grad():
            found = table(torch.tensor([1, FAR]))
        kv.barrier()
        return found


def test_a_new_embedding_has_rank_0s_values():
    one, two = ranks.run(make_embedding, 2)
    assert torch.equal(one, two) and one.std() > 0


# -- random operations against a dict of rows


@pytest.mark.parametrize("seed", range(4))
def test_random_operations(seed):
    for failure in ranks.run(random_operations, 1 + seed % 3, seed):
        assert failure is None, failure


def random_operations(rank, seed):
    torch.manual_seed(seed)
    with torchkv.create("dist_sync") as kv:
        kv.init_rows(3, (2,), num_rows=30, init=INIT)
        initial = kv.row_sparse_pull(3, row_ids=torch.arange(30))
        rows = {}
        of_all = range(kv.num_workers)
        for _ in range(40):
            operation = int(torch.randint(5, ()))
            values = [some_rows((30, 2), int(torch.randint(5, ()))) for _ in of_all]
            ids = torch.randint(30, (len(of_all), 3))
            if operation == 0:
                kv.delete(3, row_ids=ids[rank])
                for id in ids.flatten().tolist():
                    rows.pop(id, None)
            elif operation == 1:
                kv.assign(3, values[rank])
                total, has = model_sum(values[:1], (30, 2), torch.float32)
                rows = {i: total[i] for i in has.nonzero().flatten().tolist()}
            else:
                kv.push(3, values[rank])
                total, has = model_sum(values, (30, 2), torch.float32)
                rows = {i: total[i] for i in has.nonzero().flatten().tolist()}
            if row_ids_of(kv) != sorted(rows):
                return f"rows {row_ids_of(kv)}, expected {sorted(rows)}"
            expected = initial.clone()
            for id, row in rows.items():
                expected[id] = row
            found = kv.row_sparse_pull(3, row_ids=ids[rank])
            if not torch.equal(found, expected[ids[rank]]):
                return f"{found} of {ids[rank]}, expected {expected[ids[rank]]}"
        kv.barrier()
        return None
