"""What a store of several processes promises beside push and pull."""

import threading

import pytest
import torch

import ranks
import torchkv
from ranks import outcome

TYPES = ["dist_sync", "dist_async"]


def full(value):
    return torch.full((2, 3), float(value))


def create(type="dist_sync", **options):
    return torchkv.create(type, **options)


# -- updaters


def python_updater(rank, type):
    kv = create(type)
    seen = []

    def update(key, input, stored):
        seen.append((key, input[0, 0].item()))
        stored += input * 2

    kv.set_updater(update)
    keys = [5, 7, 9]
    kv.init(keys, [full(1)] * 3)
    kv.push(keys, [full(1)] * 3)
    kv.barrier()
    out = [full(0) for _ in keys]
    kv.pull(keys, out=out)
    kv.barrier()
    kv.close()
    return [o[1, 1].item() for o in out], sorted(seen)


def test_a_python_updater_runs_on_the_servers():
    (first, seen_first), (second, seen_second) = ranks.run(
        python_updater, 2, "dist_sync"
    )
    assert first == second == [5.0, 5.0, 5.0]
    # Each key on one of the servers, once, with the sum of both ranks.
    assert sorted(seen_first + seen_second) == [(5, 2.0), (7, 2.0), (9, 2.0)]


def test_a_python_updater_runs_once_for_each_push_of_dist_async():
    (first, seen_first), (second, seen_second) = ranks.run(
        python_updater, 2, "dist_async"
    )
    assert first == second == [5.0, 5.0, 5.0]
    assert sorted(seen_first + seen_second) == [
        (key, 1.0) for key in (5, 5, 7, 7, 9, 9)
    ]


@torch.jit.script
def add_twice(key: int, input: torch.Tensor, stored: torch.Tensor):
    stored.add_(input, alpha=2)


def script_updater(rank):
    kv = create()
    kv.set_updater(add_twice)
    kv.init(3, torch.zeros(100_000))
    kv.push(3, torch.ones(100_000) * (rank + 1))
    out = torch.empty(100_000)
    kv.pull(3, out=out)
    kv.close()
    return out.unique().tolist()


def test_a_torchscript_updater_gets_whole_values():
    assert ranks.run(script_updater, 2) == [[6.0]] * 2


