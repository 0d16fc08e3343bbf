"""set_gradient_compression: what is added up, what is kept, and what is refused."""

import copy
import math
import threading

import pytest
import torch

import torchkv
from compression_model import ALL, Model, each_float, some
from helpers import assert_same, full, run_threads, script, stored
from torchkv import optim
from torchkv.compression import FP8, FP16, Int4, OneBit, TopK, TwoBit


@pytest.fixture
def kv(device_kv):
    """An empty store of type device, of one place or several."""
    return device_kv


# -- the contract


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_the_known_sequence_of_2bit(kv, num_workers):
    scale = 3
    kv.init(3, full(0))
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.set_updater(lambda key, input, stored: stored.add_(input * scale))
    for value, times in [(0.4, 0), (0.1, 0.5), (0.2, 0.5), (0.3, 1.0)]:
        kv.push(3, [full(value)] * num_workers)
        assert_same(stored(kv, 3), full(scale * num_workers * times))
    residuals = _residuals(kv, "3")
    assert len(residuals) == num_workers
    for residual in residuals:
        torch.testing.assert_close(residual, full(0), rtol=0, atol=1e-7)


@pytest.mark.parametrize("value", [0.5, -0.5, 0.6, -7.0, 0.49, -0.49, 0.0])
def test_2bit_sends_the_threshold_from_it_on(kv, value):
    kv.init(3, full(9))
    kv.set_gradient_compression(TwoBit(0.5))
    kv.push(3, full(value))
    expected = math.copysign(0.5, value) if abs(value) >= 0.5 else 0
    assert_same(stored(kv, 3), full(expected))


@pytest.mark.parametrize("threshold", [0.5, 0.0, -2.0])
@pytest.mark.parametrize("above", [-1.0, 0.0, 1.0])
def test_1bit_sends_one_above_the_threshold(kv, threshold, above):
    kv.init(3, full(9))
    kv.set_gradient_compression({"type": "1bit", "threshold": threshold})
    kv.push(3, full(threshold + above))
    assert_same(stored(kv, 3), full(1 if above > 0 else -1))


def test_init_and_pull_are_not_compressed(kv):
    kv.set_gradient_compression(OneBit())
    kv.init(3, full(0.3))
    assert_same(stored(kv, 3), full(0.3))
    out = full(0)
    kv.broadcast(5, full(0.7), out)
    assert_same(out, full(0.7))
    kv.set_updater(lambda key, input, stored: None)
    kv.pushpull(5, full(0.1), out)
    assert_same(out, full(0.7))


def test_local_refuses_it():
    store = torchkv.create("local")
    store.init(3, full(1))
    with pytest.raises(ValueError, match=r"'device' or 'nccl', but got 'local'"):
        store.set_gradient_compression({"type": "2bit"})
    store.set_gradient_compression(None)  # which it has anyway
    store.push(3, full(0.3))
    assert_same(stored(store, 3), full(0.3))


# -- with updaters and optimizers


def test_an_opaque_updater_gets_what_was_sent(kv):
    codec, shape = TwoBit(0.5), (2, 3)
    model, seen = Model(codec, shape), []
    kv.init("w", torch.zeros(shape, dtype=torch.bfloat16))
    kv.set_gradient_compression(codec)

    def updater(key, input, stored):
        seen.append((key, input.clone()))

    kv.set_updater(updater)
    for _ in range(3):
        values = [some(shape) for _ in range(4)]
        kv.push("w", values)
        key, input = seen.pop()
        assert key == "w"
        assert_same(input, model.sum(values).to(torch.bfloat16))


def test_a_torchscript_updater(kv):
    def add(key: str, input: torch.Tensor, stored: torch.Tensor):
        stored.add_(input)

    kv.init("w", full(0))
    kv.set_gradient_compression(OneBit(0.0))
    kv.set_updater(script(add))
    kv.push("w", [full(3), full(4), full(-1)])
    assert_same(stored(kv, "w"), full(1))


