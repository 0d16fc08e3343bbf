"""Snapshots in the background, and jobs that go on from them."""

import os
import random
import re
import signal
import time

import pytest
import torch

import ranks
import torchkv
from three_keys import SIZES, equal

STEPS = 24


def train(rank, folder, progress, every="2 rounds", optimizer="adam", pause=0.0):
    kv = torchkv.create(
        "dist_sync",
        heartbeat=0.5,
        snapshot_dir=folder,
        snapshot_every=every,
    )
    generator = torch.Generator().manual_seed(0)
    keys = list(SIZES)
    kv.init(keys, [torch.randn(SIZES[key], generator=generator) for key in keys])
    kv.set_optimizer(optimizer, learning_rate=0.01)
    out = [torch.empty(SIZES[key]) for key in keys]
    start = kv.version("a")
    for step in range(start, STEPS):
        kv.optimizer.lr = 0.01 / (1 + step)
        gradients = []
        for key in keys:
            generator.manual_seed(step * 100 + rank)
            gradients.append(torch.randn(SIZES[key], generator=generator))
        kv.pushpull(keys, gradients, out=out)
        if rank == 0 and progress:
            with open(progress, "a") as file:
                file.write(f"{step}\n")
            time.sleep(0.005)
        time.sleep(pause)
    kv.pull(keys, out=out)
    kv.barrier()
    kv.close()
    return start, out


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    (start, values), _ = ranks.run(train, 2, str(folder), None)
    assert start == 0
    return values


def test_a_restarted_job_goes_on_from_the_last_snapshot(tmp_path, undisturbed):
    folder = str(tmp_path / "snapshots")
    ranks.run(train, 2, folder, None, "2 rounds", "adam", 0.02)
    # All steps are done: what is left are those since the last snapshot, which a busy
    # machine writes late.
    starts = []
    for start, values in ranks.run(train, 2, folder, None, restart=1):
        starts.append(start)
        assert equal(values, undisturbed)
    assert 0 < starts[0] <= STEPS and starts[0] == starts[1]


def kill_and_restart(tmp_path, undisturbed, seed):
    r = random.Random(seed)
    folder, progress = str(tmp_path / "snapshots"), tmp_path / "progress"
    restart, resumed = 0, []
    for restart in range(3):
        with ranks.Ranks(train, 2, folder, str(progress), restart=restart) as job:
            steps = r.randint(2, 7)
            end = time.monotonic() + 30
            before = progress.read_text().count("\n") if progress.exists() else 0
            while time.monotonic() < end:
                done = progress.read_text().count("\n") if progress.exists() else 0
                if done >= before + steps:
                    break
                job.check()
                time.sleep(0.001)
            time.sleep(r.uniform(0, 0.01))
            victim = r.randrange(2)
            assert job.is_alive(victim)  # it has not ended before
            job.kill(victim, signal.SIGKILL)
    for start, values in ranks.run(train, 2, folder, None, restart=restart + 1):
        resumed.append(start)
        assert equal(values, undisturbed), (seed, start)
    assert resumed[0] == resumed[1]
    return resumed[0]


