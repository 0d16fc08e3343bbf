"""Calls of the store inside torch's modes and transforms: plain tensors stay plain.

Such a mode looks at every operator of the thread; the store's own work is none of its
business. The tests run in a forked child, where a crash is one failed test, except
those that run autograd: a CUDA build of torch refuses that after a fork.
"""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import torchkv
from helpers import (
    Add,
    Momentum,
    add_input,
    assert_same,
    bits,
    check_in_child,
    full,
    script,
    snapshot,
    stored,
)

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


class Recorder(TorchDispatchMode):
    """Writes down the operators that a user's own mode gets to see."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def inside(context):
    def run(work):
        with context():
            work()

    return run


def transformed(transform, runs_autograd=False):
    """Calls `work`, which closes over its tensors, in a transformed function."""

    def run(work):
        def function(x):
            work()
            return x.sum()

        transform(function)(torch.ones(4, 2))

    run.runs_autograd = runs_autograd
    return run


def check(mode, body):
    if getattr(mode, "runs_autograd", False):
        body()
    else:
        check_in_child(body)


def jvp(function):
    return lambda x: torch.func.jvp(function, (x,), (x,))


def vmap_of_grad(function):
    return torch.func.vmap(torch.func.grad(function))


class DefaultDtype:
    def __enter__(self):
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *exc_info):
        torch.set_default_dtype(torch.float32)


class DefaultDevice:
    def __enter__(self):
        torch.set_default_device("meta")

    def __exit__(self, *exc_info):
        torch.set_default_device(None)


# What changes the meaning of an operator, and what does not.
STRONG = {
    "FakeTensorMode": inside(FakeTensorMode),
    "functionalize": transformed(torch.func.functionalize),
    "grad": transformed(torch.func.grad, runs_autograd=True),
    "jvp": transformed(jvp),
    "vmap": transformed(torch.func.vmap),
    "vmap of grad": transformed(vmap_of_grad, runs_autograd=True),
}
MILD = {
    "TorchDispatchMode": inside(Recorder),
    "forward AD": inside(torch.autograd.forward_ad.dual_level),
    "inference_mode": inside(torch.inference_mode),
    "enable_grad": inside(torch.enable_grad),
    "autocast": inside(lambda: torch.autocast("cpu", torch.bfloat16)),
    "default device": inside(DefaultDevice),
    "default dtype": inside(DefaultDtype),
}
MODES = STRONG | MILD


@pytest.fixture(scope="module", autouse=True)
def modes_are_imported():
    """Otherwise every child would import much of torch at its first operator."""
    for mode in MODES.values():
        mode(lambda: torch.ones(2).add_(1))


class Work:
    """Calls of a store with tensors from outside; returns a check to run later.

    The values take every way of the store: raw kernels and torch's operators, one
    value and several, conversions, strides, conjugates, a leaf.
    """

    def __init__(self, kv):
        self.kv = kv
        kv.init(3, full(1))
        kv.init(5, full(1, dtype=torch.complex64))
        self.first = [torch.arange(6.0).reshape(3, 2).t(), torch.zeros(0)]
        self.mixed = [full(1), full(2, dtype=torch.float64), full(3, dtype=torch.int8)]
        self.conjugate = torch.complex(full(1), full(2)).conj()
        self.outs = [
            full(0),
            full(0, dtype=torch.float64),
            torch.zeros(2, 6)[:, ::2],
            torch.nn.Parameter(full(0)),
        ]
        self.complex_outs = [full(0, dtype=torch.complex64).conj() for _ in range(2)]
        self.pulled = []

    def __call__(self):
        kv = self.kv
        kv.init([7, 9], self.first)
        kv.push(3, [self.mixed[0]] * 4)
        self.pulled.append(kv.pull(3))
        kv.pull(3, out=self.outs[0])
        kv.push(3, self.mixed[1])
        kv.pull(3, out=self.outs[1:])
        kv.push([3, 7], [self.mixed, self.mixed[:1]])
        self.pulled += kv.pull([3, 7, 9])
        kv.pushpull(5, self.conjugate, out=self.complex_outs[0])
        kv.push(5, [self.conjugate, self.conjugate, self.mixed[0]])
        kv.pull(5, out=self.complex_outs[1])
        self.pulled.append(kv.pull(5))
        kv.delete(9)

    def outcome(self):
        for tensor in self.pulled:
            assert type(tensor) is torch.Tensor and not tensor.requires_grad
            assert not torch._is_functional_tensor(tensor)
            assert not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        tensors = self.pulled + self.outs + self.complex_outs
        return [bits(tensor) for tensor in tensors], snapshot(self.kv)


def work_inside(mode, kv):
    """Does the work inside the mode; it must be as it is outside, then and later."""
    plain, work = Work(torchkv.create(kv.type)), Work(kv)
    plain()
    mode(work)
    assert work.outcome() == plain.outcome()
    assert snapshot(copy.deepcopy(kv)) == snapshot(kv)
    kv.set_updater(add_input)
    kv.push(3, [full(1), full(2)])
    assert_same(stored(kv, 3), full(9))


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_the_work_is_the_same_inside_a_mode(store_type, mode):
    check(mode, lambda: work_inside(mode, torchkv.create(store_type)))


class RowWork:
    """As Work, with sparse values and a row-sparse key."""

    def __init__(self, kv):
        self.kv = kv
        kv.init(3, torch.ones(4, 2))
        kv.init_rows(5, (2,), num_rows=4)
        ids = torch.tensor([[2, 0, 2]])
        self.sparse = torch.sparse_coo_tensor(ids, torch.ones(3, 2), (4, 2))
        self.dense = torch.ones(4, 2)
        self.ids = torch.tensor([3, 2])
        self.outs = [torch.zeros(2, 2), torch.zeros(4, 2)]
        self.sparse_out = torch.sparse_coo_tensor(ids, torch.zeros(3, 2), (4, 2))
        self.pulled = []

    def __call__(self):
        kv = self.kv
        for key in 3, 5:
            kv.push(key, [self.sparse, self.sparse])
            self.pulled.append(kv.pull(key))
            kv.push(key, [self.sparse, self.dense])
            self.pulled.append(kv.pull(key))
            kv.row_sparse_pull(key, self.outs[0], row_ids=self.ids)
            kv.pull(key, out=self.outs[1])
            kv.pull(key, out=self.sparse_out, ignore_sparse=False)
        kv.delete(5, row_ids=self.ids)

    def outcome(self):
        assert all(type(tensor) is torch.Tensor for tensor in self.pulled)
        tensors = [*self.outs]
        for tensor in [*self.pulled, self.sparse_out]:
            # to_dense() would use threads, for which a forked child waits forever.
            rows = tensor.is_sparse
            tensors += [tensor._indices(), tensor._values()] if rows else [tensor]
        return [bits(tensor) for tensor in tensors], self.kv.num_rows(5)


def rows_inside(mode, kv):
    plain, work = RowWork(torchkv.create(kv.type)), RowWork(kv)
    plain()
    mode(work)
    assert work.outcome() == plain.outcome()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_rows_are_the_same_inside_a_mode(store_type, mode):
    check(mode, lambda: rows_inside(mode, torchkv.create(store_type)))


@pytest.mark.parametrize("kind", ["python", "script"])
@pytest.mark.parametrize("mode", MILD.values(), ids=MILD)
def test_an_updater_inside_a_mode(mode, kind):
    def body():
        kv = torchkv.create()
        kv.init(3, full(1))
        kv.set_updater(add_input if kind == "python" else script(Add()))
        value = full(2)
        mode(lambda: kv.push(3, [value, value]))
        assert_same(stored(kv, 3), full(5))

    check(mode, body)


@pytest.mark.parametrize("kind", ["python", "script"])
@pytest.mark.parametrize("mode", STRONG.values(), ids=STRONG)
def test_the_store_stays_usable_after_an_updater_fails_in_a_mode(mode, kind):
    """The operators of an updater are the user's, and a mode may refuse them."""

    def body():
        kv = torchkv.create()
        kv.init(3, full(1))
        kv.set_updater(add_input if kind == "python" else script(Add()))
        value = full(2)
        try:
            mode(lambda: kv.push(3, value))
        except Exception:
            pass
        kv.set_updater(None)
        kv.push(3, full(7))
        kv.set_updater(script(Add()))
        kv.push(3, [full(1), full(2)])
        for store in (kv, copy.deepcopy(kv)):
            assert_same(stored(store, 3), full(10))

    check(mode, body)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_an_optimizer_inside_a_mode(mode):
    """Also where its steps are operators of torch: for a conjugated value."""
    value, imaginary = full(2), torch.complex(full(1), full(2)).conj()

    def work(kv, copies):
        kv.set_optimizer("sgd", learning_rate=0.5, wd=0.25)
        kv.push([3, 5], [[value, value], [imaginary, imaginary]])
        copies.append(copy.deepcopy(kv))
        copies[0].push([5, 3], [imaginary, value])

    def body():
        snapshots = []
        for run in (lambda call: call(), mode):
            kv, copies = torchkv.create(), []
            kv.init([3, 5], [full(8), torch.complex(full(8), full(4))])
            run(lambda kv=kv, copies=copies: work(kv, copies))
            kv.push(3, value)
            snapshots.append([snapshot(kv), snapshot(copies[0])])
        assert snapshots[0] == snapshots[1]

    check(mode, body)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_tensors_kept_by_an_updater_inside_a_mode_are_not_aliases(mode):
    def body():
        kv, kept, value = torchkv.create(), [], full(2)
        kv.init(3, full(1))
        kv.set_updater(lambda key, input, stored: kept.extend([input, stored]))
        mode(lambda: kv.push(3, value))
        kv.set_updater(add_input)
        kv.push(3, full(5))
        assert_same(kept[0], full(2))
        assert_same(kept[1], full(1))
        for tensor in kept:
            tensor.fill_(99)
        assert_same(stored(kv, 3), full(6))

    check(mode, body)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_copy_made_inside_a_mode(mode):
    def body():
        kv, copies = torchkv.create(), []
        kv.init(3, full(100))
        kv.set_updater(script(Momentum()))
        kv.push(3, full(1))
        mode(lambda: copies.append(copy.deepcopy(kv)))
        for store in (kv, copies[0]):
            store.push(3, full(1))
            assert_same(stored(store, 3), full(96))

    check(mode, body)