OPTIMIZERS = [
    optim.SGD(lr=0.5, momentum=0.5, weight_decay=0.125),
    optim.AdamW(lr=0.125),
    optim.LAMB(lr=0.125),
    optim.SGD(lr=0.5, accumulate=3),
    optim.SGD(lr=0.5, max_norm=0.25),
    optim.SGD(lr=0.5, momentum=0.5, max_norm=0.25, skip_nonfinite=True),
    optim.SGD(lr=0.5, clip_value=0.25, rescale_grad=2.0),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("codec", [TwoBit(), FP8(), TopK(ratio=0.5)], ids=str)
@each_float
def test_an_optimizer_steps_with_what_was_sent(kv, optimizer, codec, dtype):
    shape = (37, 83)
    plain = torchkv.create("device")
    first = some(shape, dtype)
    for store in (kv, plain):
        store.init("w", first)
        store.set_optimizer(copy.deepcopy(optimizer))
    kv.set_gradient_compression(codec)
    model = Model(codec, shape, dtype)
    for _ in range(4):
        values = [some(shape, dtype) for _ in range(2)]
        kv.push("w", values)
        plain.push("w", model.sum(values))
        # Accumulated sums are added up in another order.
        close = {"rtol": 0, "atol": 2e-3} if dtype.itemsize == 2 else {}
        if dtype == torch.bfloat16:
            close["atol"] = 2e-2
        torch.testing.assert_close(stored(kv, "w"), stored(plain, "w"), **close)
    if kv.optimizer.grad_norm is not None:
        assert kv.optimizer.grad_norm == pytest.approx(plain.optimizer.grad_norm)
    residuals = kv.state_dict()["keys"]["w"]["residuals"]
    for actual, expected in zip(residuals, model.residuals, strict=True):
        assert torch.equal(actual, expected)


def test_a_class_of_torch_optim(kv):
    kv.init("w", full(0))
    kv.set_optimizer(torch.optim.SGD, lr=1.0)
    kv.set_gradient_compression(TwoBit(0.5))
    kv.push("w", [full(3), full(-0.2), full(0.7)])
    assert_same(stored(kv, "w"), full(-1))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_skip_nonfinite_looks_at_what_was_pushed(kv, bad):
    kv.init("w", full(0))
    kv.set_optimizer("sgd", learning_rate=1.0, skip_nonfinite=True)
    kv.set_gradient_compression(TwoBit(0.5))
    kv.push("w", full(0.25))
    before = kv.state_dict()["keys"]["w"]["residuals"][0]
    kv.push("w", full(bad))
    assert kv.optimizer.num_skipped == 1
    assert_same(kv.state_dict()["keys"]["w"]["residuals"][0], before)
    kv.push("w", full(0.25))
    assert_same(stored(kv, "w"), full(-0.5))


def test_an_updater_that_raises_has_seen_what_was_sent(kv):
    kv.init("w", full(0))
    kv.set_gradient_compression(TwoBit(0.5))

    def fail(key, input, stored):
        raise KeyError("no")

    kv.set_updater(fail)
    with pytest.raises(KeyError, match="no"):
        kv.push("w", full(0.75))
    (residual,) = _residuals(kv, "w")
    assert_same(residual, full(0.25))


def _residuals(kv, key):
    kv.set_updater(None)
    return kv.state_dict()["keys"][key]["residuals"]


# -- keys, positions, changes


def test_positions_of_repeated_keys_are_those_of_one_list(kv):
    kv.init("w", full(0))
    kv.set_gradient_compression(TwoBit(0.5))
    kv.push(["w", "w"], [[full(0.25), full(0.125)], full(-0.25)])
    expected = [full(0.25), full(0.125), full(-0.25)]
    for actual, residual in zip(_residuals(kv, "w"), expected, strict=True):
        assert_same(actual, residual)


def test_groups_of_keys(kv):
    kv.init(["a", "b", "c"], [full(0)] * 3)
    groups = [
        {"type": "2bit", "threshold": 0.5},
        {"keys": "b", "type": FP16()},
        {"keys": ["c"], "type": "none"},
    ]
    kv.set_gradient_compression(groups)
    kv.push(["a", "b", "c"], [full(0.7)] * 3)
    assert_same(stored(kv, "a"), full(0.5))
    assert_same(stored(kv, "b"), full(0.7).half().float())
    assert_same(stored(kv, "c"), full(0.7))
    assert kv.gradient_compression == [
        {"type": TwoBit(0.5)},
        {"keys": ["b"], "type": FP16()},
        {"keys": ["c"], "type": "none"},
    ]
    kv.set_gradient_compression(kv.gradient_compression)
    kv.push(["a", "b", "c"], [full(0.3)] * 3)
    assert_same(stored(kv, "a"), full(0.5))
    kv.set_gradient_compression([{"keys": ["a"], "type": TwoBit(1.0)}])
    assert kv.gradient_compression[0] == {"type": "none"}


def test_what_is_set(kv):
    assert kv.gradient_compression is None
    for codec in ALL:
        kv.set_gradient_compression(codec)
        numbers = {k: v for k, v in vars(codec).items() if v is not None}
        assert kv.gradient_compression == type(codec)(**numbers)
        kv.set_gradient_compression({"type": codec.type, **numbers})
        assert kv.gradient_compression == codec
    for none in (None, {"type": "none"}, []):
        kv.set_gradient_compression(TwoBit())
        kv.set_gradient_compression(none)
        assert kv.gradient_compression is None


def test_residuals_stay_from_one_scheme_with_feedback_to_another(kv):
    kv.init("w", full(0))
    kv.set_gradient_compression(TwoBit(0.5))
    kv.push("w", full(0.375))
    kv.set_gradient_compression(FP16())
    kv.push("w", full(0.125))
    assert_same(stored(kv, "w"), full(0.5))
    for other in (None, Int4(), [{"keys": "w", "type": "none"}, OneBit()]):
        kv.set_gradient_compression(TwoBit(0.5))
        kv.push("w", full(0.375))
        kv.set_gradient_compression(other)
        kv.set_gradient_compression(TwoBit(0.5))
        kv.push("w", full(0.375))
        assert_same(stored(kv, "w"), full(0))  # they are gone
        kv.delete("w")
        kv.init("w", full(0))


def test_a_deleted_key_takes_its_residuals_along(kv):
    kv.init("w", full(0))
    kv.set_gradient_compression(TwoBit(0.5))
    kv.push("w", full(0.375))
    kv.delete("w")
    kv.init("w", full(0))
    kv.push("w", full(0.375))
    assert_same(stored(kv, "w"), full(0))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_list_with_a_sparse_value_is_not_compressed(kv):
    kv.init(["w", "v"], [torch.zeros(4, 2)] * 2)
    kv.set_gradient_compression(OneBit())
    rows = torch.eye(4, 2).mul(0.25).to_sparse(1)
    kv.push(["w", "v"], [[rows, torch.full((4, 2), 0.125)], torch.zeros(4, 2)])
    assert_same(stored(kv, "w"), torch.eye(4, 2) * 0.25 + 0.125)
    assert_same(stored(kv, "v"), torch.full((4, 2), -1.0))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_values_of_integers_are_pushed_as_they_are(kv):
    kv.init("w", torch.zeros(4, 2, dtype=torch.int64))
    kv.set_gradient_compression(OneBit())
    kv.push("w", torch.eye(4, 2, dtype=torch.int64).to_sparse(1))
    assert_same(stored(kv, "w"), torch.eye(4, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"but got torch.int64 \(key 'w'\)"):
        kv.push("w", torch.zeros(4, 2, dtype=torch.int64))


@pytest.mark.parametrize("codec", [TwoBit(), TopK(k=2), Int4()], ids=str)
def test_a_shared_value(codec):
    kv, value = torchkv.create("device"), full(0.75)
    kv.init("w", value, share=True)
    kv.set_gradient_compression(codec)
    kv.push("w", value)  # the stored value itself
    other = torchkv.create("device")
    other.init("w", full(0))
    other.set_gradient_compression(codec)
    other.push("w", full(0.75))
    assert_same(value, stored(other, "w"))


def test_assign_with_another_layout_moves_the_residuals():
    kv = torchkv.create("device")
    kv.init("w", torch.zeros(2, 3))
    kv.set_gradient_compression(TwoBit(0.5))
    value = torch.arange(6.0).view(2, 3) / 16
    kv.push("w", value)
    kv.assign("w", torch.zeros(3, 2).t(), share=True)
    kv.push("w", value)
    expected = torch.where(2 * value >= 0.5, 0.5, 0.0)
    assert torch.equal(stored(kv, "w"), expected)


# -- calls in flight


class Blocking:
    """An updater that waits in its first call until it may go on."""

    def __init__(self):
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, key, input, stored):
        stored.copy_(input)
        self.has_begun.set()
        assert self.may_end.wait(30)


def test_residuals_of_a_removed_compression_do_not_come_back(kv):
    updater = Blocking()
    kv.init("w", full(0))
    kv.set_updater(updater)
    kv.set_gradient_compression(TwoBit(0.5))

    def change():
        assert updater.has_begun.wait(30)
        kv.set_gradient_compression(None)  # while the push holds the key
        kv.set_gradient_compression(TwoBit(0.5))
        updater.may_end.set()

    run_threads([lambda: kv.push("w", full(0.375)), change])
    kv.push("w", full(0.125))
    assert_same(stored(kv, "w"), full(0))


def test_a_push_from_before_leaves_the_residuals_of_a_compression(kv):
    updater = Blocking()
    kv.init(["a", "w"], [full(0)] * 2)
    kv.set_updater(updater)

    def change():
        assert updater.has_begun.wait(30)
        kv.set_updater(None)
        kv.set_gradient_compression(TwoBit(0.5))
        kv.push("w", full(0.375))
        updater.may_end.set()

    run_threads([lambda: kv.push(["a", "w"], [full(1), full(2)]), change])
    kv.push("w", full(0.125))
    assert_same(stored(kv, "w"), full(0.5))


# -- threads


def test_pushes_of_many_threads_are_all_counted():
    kv = torchkv.create("device")
    kv.init("w", torch.zeros(5000, dtype=torch.float64))
    kv.set_optimizer(optim.SGD(lr=1.0))
    kv.set_gradient_compression(TwoBit(0.5))

    def body():
        for _ in range(50):
            kv.push("w", torch.full((5000,), 0.125, dtype=torch.float64))

    run_threads([body] * 4)
    (residual,) = kv.state_dict()["keys"]["w"]["residuals"]
    total = residual - stored(kv, "w")
    assert torch.equal(total, torch.full_like(total, 4 * 50 * 0.125))


def test_changes_while_threads_push():
    kv = torchkv.create("device")
    kv.init("w", torch.zeros(5000))
    kv.set_gradient_compression(TwoBit(0.5))

    def push():
        for _ in range(100):
            kv.push("w", [torch.ones(5000)] * 2)

    def change():
        for codec in [FP16(), None, TopK(k=9), Int4(), FP8()] * 20:
            kv.set_gradient_compression(codec)

    run_threads([push, push, change])
    kv.set_gradient_compression(None)
    kv.push("w", torch.ones(5000))
    assert_same(stored(kv, "w"), torch.ones(5000))


# -- TorchScript


def test_torchscript_sets_it():
    kv = torchkv.create("device")
    kv.init("w", full(0))
    kv.script_object.set_gradient_compression("2bit", {"threshold": 0.5})
    assert kv.gradient_compression == TwoBit(0.5)
    kv.script_object.push("w", full(0.75))
    assert_same(stored(kv, "w"), full(0.5))
    with pytest.raises(ValueError, match="unknown compression '3bit'"):
        kv.script_object.set_gradient_compression("3bit", {})