def test_sigkill_at_random_moments(tmp_path, undisturbed):
    starts = []
    for seed in range(2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        starts.append(kill_and_restart(folder, undisturbed, seed))
    assert any(starts)


@pytest.mark.slow
def test_sigkill_at_many_random_moments(tmp_path, undisturbed):
    for seed in range(100, 117):  # of three kills each
        folder = tmp_path / str(seed)
        folder.mkdir()
        kill_and_restart(folder, undisturbed, seed)


def test_two_snapshots_are_kept(tmp_path):
    folder = tmp_path / "snapshots"
    ranks.run(train, 2, str(folder), None, "1 round", "sgd", 0.1)
    names = sorted(os.listdir(folder))
    manifests = [name for name in names if name.startswith("manifest-")]
    assert len(manifests) in (2, 3) and not any(name.endswith(".new") for name in names)
    assert len(names) <= 3 * 3


class Counter(torch.nn.Module):
    """Adds what is pushed; with `counts`, it counts its calls."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts = counts
        self.calls = 0

    def forward(self, key: str, input: torch.Tensor, stored: torch.Tensor) -> None:
        if self.counts:
            self.calls += 1
        stored.add_(input)


def push_five_times(kv):
    for _ in range(5):
        kv.pushpull("w", torch.ones(3))
        time.sleep(0.05)
    value = kv.pull("w")
    kv.barrier()
    kv.close()
    return value[0].item()


def push_with_module(rank, folder, counts):
    kv = torchkv.create("dist_sync", snapshot_dir=folder, snapshot_every="1 round")
    kv.set_updater(torch.jit.script(Counter(counts)))
    kv.init("w", torch.zeros(3))
    return push_five_times(kv)


@pytest.mark.parametrize("counts", [False, True])
def test_snapshots_refuse_a_module_that_changes_itself(tmp_path, counts):
    """They could not restore its attributes."""
    assert ranks.run(push_with_module, 2, str(tmp_path), counts) == [10.0] * 2
    has_snapshot = any(name.startswith("manifest-") for name in os.listdir(tmp_path))
    assert has_snapshot is not counts


def push_without_a_folder(rank, folder):
    kv = torchkv.create("dist_sync", snapshot_dir=folder, snapshot_every="1 round")
    kv.init("w", torch.zeros(3))
    if rank == 1:
        os.rmdir(folder)
    kv.barrier()
    return push_five_times(kv)


def test_a_snapshot_that_is_not_written_keeps_nobody_waiting(tmp_path):
    # run() waits for less time than the snapshot's time-out.
    values = ranks.run(push_without_a_folder, 2, str(tmp_path / "snapshots"))
    assert values == [2.0] * 2


def damage(folder, prefix):
    newest = max(
        (name for name in os.listdir(folder) if re.match(prefix, name)),
        key=lambda name: os.stat(folder / name).st_mtime,
    )
    content = bytearray((folder / newest).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / newest).write_bytes(bytes(content))


def test_a_damaged_manifest_is_passed_over(tmp_path, undisturbed):
    folder = tmp_path / "snapshots"
    ranks.run(train, 2, str(folder), None)
    damage(folder, "manifest-")
    for start, values in ranks.run(train, 2, str(folder), None, restart=1):
        assert start < STEPS
        assert equal(values, undisturbed)


def read_damaged(rank, folder):
    try:
        torchkv.create(
            "dist_sync", snapshot_dir=folder, snapshot_every="1 round", timeout=5
        )
    except ValueError as error:
        return str(error)


def test_a_damaged_shard_is_an_error(tmp_path):
    folder = tmp_path / "snapshots"
    ranks.run(train, 2, str(folder), None)
    damage(folder, r"shard-\d+-1-")
    first, second = ranks.run(read_damaged, 2, str(folder), restart=1)
    assert first is None and "shard-" in second and "damaged" in second


def read_other_version(rank, folder):
    return ranks.outcome(
        lambda: torchkv.create(
            "dist_sync", snapshot_dir=folder, snapshot_every="1 round", timeout=5
        )
    )


def test_snapshots_of_another_version_are_refused(tmp_path):
    folder = tmp_path / "snapshots"
    ranks.run(train, 2, str(folder), None)
    for path in folder.iterdir():
        content = path.read_bytes()
        assert content.startswith(b"torchkv snapshot 2\n")
        path.write_bytes(content.replace(b"snapshot 2", b"snapshot 1", 1))
    (name, text), _ = ranks.run(read_other_version, 2, str(folder), restart=1)
    assert name == "NotImplementedError"
    assert "another version of torchkv" in text


def create_with_snapshots_on_one_rank(rank, folder, who):
    options = {"snapshot_dir": folder, "snapshot_every": "1 round"}
    try:
        kv = torchkv.create("dist_sync", timeout=20, **(options if rank == who else {}))
        kv.init("w", torch.zeros(2))
        kv.barrier()
    except (ValueError, torchkv.RemoteError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("who", [0, 1])
def test_all_ranks_take_snapshots_or_none(tmp_path, who):
    errors = ranks.run(create_with_snapshots_on_one_rank, 2, str(tmp_path), who)
    if who == 1:
        assert "snapshot_dir on all ranks or on none, but rank 0 has none" in errors[1]
    else:
        assert any("it alone with or without snapshot_dir" in str(e) for e in errors)


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"snapshot_dir": "x"}, "together"),
        ({"snapshot_every": "3 rounds"}, "together"),
        ({"snapshot_dir": "x", "snapshot_every": "often"}, "'100 rounds' or '30s'"),
        ({"snapshot_dir": "x", "snapshot_every": "1.5 rounds"}, "'100 rounds'"),
    ],
)
def test_wrong_options(options, expected):
    with pytest.raises(ValueError, match=expected):
        torchkv.create("dist_sync", **options)


def snapshot_then_load(rank, folder, saved, loads):
    kv = torchkv.create("dist_sync", snapshot_dir=folder, snapshot_every="1 rounds")
    keys, sizes = ["a", "big"], [3, 40_000]
    if loads:
        kv.load(saved)
        values = [kv.pull(key).unique().tolist() for key in keys]
        kv.push(keys, [torch.ones(size) for size in sizes])
    else:
        kv.init(keys, [torch.full((size,), 5.0) for size in sizes])
        kv.save(saved)
        kv.set_optimizer("sgd", learning_rate=1.0)
        values = []
        for _ in range(3):
            kv.push(keys, [torch.ones(size) for size in sizes])
            values = [kv.pull(key).unique().tolist() for key in keys]
            time.sleep(0.1)
    result = values, [kv.pull(key).unique().tolist() for key in keys]
    kv.barrier()
    kv.close()
    return result


def test_load_replaces_what_a_snapshot_restored(tmp_path):
    """The values, and the optimizer, which the saved store does not have."""
    folders = str(tmp_path / "snapshots"), str(tmp_path / "saved")
    ranks.run(snapshot_then_load, 2, *folders, False)
    for values, pushed in ranks.run(snapshot_then_load, 2, *folders, True):
        assert values == [[5.0], [5.0]]
        assert pushed == [[2.0], [2.0]]  # the sum


def load_then_train(rank, folder, goes_on):
    """What init says of keys that load_state_dict has made anew."""
    kv = torchkv.create("dist_sync", snapshot_dir=folder, snapshot_every="1 rounds")
    sizes = {"small": 3, "apart": 400_000, "one server": 400_000}
    keys = list(sizes)
    for key, size in sizes.items():
        kv.init(key, torch.zeros(size), whole=key == "one server")
    if not goes_on:
        kv.load_state_dict(kv.state_dict())
        for _ in range(3):
            kv.push(keys, [torch.ones(size) for size in sizes.values()])
            kv.pull(keys)
            time.sleep(0.1)
    kv.barrier()
    values = [kv.pull(key).unique().tolist() for key in keys]
    kv.close()
    return values


def test_a_job_that_loads_goes_on_from_its_snapshot(tmp_path):
    ranks.run(load_then_train, 2, str(tmp_path), False)
    for values in ranks.run(load_then_train, 2, str(tmp_path), True, restart=1):
        assert values == [[2.0]] * 3


def versions(rank):
    kv = torchkv.create("dist_async")
    kv.init("w", torch.zeros(3))
    seen = [kv.version("w")]
    kv.set_optimizer("sgd", learning_rate=1.0)
    kv.barrier()
    kv.push("w", torch.ones(3))
    kv.pull("w", min_version=-1)  # as 0
    out = kv.pull("w", min_version=2)
    seen.append(kv.version("w"))
    kv.barrier()
    kv.close()
    return seen, out[0].item()


def test_pull_waits_for_min_version():
    assert ranks.run(versions, 2) == [([0, 2], -2.0)] * 2


def test_min_version_on_one_machine():
    kv = torchkv.create("local")
    kv.init("w", torch.zeros(3))
    kv.push("w", torch.ones(3))
    assert kv.version("w") == 1
    assert kv.pull("w", min_version=1)[0] == 1
    with pytest.raises(ValueError, match="expected at least version 2"):
        kv.pull("w", min_version=2)
