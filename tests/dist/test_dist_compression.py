"""Gradient compression in stores of several processes: what each rank sends."""

import os
import random
import threading

import pytest
import torch

import ranks
import torchkv
import usage
from compression_model import ALL, Model
from counted import counted
from ranks import outcome
from torchkv import optim
from torchkv.compression import FP8, FP16, Int4, OneBit, TopK, TwoBit

TYPES = ["dist_sync", "dist_async"]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# The last one is split over the servers, not at the codecs' blocks.
SHAPES = [(), (7,), (0,), (37, 83), (1025, 31)]


def gradient(shape, dtype, *seeds):
    """Normally distributed numbers, of which some are zero."""
    seed = random.Random(repr((shape, seeds))).getrandbits(31)
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator)
    return torch.where(numbers.abs() < 0.125, 0.0 * numbers, numbers).to(dtype)


def known_sequence(rank, type, threshold, scale):
    with torchkv.create(type) as kv:
        kv.init(3, torch.zeros(2, 3))
        kv.set_gradient_compression({"type": "2bit", "threshold": threshold})
        kv.set_updater(lambda key, input, stored: stored.add_(input * scale))
        seen = []
        for value in (0.4, 0.1, 0.2, 0.3):
            kv.push(3, torch.full((2, 3), value))
            kv.barrier()
            seen.append(kv.pull(3))
            kv.barrier()
        return seen


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_known_sequence_of_2bit(type, num_ranks):
    for seen in ranks.run(known_sequence, num_ranks, type, 0.5, 3):
        for value, times in zip(seen, [0, 0.5, 0.5, 1.0], strict=True):
            assert torch.equal(value, torch.full((2, 3), 3 * num_ranks * times))


def train(kv, codec, dtype, replicas):
    """Four pushes of keys of all shapes; what they are pulled as after each."""
    keys = [str(shape) for shape in SHAPES]
    kv.init(keys, [gradient(shape, dtype, 99) for shape in SHAPES])
    kv.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)
    kv.set_gradient_compression(codec)
    seen = []
    for step in range(4):
        kv.push(
            keys,
            [[gradient(shape, dtype, step, i) for i in replicas] for shape in SHAPES],
        )
        seen.append(kv.pull(keys))
    return seen


def train_all(rank, num_ranks):
    result = []
    for codec in ALL:
        for dtype in DTYPES:
            with torchkv.create("dist_sync") as kv:
                result.append(train(kv, codec, dtype, [rank]))
    return result


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_same_bits_as_on_one_machine(num_ranks):
    expected = []
    for codec in ALL:
        for dtype in DTYPES:
            kv = torchkv.create("device")
            expected.append(train(kv, codec, dtype, range(num_ranks)))
    for found in ranks.run(train_all, num_ranks, num_ranks):
        for mine, theirs in zip(found, expected, strict=True):
            for values, others in zip(mine, theirs, strict=True):
                for value, other in zip(values, others, strict=True):
                    assert torch.equal(value, other)


def train_with(rank, num_ranks, options):
    with torchkv.create("dist_sync") as kv:
        kv.init("w", torch.zeros(37, 83))
        kv.set_optimizer(optim.SGD(**options))
        kv.set_gradient_compression(TwoBit(0.5))
        model = [Model(TwoBit(0.5), (37, 83)) for _ in range(num_ranks)]
        plain = torchkv.create("local")
        plain.init("w", torch.zeros(37, 83))
        plain.set_optimizer(optim.SGD(**options))
        for step in range(5):
            values = [
                gradient((37, 83), torch.float32, step, i) for i in range(num_ranks)
            ]
            out = torch.empty(37, 83)
            kv.pushpull("w", values[rank], out=out)
            sent = [of.sum([value]) for of, value in zip(model, values, strict=True)]
            plain.push("w", sent)
            torch.testing.assert_close(out, plain.pull("w"))
        if "max_norm" in options and rank == 0:  # which knows it
            norm = kv.optimizer.grad_norm
            assert norm == pytest.approx(plain.optimizer.grad_norm)
        return True


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.5, "momentum": 0.5, "weight_decay": 0.125},
        {"lr": 0.5, "accumulate": 3},
        {"lr": 0.5, "max_norm": 0.25},
        {"lr": 0.5, "clip_value": 0.25, "rescale_grad": 2.0},
    ],
    ids=str,
)
def test_an_optimizer_steps_with_what_was_sent(options):
    assert ranks.run(train_with, 2, 2, options) == [True, True]


