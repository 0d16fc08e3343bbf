"""Tracers record only operators and would miss the calls of a store."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import torchkv
from helpers import assert_same, full, script, stored

pytestmark = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")

CALLS = {
    "init": lambda kv, x: kv.init(9, full(1)),
    "push": lambda kv, x: kv.push(3, x),
    "pull": lambda kv, x: kv.pull(3),
    "pull into an out": lambda kv, x: kv.pull(3, out=x),
    "pushpull": lambda kv, x: kv.pushpull(3, x),
    "broadcast": lambda kv, x: kv.broadcast(9, full(1), x),
    "assign": lambda kv, x: kv.assign(3, x),
    "delete": lambda kv, x: kv.delete(3),
}

TRACERS = {
    "torch.jit.trace": lambda f: torch.jit.trace(f, full(1)),
    "make_fx": lambda f: make_fx(f)(full(1)),
    "make_fx, fake": lambda f: make_fx(f, tracing_mode="fake")(full(1)),
    "make_fx, pre_dispatch": lambda f: make_fx(f, pre_dispatch=True)(full(1)),
    "symbolic_trace": lambda f: torch.fx.symbolic_trace(f),
    "export": lambda f: torch.export.export(as_module(f), (full(1),), strict=False),
}

NAMES = {
    "torch.jit.trace": "torch.jit.trace",
    "make_fx": "make_fx or torch.export",
    "make_fx, fake": "make_fx or torch.export",
    "make_fx, pre_dispatch": "make_fx or torch.export",
    "symbolic_trace": "torch.fx.symbolic_trace",
    "export": "make_fx or torch.export|wrapper",
}


def as_module(function):
    class Module(nn.Module):
        def forward(self, x):
            return function(x)

    return Module()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("tracer", TRACERS)
def test_a_traced_call_is_refused(kv, tracer, call):
    kv.init(3, full(5))

    def traced(x):
        y = x + 1
        pulled = call(kv, y)
        return y + pulled if isinstance(pulled, torch.Tensor) else y

    with pytest.raises((RuntimeError, NotImplementedError)) as caught:
        TRACERS[tracer](traced)
    message = str(caught.value)
    assert any(name in message for name in NAMES[tracer].split("|")), message
    assert kv.keys() == [3]
    assert_same(stored(kv, 3), full(5))
    kv.push(3, full(7))  # outside of it
    assert_same(stored(kv, 3), full(7))


def test_the_error_names_an_alternative(kv):
    kv.init(3, full(5))
    with pytest.raises(RuntimeError, match=r"torch.jit.script.*store.script_object"):
        torch.jit.trace(lambda x: x + kv.pull(3), full(1))


WRAPPED = []  # a store, for a wrapped function


@torch.fx.wrap
def push_and_pull(x):
    WRAPPED[-1].push(3, x)
    return WRAPPED[-1].pull(3)


def test_torch_fx_keeps_the_call_of_a_wrapped_function(kv):
    kv.init(3, full(5))
    with pytest.raises(RuntimeError, match="torch.fx.wrap"):
        torch.fx.symbolic_trace(lambda x: x + kv.pull(3))
    WRAPPED.append(kv)
    traced = torch.fx.symbolic_trace(lambda x: x + push_and_pull(x))
    assert_same(stored(kv, 3), full(5))
    assert_same(traced(full(2)), full(4))
    assert_same(stored(kv, 3), full(2))
    WRAPPED.clear()


def test_a_script_object_is_refused_by_make_fx(kv):
    kv.init(3, full(5))
    store = kv.script_object

    def traced(x):
        store.push(3, x)
        return x + store.pull(3)

    with pytest.raises(RuntimeError, match="make_fx or torch.export"):
        make_fx(traced)(full(1))
    assert_same(stored(kv, 3), full(5))


class Pushes(nn.Module):
    def __init__(self, kv):
        super().__init__()
        self.kv = kv.script_object

    def forward(self, x: torch.Tensor):
        self.kv.push(3, x)
        pulled = self.kv.pull(3)
        assert isinstance(pulled, torch.Tensor)
        return x + pulled


def test_a_scripted_module_may_be_traced(kv):
    """torch.jit.trace records a call of it, which runs each time."""
    kv.init(3, full(5))
    scripted = script(Pushes(kv))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = scripted

        def forward(self, x):
            return self.inner(x) * 2

    traced = torch.jit.trace(Outer(), full(1), check_trace=False)
    assert_same(traced(full(3)), full(12))
    assert_same(stored(kv, 3), full(3))


def test_compiled_code_runs_the_calls(kv):
    kv.init(3, full(5))

    @torch.compile(backend="eager")
    def step(x):
        kv.push(3, x)
        return x + kv.pull(3)

    assert_same(step(full(1)), full(2))
    assert_same(step(full(4)), full(8))


def test_another_threads_trace_does_not_matter(kv):
    """torch.fx notes for the whole process that some thread traces."""
    from helpers import run_threads

    kv.init(3, full(5))

    def traced(x):
        run_threads([lambda: kv.push(3, full(7))])
        return x + 1

    torch.fx.symbolic_trace(traced)
    assert_same(stored(kv, 3), full(7))
    torch.jit.trace(traced, full(1), check_trace=False)


@torch.library.custom_op("torchkv_tests::pushed", mutates_args=())
def pushed(x: torch.Tensor) -> torch.Tensor:
    STORES[-1].push(3, x)
    return STORES[-1].pull(3)


STORES: list[torchkv.KVStore] = []


def test_an_operator_around_a_call_is_recorded(kv):
    kv.init(3, full(5))
    STORES.append(kv)
    try:
        graph = make_fx(lambda x: pushed(x) + 1)(full(1))
        assert "pushed" in graph.code
        assert_same(graph(full(4)), full(5))
        assert_same(stored(kv, 3), full(4))
    finally:
        STORES.pop()