class CountingUpdater(torch.nn.Module):
    """Adds the number of its call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, key: int, input: torch.Tensor, stored: torch.Tensor):
        self.calls += 1
        stored.add_(self.calls)


def script_updater_after_assign(rank):
    kv = create()
    kv.set_updater(torch.jit.script(CountingUpdater()))
    kv.init(3, torch.zeros(2))
    kv.push(3, torch.ones(2))
    kv.barrier()
    kv.assign(3, torch.zeros(2))
    kv.push(3, torch.ones(2))
    out = kv.pull(3)[0].item()
    kv.barrier()
    kv.close()
    return out


def test_assign_keeps_the_state_of_a_torchscript_updater():
    assert ranks.run(script_updater_after_assign, 2) == [2.0] * 2


def raising_updater(rank):
    kv = create()

    def update(key, input, stored):
        stored += 1
        raise ZeroDivisionError(f"no {key}")

    kv.set_updater(update)
    kv.init("w", full(0))
    results = [outcome(lambda: kv.pushpull("w", full(1), out=full(0)))]
    kv.push("w", full(1))
    results.append(outcome(lambda: kv.pull("w", out=full(0))))
    out = full(0)
    kv.pull("w", out=out)  # the error was reported
    kv.barrier()
    kv.close()
    return results, out[0, 0].item()


def test_an_updater_that_raises_reaches_all_pushers():
    for rank, (results, value) in enumerate(ranks.run(raising_updater, 2)):
        assert value == 2.0, rank
        for number, result in enumerate(results, 1):
            assert result[0] == "RemoteError"
            assert "the updater on rank " in result[1]
            assert "has raised ZeroDivisionError: no w" in result[1]
            assert f"(key 'w', round {number})" in result[1]


def forgotten_updater(rank):
    kv = create()
    kv.init([1, 2, 3, 4], [full(0)] * 4)
    if rank == 0:
        kv.set_updater(lambda key, input, stored: stored.add_(input))
    errors = []
    for key in (1, 2, 3, 4):
        errors.append(outcome(lambda key=key: kv.pushpull(key, full(1), full(0))))
    kv.barrier()
    kv.close()
    return errors


def test_a_rank_without_the_python_updater_is_named():
    first, second = ranks.run(forgotten_updater, 2)
    assert first == second
    failed = [error for error in first if error is not None]
    assert failed and len(failed) < 4  # those of rank 1's server
    for kind, text in failed:
        assert kind == "RemoteError"
        assert "rank 1 has not called set_updater" in text


def reentrant(rank):
    kv = create()
    kv.init("w", full(0))
    kv.set_updater(lambda key, input, stored: kv.push(key, input))
    result = outcome(lambda: kv.pushpull("w", full(1), full(0)))
    kv.close()
    return result


def test_an_updater_that_calls_its_store_is_refused():
    for kind, text in ranks.run(reentrant, 2):
        assert kind == "RemoteError"
        assert "from inside its own updater" in text


# -- optimizers


def train(rank, num_ranks, optimizer, options, steps):
    kv = create()
    sizes = {"a": (3,), "b": (40, 50), "c": (300, 301)}
    generator = torch.Generator().manual_seed(0)
    for key, size in sizes.items():
        kv.init(key, torch.randn(size, generator=generator), whole=optimizer == "lamb")
    kv.set_optimizer(optimizer, **options)
    out = {key: torch.empty(size) for key, size in sizes.items()}
    for step in range(steps):
        if step == steps // 2:
            kv.optimizer.lr = 0.5 * kv.optimizer.lr
        gradients = []
        for size in sizes.values():
            generator.manual_seed(step * 100 + rank)
            gradients.append(torch.randn(size, generator=generator))
        kv.pushpull(list(sizes), gradients, out=list(out.values()))
    kv.barrier()
    kv.close()
    return list(out.values())


def train_alone(num_ranks, optimizer, options, steps):
    kv = torchkv.create("local")
    sizes = {"a": (3,), "b": (40, 50), "c": (300, 301)}
    generator = torch.Generator().manual_seed(0)
    for key, size in sizes.items():
        kv.init(key, torch.randn(size, generator=generator))
    kv.set_optimizer(optimizer, **options)
    for step in range(steps):
        if step == steps // 2:
            kv.optimizer.lr = 0.5 * kv.optimizer.lr
        gradients = []
        for size in sizes.values():
            replicas = []
            for rank in range(num_ranks):
                generator.manual_seed(step * 100 + rank)
                replicas.append(torch.randn(size, generator=generator))
            gradients.append(replicas)
        kv.push(list(sizes), gradients)
    return [kv.pull(key) for key in sizes]


OPTIMIZERS = [
    ("sgd", {"learning_rate": 0.1, "momentum": 0.9}),
    ("adam", {"learning_rate": 0.01, "wd": 0.1}),
    ("lamb", {"learning_rate": 0.01}),
    ("sgd", {"learning_rate": 0.1, "accumulate": 2}),
]


@pytest.mark.parametrize("optimizer, options", OPTIMIZERS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_dist_sync_has_the_bits_of_as_many_replicas(num_ranks, optimizer, options):
    expected = train_alone(num_ranks, optimizer, options, 6)
    for values in ranks.run(train, num_ranks, num_ranks, optimizer, options, 6):
        for value, other in zip(values, expected, strict=True):
            assert torch.equal(value, other)


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_max_norm_limits_the_gradients_of_all_servers(max_norm):
    options = {"learning_rate": 0.1, "max_norm": max_norm, "skip_nonfinite": True}
    expected = train_alone(2, "sgd", options, 4)
    values = ranks.run(train, 2, 2, "sgd", options, 4)
    for one, two, alone in zip(*values, expected, strict=True):
        assert torch.equal(one, two)
        # The norm is summed over other parts, so its last bits may differ.
        torch.testing.assert_close(one, alone)


def skip_nonfinite(rank):
    kv = create()
    kv.init(["a", "b"], [torch.ones(3), torch.ones(100_000)])
    kv.set_optimizer("sgd", learning_rate=1.0, skip_nonfinite=True)
    bad = torch.ones(3)
    bad[0] = float("nan") if rank == 1 else 1
    out = [torch.empty(3), torch.empty(100_000)]
    kv.pushpull(["a", "b"], [bad, torch.ones(100_000)], out=out)
    skipped = [o.unique().tolist() for o in out]
    report = [(kv.optimizer.num_skipped, kv.optimizer.grad_norm)]
    kv.pushpull(["a", "b"], [torch.ones(3), torch.ones(100_000)], out=out)
    report.append((kv.optimizer.num_skipped, kv.optimizer.grad_norm))
    kv.set_optimizer("sgd", learning_rate=1.0)
    report.append((kv.optimizer.num_skipped, kv.optimizer.grad_norm))
    kv.close()
    return skipped, [o.unique().tolist() for o in out], report


def test_a_nonfinite_gradient_skips_the_step_on_all_servers():
    results = ranks.run(skip_nonfinite, 2)
    assert [result[:2] for result in results] == [([[1.0]] * 2, [[-1.0]] * 2)] * 2
    (*_, report), (*_, other) = results
    # The gradient has 100,003 elements of 2.
    assert report == [(1, None), (1, pytest.approx(400_012**0.5)), (1, None)]
    assert other == [(0, None)] * 3  # only rank 0 adds up the norms


def refuse_norm_in_async(rank):
    kv = create("dist_async")
    result = outcome(lambda: kv.set_optimizer("sgd", max_norm=1.0))
    kv.close()
    return result


def test_dist_async_refuses_max_norm():
    for kind, text in ranks.run(refuse_norm_in_async, 2):
        assert kind == "NotImplementedError"
        assert "use dist_sync" in text


# -- values


def half_replicas(rank):
    kv = create()
    kv.init("w", torch.zeros(5, dtype=torch.bfloat16))
    # 256 + 0.5 + 0.5 is 257 in fp32; bf16 has no bits for a half there.
    values = [torch.full((5,), v, dtype=torch.bfloat16) for v in (256, 0.5, 0.5, 1)]
    out = torch.empty(5, dtype=torch.bfloat16)
    kv.pushpull("w", values, out=out)
    kv.close()
    return out[0].item()


def test_replicas_of_half_precision_leave_a_rank_in_fp32():
    assert ranks.run(half_replicas, 2) == [516.0, 516.0]


def many_kinds(rank):
    kv = create()
    kv.init("fp64", torch.zeros(4, dtype=torch.float64))
    kv.init("int", torch.zeros(4, dtype=torch.int64))
    kv.init("empty", torch.zeros(0, 3))
    kv.init("scalar", torch.tensor(1.0))
    results = []
    out = torch.empty(4, dtype=torch.float64)
    kv.pushpull("fp64", torch.ones(4), out=out)
    results.append(out.tolist())
    whole = torch.empty(4, dtype=torch.int64)
    kv.pushpull("int", torch.tensor([1, 2, 3, 2**40]), out=whole)
    results.append(whole.tolist())
    kv.push("empty", torch.zeros(0, 3))
    results.append(tuple(kv.pull("empty").shape))
    kv.push("scalar", torch.tensor(2.5))
    results.append(kv.pull("scalar").item())
    strided = torch.zeros(4, 2)[:, 0]
    kv.pull("fp64", out=strided)
    results.append(strided.tolist())
    results.append(kv.keys())
    results.append((tuple(kv.shape("fp64")), kv.dtype("int"), len(kv), "x" in kv))
    kv.barrier()
    kv.close()
    return results


def test_values_of_all_kinds():
    expected = [
        [2.0] * 4,
        [2, 4, 6, 2**41],
        (0, 3),
        5.0,
        [2.0] * 4,
        ["fp64", "int", "empty", "scalar"],
        ((4,), torch.int64, 4, False),
    ]
    assert ranks.run(many_kinds, 2) == [expected] * 2


def repeated_keys(rank):
    kv = create()
    kv.init([3, 5], [full(0)] * 2)
    kv.push([3, 5, 3], [full(1), full(2), full(10)])
    a, b, c = full(0), full(0), full(0)
    kv.pull([3, 5, 3], out=[a, b, c])
    kv.close()
    return [t[0, 0].item() for t in (a, b, c)]


def test_repeated_keys_are_one_update():
    assert ranks.run(repeated_keys, 2) == [[22.0, 4.0, 22.0]] * 2


def asynchronous(rank):
    kv = create()
    kv.init("w", full(0))
    out = full(0)
    work = kv.push("w", full(1), async_op=True)
    work.wait()
    done = work.is_completed()
    work = kv.pushpull("w", full(1), out=out, async_op=True)
    work.wait()
    pulled = kv.pull("w", out=full(0), async_op=True)
    pulled.wait()
    kv.close()
    return done, out[0, 0].item()


def test_async_op_returns_a_work():
    assert ranks.run(asynchronous, 2) == [(True, 2.0)] * 2


def overwritten(rank):
    kv = create()
    kv.init("w", torch.zeros(300_000))
    gradient = torch.ones(300_000)
    for _ in range(3):
        kv.push("w", gradient)
        gradient.zero_()
        gradient += 1
    kv.push("w", gradient)
    gradient.zero_()
    out = kv.pull("w")
    kv.close()
    return out.unique().tolist()


def test_a_pushed_tensor_may_be_overwritten():
    assert ranks.run(overwritten, 2) == [[2.0]] * 2


def negated(rank):
    kv = create()
    kv.init("w", torch.tensor([1.0, 2.0]))
    out = torch._neg_view(torch.zeros(2))
    assert out.is_neg()
    kv.pull("w", out=out)
    kv.close()
    return out.tolist()


def test_an_out_may_have_the_negative_bit():
    assert ranks.run(negated, 2) == [[1.0, 2.0]] * 2


def barrier_beside_a_pull(rank):
    kv = create(timeout=20)
    kv.init("w", full(0))
    values = []
    thread = threading.Thread(
        target=lambda: values.append(kv.pull("w", min_version=1)[0, 0].item())
    )
    thread.start()
    kv.barrier()  # for pushes, not for what waits for one
    assert not values
    kv.push("w", full(1))
    thread.join()
    kv.barrier()
    kv.close()
    return values


def test_a_barrier_does_not_wait_for_a_pull_of_another_thread():
    assert ranks.run(barrier_beside_a_pull, 2) == [[2.0]] * 2


# -- errors before anything is sent


def refused(rank):
    kv = create()
    kv.init("w", full(0))
    results = [
        outcome(lambda: kv.push("x", full(1))),
        outcome(lambda: kv.push("w", torch.ones(2))),
        outcome(lambda: kv.push(3, full(1))),
        outcome(lambda: kv.init("w", full(0))),
        outcome(lambda: kv.push("w", [])),
    ]
    kv.push("w", full(1))
    value = kv.pull("w")[0, 0].item()
    kv.close()
    return results, value


def share(rank):
    kv = create()
    kv.init("w", full(0))
    weight = full(3)
    results = [
        outcome(lambda: kv.init("x", weight, share=True)),
        outcome(lambda: kv.assign("w", weight, share=True)),
    ]
    kv.close()
    return results


def test_sharing_is_refused():
    text = (
        "{}: expected share=False, as this store has its values on servers, but got "
        "True (key '{}')"
    )
    expected = [
        ("NotImplementedError", text.format("init", "x")),
        ("NotImplementedError", text.format("assign", "w")),
    ]
    assert ranks.run(share, 2) == [expected] * 2


def test_wrong_calls_are_refused_as_on_one_machine():
    kv = torchkv.create("local")
    kv.init("w", full(0))
    expected = [
        outcome(lambda: kv.push("x", full(1))),
        outcome(lambda: kv.push("w", torch.ones(2))),
        outcome(lambda: kv.push(3, full(1))),
        outcome(lambda: kv.init("w", full(0))),
        outcome(lambda: kv.push("w", [])),
    ]
    assert ranks.run(refused, 2) == [(expected, 2.0)] * 2
