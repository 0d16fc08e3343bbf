"""async_op=True on the CPU, in Python and TorchScript: the same results, and a Work.

What overlaps with what is a matter of GPUs: tests/cpp/mock_cuda/async_test.cpp and
test_cuda_streams.py.
"""

import pytest
import torch

import torchkv
from helpers import (
    SHAPE,
    Momentum,
    add_input,
    assert_same,
    full,
    jit_save_load,
    run_threads,
    script,
    snapshot,
    stored,
)
from torchkv import optim


@pytest.fixture(params=["python", "script"])
def face(request, kv):
    """The store in Python and in TorchScript; the methods have the same names."""
    return kv if request.param == "python" else kv.script_object


def is_work(work):
    return work.is_completed() is True and work.wait() is None


# --- the same results -----------------------------------------------------------


def run(face, **options):
    """All forms of all calls: what they return, and the outs."""
    outs = [full(0.0) for _ in range(6)]
    value = full(2.0)
    works = [
        face.broadcast(3, full(1.0), [outs[0], outs[1]], **options),
        face.broadcast([5, 7], [full(1.0), full(2.0)], outs[2:4], **options),
        face.push(3, [full(1.0), full(2.0)], **options),
        face.push([5, 7, 5], [full(1.0), full(3.0), full(4.0)], 2, **options),
        face.pull([3, 5], outs[:2], **options),
        face.pushpull(7, [value, value], outs[4], **options),
        face.pushpull(3, value, **options),
        face.pull(3, out=outs[5], priority=-1, ignore_sparse=False, **options),
    ]
    return works, [*outs, value]


UPDATERS = {
    "assign": lambda kv: None,
    "python": lambda kv: kv.set_updater(add_input),
    "scripted": lambda kv: kv.set_updater(script(Momentum())),
    "optimizer": lambda kv: kv.set_optimizer(optim.AdamW(lr=0.1)),
}


@pytest.mark.parametrize("updater", UPDATERS)
def test_results_are_those_of_synchronous_calls(kv, face, store_type, updater):
    UPDATERS[updater](kv)
    works, outs = run(face, async_op=True)
    assert all(is_work(work) for work in works)
    with torchkv.create(store_type) as expected:
        UPDATERS[updater](expected)
        nones, expected_outs = run(expected)
        assert nones == [None] * len(works)
        for pair in zip(outs, expected_outs, strict=True):
            assert_same(*pair)
        assert snapshot(kv) == snapshot(expected)


def test_async_op_false_returns_none(face):
    assert run(face, async_op=False)[0] == [None] * 8


def test_async_op_may_be_a_positional_argument(face):
    out = full(0.0)
    assert is_work(face.broadcast(3, full(1.0), out, 0, True))
    assert is_work(face.push(3, full(2.0), 0, True))
    assert is_work(face.pushpull(3, full(3.0), out, 0, True))
    assert is_work(face.pull(3, out, 0, True, True))
    assert_same(out, full(3.0))


# --- Work -------------------------------------------------------------------------


def test_a_work_is_exported_and_says_what_it_is(kv):
    kv.init(3, full(0.0))
    work = kv.push(3, full(1.0), async_op=True)
    assert type(work) is torchkv.Work
    assert repr(work) == "Work(is_completed=True)"
    assert kv.script_object.push(3, full(1.0), 0, True).__repr__() == repr(work)


def test_wait_may_be_repeated_and_by_any_thread(kv):
    kv.init(3, full(0.0))
    work = kv.push(3, full(1.0), async_op=True)
    run_threads([work.wait] * 4)
    work.wait()
    assert_same(stored(kv, 3), full(1.0))


def test_a_work_outlives_its_store(store_type):
    with torchkv.create(store_type) as kv:
        kv.init(3, full(0.0))
        work = kv.push(3, full(1.0), async_op=True)
    del kv
    work.wait()
    assert work.is_completed()