def test_a_users_mode_sees_no_operator_of_the_store(kv):
    work = Work(kv)
    with Recorder() as recorder:
        work()
        assert recorder.seen == []
        torch.ones(2).add_(1)
    assert len(recorder.seen) == 2


@pytest.mark.parametrize("values", [1, 3])
def test_a_users_mode_sees_the_operators_of_an_updater(kv, values):
    kv.init(3, full(1))
    kv.set_updater(add_input)
    inputs = [full(2)] * values
    with Recorder() as recorder:
        kv.push(3, inputs)
    assert recorder.seen == ["aten.add_.Tensor"]
    assert_same(stored(kv, 3), full(1 + 2 * values))


@pytest.mark.filterwarnings("ignore:(?s).*Dynamo does not know how to trace")
def test_a_compiled_function_calls_the_store(kv):
    @torch.compile(backend="eager")
    def step(gradient, out):
        kv.push(3, [gradient * 2, gradient])
        kv.pull(3, out=out)
        return kv.pull(3) + out

    kv.init(3, full(1))
    kv.set_updater(add_input)
    out = full(0)
    for total in (4, 7, 10):
        assert_same(step(full(1), out), full(2 * total))
        assert_same(out, full(total))
    assert snapshot(kv) == [(3, bits(full(10)))]