def push_replicas(rank):
    """Replicas are added up first; dtypes other than the key's, and strides."""
    shape = (64, 33)
    with torchkv.create("dist_sync") as kv:
        kv.init("w", torch.zeros(shape))
        kv.set_gradient_compression(FP16())
        model = [Model(FP16(), shape) for _ in range(2)]
        for step in range(3):
            lists = [
                [gradient(shape, torch.float32, step, i, j) for j in range(3)]
                for i in range(2)
            ]
            kv.push("w", lists[rank])
            sums = [a + b + c for a, b, c in lists]
            sent = [of.sum([value]) for of, value in zip(model, sums, strict=True)]
            assert torch.equal(kv.pull("w"), sent[0] + sent[1])
        for step in range(3, 6):
            values = [gradient(shape, torch.float64, step, i) for i in range(2)]
            kv.push("w", values[rank].t().contiguous().t())
            sent = [of.sum([value]) for of, value in zip(model, values, strict=True)]
            assert torch.equal(kv.pull("w"), sent[0] + sent[1])
        values = [torch.full(shape, i + 2) for i in range(2)]  # of int64
        kv.push("w", values[rank])
        sent = [of.sum([value]) for of, value in zip(model, values, strict=True)]
        assert torch.equal(kv.pull("w"), sent[0] + sent[1])
    return True


def test_replicas_dtypes_and_strides():
    assert ranks.run(push_replicas, 2) == [True, True]


def push_alone(rank, way):
    """Each rank's pushes, one after the other: what they add up to."""
    with torchkv.create("dist_async") as kv:
        kv.init("w", torch.zeros(70_000))
        kv.set_optimizer("sgd", learning_rate=1.0)
        kv.set_gradient_compression(TopK(ratio=0.25))
        total = torch.zeros(70_000)
        for step in range(8):
            value = gradient((70_000,), torch.float32, step, rank)
            total -= value
            if way == "async_op":
                kv.push("w", value, async_op=True).wait()
            else:
                kv.push("w", value)
                value.zero_()  # which the store has read
        kv.set_gradient_compression(FP16())  # sends nearly all that is left
        kv.push("w", torch.zeros(70_000))
        kv.barrier()
        return total, kv.pull("w")


@pytest.mark.parametrize("way", ["push", "async_op"])
def test_nothing_is_lost(way):
    found = ranks.run(push_alone, 2, way)
    expected = sum(total for total, _ in found)
    for _, value in found:
        torch.testing.assert_close(value, expected, rtol=0, atol=2e-3)


GROUPS = [TwoBit(0.5), {"keys": ["v"], "type": "none"}, {"keys": ["u"], "type": Int4()}]


def mixed(rank):
    """Ranks and keys that compress otherwise, or not at all."""
    keys = ["w", "v", "u"]
    with torchkv.create("dist_sync") as kv:
        kv.set_gradient_compression(GROUPS if rank == 0 else None)
        kv.init(keys, [torch.zeros(20_000)] * 3)
        out = [torch.empty(20_000) for _ in keys]
        kv.pushpull(keys, [torch.full((20_000,), 0.7)] * 3, out=out)
        first = [value.unique().tolist() for value in out]
        kv.set_gradient_compression(None)  # which drops the residuals
        kv.push(keys, [torch.ones(20_000)] * 3)
        return first, [value.unique().tolist() for value in kv.pull(keys)]


def test_each_key_and_rank_has_its_own_compression():
    for first, second in ranks.run(mixed, 2):
        w, v, u = (pytest.approx(value) for value in (0.5 + 0.7, 1.4, 1.4))
        assert first == [[w], [v], [u]]
        assert second == [[2.0]] * 3


def bytes_sent(rank, codec):
    os.environ["TORCHKV_SHARED_MEMORY"] = "0"
    with torchkv.create("dist_sync") as kv:
        kv.init("w", torch.zeros(1_000_000))
        kv.set_gradient_compression(codec)
        value = gradient((1_000_000,), torch.float32, rank)
        counts = counted(kv, lambda: [kv.push("w", value) for _ in range(4)])
        return {name: count / 4 for name, count in counts.items()}


@pytest.mark.parametrize(
    ("codec", "bits"),
    [
        (None, 32),
        (OneBit(), 1),
        (TwoBit(), 2),
        (FP16(), 16),
        (FP8(), 8 + 32 / 1024),
        (Int4(), 4 + 32 / 128),
        (TopK(ratio=0.01), 0.01 * 48 + 64 / 1024),
    ],
    ids=str,
)
def test_the_bytes_that_a_push_sends(codec, bits):
    for counts in ranks.run(bytes_sent, 2, codec):
        # Half of the elements are on the other server.
        assert counts["sent"] == pytest.approx(500_000 * bits / 8, rel=0.01)
        assert counts["summed"] == (0 if codec else 4_000_000)


