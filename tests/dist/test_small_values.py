"""Small values of a call travel together; nothing else about them differs."""

import os
import random

import pytest
import torch

import ranks
import torchkv
from counted import counted

KEYS = [f"k{number}" for number in range(30)]
SHAPES = [(3,), (2, 5), (), (1, 4, 2), (40,), (0, 3)]
DTYPES = [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.int32]
LARGE = "large"  # over both servers


def shape_of(key):
    return (40_000,) if key == LARGE else SHAPES[KEYS.index(key) % len(SHAPES)]


def dtype_of(key, dtypes):
    return torch.float32 if key == LARGE else dtypes[KEYS.index(key) % len(dtypes)]


def value(key, number, rank, dtypes):
    """Small integers, so that sums are exact; `number` is that of the push."""
    generator = torch.Generator().manual_seed(97 * number + 13 * rank)
    numbers = torch.randint(-4, 5, shape_of(key), generator=generator)
    return numbers.to(dtype_of(key, dtypes))


def zeros(key, dtypes):
    return torch.zeros(shape_of(key), dtype=dtype_of(key, dtypes))


def program(seed, keys):
    """Steps, each of calls on some keys; mostly of the same ones."""
    choose = random.Random(seed)
    steps = []
    for _ in range(40):
        kind = choose.choice(["pushpull", "pushpull", "push", "push, pull", "pull"])
        some = keys if choose.random() < 0.7 else choose.sample(keys, 7)
        alone = choose.random() < 0.15  # a call for each key
        steps.append((kind, some, alone))
        if choose.random() < 0.1:
            steps.append(("delete", [choose.choice(keys)], True))
    return steps


def expected(steps, num_ranks, dtypes, optimizer):
    """What is pulled in each step: that of one machine, with a value of each rank."""
    kv = torchkv.create("local")
    everything = sorted({key for _, keys, _ in steps for key in keys})
    kv.init(everything, [zeros(key, dtypes) for key in everything])
    if optimizer:
        kv.set_optimizer(**optimizer)
    seen = []
    for number, (kind, keys, _) in enumerate(steps):
        for key in keys:
            if kind == "delete":
                kv.delete(key)
                kv.init(key, zeros(key, dtypes))
            elif "push" in kind:
                values = [value(key, number, rank, dtypes) for rank in range(num_ranks)]
                kv.push(key, values)
        seen.append(kv.pull(keys) if "pull" in kind else None)
    return [*seen, kv.pull(everything)]


def count_lists(rank):
    keys = KEYS[:6]
    with torchkv.create("dist_sync") as kv:
        dtypes = [torch.float32]
        kv.init(keys, [zeros(key, dtypes) for key in keys])
        values = [value(key, 1, rank, dtypes) for key in keys]
        outs = [zeros(key, dtypes) for key in keys]
        calls = {
            "pushpull": lambda: kv.pushpull(keys, values, out=outs),
            "strided": lambda: kv.push(keys, list(map(strided, values))),
            "alone": lambda: [kv.push(key, values[0]) for key in keys[:1]],
        }
        counts = {name: counted(kv, call)["listed"] for name, call in calls.items()}
        kv.set_optimizer("sgd", learning_rate=1.0, max_norm=1.0)
        counts["max_norm"] = counted(kv, calls["pushpull"])["listed"]
        return counts


def test_which_values_travel_together():
    sizes = [4 * zeros(key, [torch.float32]).numel() for key in KEYS[:6]]
    for counts in ranks.run(count_lists, 1):
        assert counts == {
            "pushpull": sum(sizes),
            "strided": 0,
            "alone": 0,
            "max_norm": 0,
        }


def overlap(rank):
    keys = KEYS[:8]
    with torchkv.create("dist_sync") as kv:
        kv.init(keys, [torch.full((4,), float(i)) for i in range(8)])
        base = torch.full((20,), -1.0)
        outs = [base[2 * i : 2 * i + 4] for i in range(8)]
        before = base._version
        kv.pull(keys, out=outs)
        assert base._version > before
        copies = [torch.zeros(4) for _ in keys]
        work = kv.pull(keys, out=copies, async_op=True)
        copies[3].data = torch.zeros(4, dtype=torch.float64)
        work.wait()
        with torch.inference_mode():
            inference = [torch.zeros(4) for _ in keys]
        kv.pull(keys, out=inference)
        kv.barrier()
    return base.tolist(), torch.stack([c.float() for c in copies]), inference