def test_pushed_tensors_may_be_reused_immediately_on_the_cpu(face):
    """The work is complete and has no effect."""
    face.init(3, full(0.0))
    value = full(1.0)
    face.push(3, value, async_op=True)
    value.fill_(7.0)
    assert_same(face.pull(3), full(1.0))


# --- errors -------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [3, [3]], ids=["key", "keys"])
def test_a_pull_needs_an_out(kv, face, keys):
    kv.init(3, full(0.0))
    with pytest.raises(ValueError, match=r"pull: expected an out .*async_op.*key"):
        face.pull(keys, async_op=True)


def test_errors_are_raised_by_the_call(kv):
    kv.init(3, full(0.0))
    before = snapshot(kv)
    wrong = torch.zeros(5)
    with pytest.raises(KeyError):
        kv.push(4, full(1.0), async_op=True)
    with pytest.raises(ValueError):
        kv.push(3, wrong, async_op=True)
    with pytest.raises(ValueError):
        kv.pull(3, wrong, async_op=True)
    with pytest.raises(ValueError):
        kv.pushpull(3, full(1.0), wrong, async_op=True)
    with pytest.raises(ValueError):
        kv.broadcast(3, full(1.0), full(0.0), async_op=True)
    with pytest.raises(TypeError):
        kv.push(3, full(1.0), async_op="yes")
    assert snapshot(kv) == before
    kv.close()
    with pytest.raises(RuntimeError, match="push"):
        kv.push(3, full(1.0), async_op=True)


def test_what_an_updater_raises_reaches_the_call(kv):
    def fail(key, input, stored):
        raise OSError("the updater's own")

    kv.init(3, full(0.0))
    kv.set_updater(fail)
    with pytest.raises(OSError, match="the updater's own"):
        kv.push(3, full(1.0), async_op=True)


# --- TorchScript ----------------------------------------------------------------------


def waits(kv: torch.classes.torchkv.KVStore, x: torch.Tensor) -> list[torch.Tensor]:
    outs = [torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)]
    kv.broadcast(3, x, outs[0], async_op=True)
    kv.push(3, x * 2, async_op=True)  # no wait follows
    pushed = kv.push(3, [x, x], async_op=True)
    assert pushed is not None
    pulled = kv.pull(3, outs[1], async_op=True)
    assert isinstance(pulled, torch.classes.torchkv.Work)
    pushed.wait()
    pulled.wait()
    assert pushed.is_completed() and pulled.is_completed()
    assert kv.push(3, x) is None
    both = kv.pushpull(3, x * 5, outs[2], async_op=True)
    if both is not None:
        both.wait()
    return outs


def test_scripted_code_waits(kv):
    outs = script(waits)(kv.script_object, full(1.0))
    for out, value in zip(outs, [1.0, 2.0, 5.0], strict=True):
        assert_same(out, full(value))


class Overlapped(torch.nn.Module):
    """Pushes, computes, waits."""

    def __init__(self):
        super().__init__()
        self.kv = torch.classes.torchkv.KVStore("local")
        self.kv.init(3, torch.zeros(SHAPE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        work = self.kv.pushpull(3, x, async_op=True)
        computed = x.new_ones(2, 3)
        assert work is not None
        work.wait()
        return x + computed


def test_a_scripted_module_is_saved_and_loaded(store_type):
    module = script(Overlapped())
    assert_same(module(full(4.0)), full(5.0))
    loaded = jit_save_load(module)
    assert_same(stored(torchkv.KVStore.from_script_object(loaded.kv), 3), full(4.0))
    assert_same(loaded(full(6.0)), full(7.0))


def test_the_future_is_done_with_the_work(kv):
    kv.init(3, full(1))
    out = full(0)
    future = kv.pushpull(3, full(2), out=out, async_op=True).get_future()
    assert isinstance(future, torch.Future) and future.wait() == []
    assert future.then(lambda done: out[0, 0].item()).wait() == 2