def refused(rank):
    with torchkv.create("dist_sync") as kv:
        kv.set_gradient_compression([FP16(), {"keys": ["x"], "type": "2bit"}])
        kv.init(["w", "n"], [torch.zeros(4), torch.zeros(4, dtype=torch.int64)])
        found = [outcome(lambda: kv.push("w", torch.ones(4)))]
        kv.set_gradient_compression(FP16())
        found += [
            outcome(lambda: kv.push(["w", "n"], [torch.ones(4)] * 2)),
            outcome(
                lambda: kv.set_gradient_compression(
                    [FP16(), {"keys": ["y"], "type": "1bit"}]
                )
            ),
        ]
        skips = optim.SGD(lr=1.0, skip_nonfinite=True)
        kv.set_gradient_compression(None)
        kv.set_optimizer(skips)
        found.append(outcome(lambda: kv.set_gradient_compression(FP16())))
        kv.set_optimizer(optim.SGD(lr=1.0))
        kv.set_gradient_compression(FP16())
        found.append(outcome(lambda: kv.set_optimizer(skips)))
        kv.push("w", torch.ones(4))
        return found, kv.pull("w").tolist(), kv.gradient_compression


def test_refused_calls_change_nothing():
    for found, value, shown in ranks.run(refused, 2):
        unknown, dtype, unknown_group, late, early = found
        assert unknown[0] == "KeyError" and "'x'" in unknown[1]
        assert dtype[0] == "TypeError" and "(key 'n')" in dtype[1]
        assert unknown_group[0] == "KeyError" and "'y'" in unknown_group[1]
        for error in (late, early):
            assert error[0] == "NotImplementedError" and "skip_nonfinite" in error[1]
        assert value == [-2.0] * 4
        assert shown == FP16()


def push_from_threads(rank):
    """Threads of one rank share a key's residual."""
    with torchkv.create("dist_async") as kv:
        kv.init("w", torch.zeros(5_000))
        kv.set_optimizer("sgd", learning_rate=1.0)
        kv.set_gradient_compression(OneBit(0.0))

        def push():
            for _ in range(20):
                kv.push("w", torch.full((5_000,), -0.25))

        threads = [threading.Thread(target=push) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        kv.barrier()
        return kv.pull("w")


def test_threads():
    for value in ranks.run(push_from_threads, 2):
        # 120 pushes of a quarter, less what the two residuals have.
        torch.testing.assert_close(value, torch.full((5_000,), 30.0), rtol=0, atol=2.0)


def forget(rank):
    with torchkv.create("dist_sync") as kv:
        seen = []
        kv.set_gradient_compression(TwoBit(1.0))
        for _ in range(2):
            kv.init("w", torch.zeros(3))
            kv.push("w", torch.full((3,), 0.75))
            seen.append(kv.pull("w").tolist())
            kv.delete("w")
        return seen


def test_a_deleted_key_takes_its_residual_along():
    assert ranks.run(forget, 2) == [[[0.0] * 3] * 2] * 2


def free_lists(rank):
    keys = ["large", "small", "smaller"]  # the last two travel together
    values = [torch.ones(1_000_000), torch.ones(3), torch.ones(2)]
    with torchkv.create("dist_sync") as kv:
        kv.set_gradient_compression(TwoBit(1.0))
        uses = []
        for _ in range(8):
            kv.init(keys, values)
            kv.push(keys, values)
            kv.pull(keys)
            kv.delete(keys)
            uses.append(usage.allocated_bytes())
        return uses


def test_the_residuals_of_deleted_keys_are_freed():
    for uses in ranks.run(free_lists, 2):
        assert uses[-1] - uses[1] < 4_000_000, uses  # a residual


def train_by_trainer(rank):
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 32)
    with torchkv.create("dist_sync") as kv:
        trainer = torchkv.Trainer(
            model,
            "sgd",
            {"learning_rate": 0.125},
            kvstore=kv,
            compression_params={"type": "2bit", "threshold": 0.0025},
        )
        for step in range(20):
            inputs = gradient((16, 64), torch.float32, step, rank)
            model(inputs).square().mean().backward()
            trainer.step(1)
        return [parameter.detach().clone() for parameter in model.parameters()]


def test_the_trainer():
    first, second = ranks.run(train_by_trainer, 2)
    torch.manual_seed(0)
    before = list(torch.nn.Linear(64, 32).parameters())
    for one, other, start in zip(first, second, before, strict=True):
        assert torch.equal(one, other)
        # Both ranks send 0.0025 or nothing, of which the eighth is subtracted.
        units = (one - start) / (0.0025 / 8)
        assert units.abs().max() >= 1
        torch.testing.assert_close(units, units.round(), rtol=0, atol=0.02)