def test_outs():
    for base, copies, inference in ranks.run(overlap, 2):
        # The later key wins where two share memory.
        assert base == [i // 2 for i in range(16)] + [7, 7, -1, -1]
        right = torch.arange(8.0).repeat_interleave(4).view(8, 4)
        assert torch.equal(copies, right)
        assert torch.equal(torch.stack(inference), right)


def strided(tensor):
    """A copy in which elements do not follow each other: it travels alone."""
    return tensor.repeat_interleave(2, -1)[..., ::2] if tensor.dim() else tensor


def run_step(kv, rank, number, kind, keys, dtypes, differ):
    values = [value(key, number, rank, dtypes) for key in keys]
    if differ and rank == number % 3:
        values = list(map(strided, values))
    outs = [torch.full_like(each, 7) for each in values]
    if kind == "pushpull":
        kv.pushpull(keys, values, out=outs)
    if kind.startswith("push") and kind != "pushpull":
        kv.push(keys, values)
    if kind.endswith(" pull") or kind == "pull":
        kv.pull(keys, out=outs)
    return outs


def run_program(rank, num_ranks, seed, dtypes, optimizer, differ=False):
    keys = [*KEYS, LARGE]
    steps = program(seed, keys)
    wanted = expected(steps, num_ranks, dtypes, optimizer)
    order = random.Random(rank)
    with torchkv.create("dist_sync") as kv:
        everything = sorted({key for _, keys, _ in steps for key in keys})
        kv.init(everything, [zeros(key, dtypes) for key in everything])
        if optimizer:
            kv.set_optimizer(**optimizer)
        kv.barrier()
        for number, (kind, keys, alone) in enumerate(steps):
            if kind == "delete":
                kv.delete(keys)
                kv.init(keys, [zeros(key, dtypes) for key in keys])
                continue
            if alone:
                outs = dict.fromkeys(keys)
                # Who waits for the others needs the order of the others.
                waits = kind in ("pushpull", "push, pull")
                ordered = keys if waits else order.sample(keys, len(keys))
                calls = [[key] for key in ordered]
            else:
                calls = [keys]
            for call in calls:
                pulled = run_step(kv, rank, number, kind, call, dtypes, differ)
                if alone:
                    outs[call[0]] = pulled[0]
            pulled = list(outs.values()) if alone else pulled
            for key, out, right in zip(
                keys, pulled, wanted[number] or pulled, strict=True
            ):
                assert torch.equal(out, right), (number, kind, key, out, right)
        kv.barrier()
        for key, out, right in zip(
            everything, kv.pull(everything), wanted[-1], strict=True
        ):
            assert torch.equal(out, right), key
        kv.barrier()
    return True


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_random_calls(num_ranks, seed):
    done = ranks.run(run_program, num_ranks, num_ranks, seed, DTYPES, None)
    assert done == [True] * num_ranks


def run_through_sockets(rank, *arguments):
    os.environ["TORCHKV_SHARED_MEMORY"] = "0"
    return run_program(rank, *arguments)


def test_through_sockets():
    done = ranks.run(run_through_sockets, 2, 2, 8, DTYPES, None)
    assert done == [True, True]


def test_ranks_whose_values_travel_differently():
    done = ranks.run(run_program, 2, 2, 7, DTYPES, None, True)
    assert done == [True, True]


@pytest.mark.parametrize(
    "optimizer",
    [
        {"optimizer": "sgd", "learning_rate": 0.5},
        {"optimizer": "sgd", "learning_rate": 0.25, "momentum": 0.5},
        {"optimizer": "adam", "learning_rate": 0.1},
    ],
    ids=["sgd", "momentum", "adam"],
)
def test_random_calls_with_an_optimizer(optimizer):
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    assert ranks.run(run_program, 2, 2, 5, dtypes, optimizer) == [True, True]


def add_all(rank, num_ranks):
    generator = random.Random(rank)
    with torchkv.create("dist_async") as kv:
        dtypes = [torch.float32]
        kv.init(KEYS, [zeros(key, dtypes) for key in KEYS])
        kv.set_optimizer("sgd", learning_rate=1.0)
        kv.barrier()
        total = {key: zeros(key, dtypes) for key in KEYS}
        for number in range(60):
            keys = KEYS if generator.random() < 0.8 else generator.sample(KEYS, 5)
            for key in keys:
                total[key] -= value(key, number, rank, dtypes)
            outs = [zeros(key, dtypes) for key in keys]
            values = [value(key, number, rank, dtypes) for key in keys]
            if generator.random() < 0.5:
                kv.pushpull(keys, values, out=outs)
            else:
                kv.push(keys, values)
        kv.barrier()
        pulled = dict(zip(KEYS, kv.pull(KEYS), strict=True))
        kv.barrier()
    return total, pulled


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_no_push_is_lost_or_counted_twice(num_ranks):
    results = ranks.run(add_all, num_ranks, num_ranks)
    for key in KEYS:
        right = sum(total[key] for total, _ in results)
        for _, pulled in results:
            assert torch.equal(pulled[key], right), key


def throw_for_one(rank):
    def update(key, pushed, stored):
        if key == "k4" and pushed[0] == 2 * 5:
            raise ValueError("five")
        stored += pushed

    keys = KEYS[:8]
    with torchkv.create("dist_sync") as kv:
        kv.init(keys, [torch.zeros(4)] * len(keys))
        kv.set_updater(update)
        kv.barrier()
        seen = []
        for number in range(1, 8):
            outs = [torch.zeros(4) for _ in keys]
            values = [torch.full((4,), float(number)) for _ in keys]
            try:
                kv.pushpull(keys, values, out=outs)
                seen.append([out[0].item() for out in outs])
            except torchkv.RemoteError as error:
                seen.append(str(error))
        kv.barrier()
        return seen


def test_an_updater_that_throws_for_one_key():
    for seen in ranks.run(throw_for_one, 2):
        sums = [2.0, 6.0, 12.0, 20.0, None, 42.0, 56.0]
        for number, (result, right) in enumerate(zip(seen, sums, strict=True), 1):
            if number == 5:
                assert "(key 'k4'" in result
                assert "ValueError: five" in result
            else:
                wrong = right - 10 if number > 5 else right
                assert result == [right] * 4 + [wrong] + [right] * 3


def save_between(rank, folder):
    keys = KEYS[:10]
    kv = torchkv.create("dist_sync", snapshot_dir=folder, snapshot_every="3 rounds")
    kv.init(keys, [torch.zeros(4)] * len(keys))
    kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
    kv.barrier()
    for number in range(1, 11):
        values = [torch.full((4,), float(number + i)) for i in range(len(keys))]
        kv.pushpull(keys, values, out=[torch.empty(4) for _ in keys])
    kv.barrier()
    kv.close()


def load_between(rank):
    keys = KEYS[:10]
    kv = torchkv.create("dist_sync")
    kv.init(keys, [torch.zeros(4)] * len(keys))
    kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
    kv.barrier()
    for _ in range(3):
        ones = [torch.ones(4)] * len(keys)
        kv.pushpull(keys, ones, out=[torch.empty(4) for _ in keys])
    state = kv.state_dict()
    before = [each.clone() for each in kv.pull(keys)]
    kv.pushpull(keys, [torch.ones(4)] * len(keys), out=[torch.empty(4) for _ in keys])
    after = kv.pull(keys)
    kv.load_state_dict(state)
    assert all(map(torch.equal, kv.pull(keys), before))
    kv.pushpull(keys, [torch.ones(4)] * len(keys), out=[torch.empty(4) for _ in keys])
    assert all(map(torch.equal, kv.pull(keys), after))
    kv.barrier()
    kv.close()
    return True


def test_states():
    assert ranks.run(load_between, 2) == [True, True]


def go_on(rank, folder):
    """A job after it begins with its last snapshot."""
    keys = KEYS[:10]
    kv = torchkv.create("dist_sync", snapshot_dir=folder, snapshot_every="3 rounds")
    with kv:
        kv.init(keys, [torch.zeros(4)] * len(keys))
        kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        kv.barrier()
        before = kv.pull(keys)
        step = kv.version(keys[0])
        ones = [torch.ones(4)] * len(keys)
        kv.pushpull(keys, ones, out=[torch.empty(4) for _ in keys])
        after = kv.pull(keys)
        kv.barrier()
    return step, [b[0].item() for b in before], [a[0].item() for a in after]


def test_snapshots(tmp_path):
    ranks.run(save_between, 2, str(tmp_path))
    values, velocities = [[0.0] * 10], [[0.0] * 10]
    for number in range(1, 11):
        pushed = [2.0 * (number + i) for i in range(10)]
        velocities.append(
            [0.5 * v + g for v, g in zip(velocities[-1], pushed, strict=True)]
        )
        values.append([w - v for w, v in zip(values[-1], velocities[-1], strict=True)])
    for step, before, after in ranks.run(go_on, 2, str(tmp_path), restart=1):
        assert step in (3, 6, 9)
        assert before == values[step]
        pushed = [0.5 * v + 2.0 for v in velocities[step]]
        assert after == [w - v for w, v in zip(before, pushed, strict=True)]
