"""Streams of one GPU: ordering, no blocking of the host, and CUDA graphs.

Work is delayed on the GPU, so that what nothing orders is seen in the wrong order.
"""

import contextlib
import itertools

import pytest
import torch

import torchkv
from helpers import Add, add_input, assert_same, run_threads, script
from torchkv import optim

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

REPEATS = 50
SIZE = 70_001
DELAY = 2_000_000  # cycles: a millisecond
LONG_DELAY = 200 * DELAY

UPDATERS = {
    "assign": lambda: None,
    "python": lambda: add_input,
    "scripted": lambda: script(Add()),
}


def late(value, delay=DELAY):
    """A new tensor whose value is written after a delay."""
    tensor = torch.full((SIZE,), torch.nan, device="cuda")
    torch.cuda._sleep(delay)
    return tensor.fill_(value)


def filled(value):
    return torch.full((SIZE,), float(value))


def make_store(updater="assign", value=0.0):
    kv = torchkv.create("device")
    kv.init(3, filled(value).cuda())
    kv.set_updater(UPDATERS[updater]())
    return kv


# --- order --------------------------------------------------------------------


def test_a_delay_shows_what_is_not_ordered(streams):
    """Otherwise the tests below would be vacuous."""
    seen = torch.zeros(SIZE, device="cuda")
    seen.copy_(late(5.0))  # all kernels are loaded by now
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        value = late(7.0, LONG_DELAY)
    with torch.cuda.stream(streams[1]):
        seen.copy_(value)
    torch.cuda.synchronize()
    assert not (seen == 7).any()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("updater", UPDATERS)
def test_a_pull_sees_pushes_of_other_streams(streams, updater, count):
    """Even if the pushed tensors are overwritten and freed right after the push."""
    total = 0
    with make_store(updater) as kv:
        for turn in range(REPEATS):
            pushing, pulling = streams[turn % 3], streams[(turn + 1) % 3]
            with torch.cuda.stream(pushing):
                values = [late(turn + i) for i in range(count)]
                kv.push(3, values)
                for value in values:
                    value.fill_(torch.nan)
                del values, value
                reused = torch.full((SIZE,), torch.nan, device="cuda")
            with torch.cuda.stream(pulling):
                out = torch.full((SIZE,), torch.nan, device="cuda")
                kv.pull(3, out=out)
                found = [out.cpu(), kv.pull(3).cpu()]
            pushed = count * turn + sum(range(count))
            total = pushed if updater == "assign" else total + pushed
            for each in found:
                assert_same(each, filled(total), f"turn {turn}")
            del reused


def test_an_initial_value_of_another_stream(streams):
    for turn in range(REPEATS):
        with torch.cuda.stream(streams[0]):
            value = late(turn)
            with torchkv.create("device") as kv:
                kv.init(3, value)
                value.fill_(torch.nan)
                with torch.cuda.stream(streams[1]):
                    found = kv.pull(3).cpu()
        assert_same(found, filled(turn))


@pytest.mark.parametrize("updater", UPDATERS)
def test_a_push_waits_for_pulls_of_other_streams(streams, updater):
    with make_store(updater) as kv:
        total = 0
        for turn in range(REPEATS):
            with torch.cuda.stream(streams[0]):
                out = late(torch.nan)
                kv.pull(3, out=out)
            with torch.cuda.stream(streams[1]):
                kv.push(3, filled(turn).cuda())
            torch.cuda.synchronize()
            assert_same(out.cpu(), filled(total), f"turn {turn}")
            total = turn if updater == "assign" else total + turn


def test_outs_are_written_in_the_order_of_the_pulling_stream(streams):
    """A slow reader of an out delays the next pull into it."""
    with make_store() as kv:
        out = torch.zeros(SIZE, device="cuda")
        pulling, reading = streams[:2]
        pulling.wait_stream(torch.cuda.current_stream())
        for turn in range(REPEATS):
            with torch.cuda.stream(pulling):
                kv.push(3, late(turn))
                kv.pull(3, out=out)
            reading.wait_stream(pulling)
            with torch.cuda.stream(reading):
                torch.cuda._sleep(DELAY)
                read = out.clone()
            pulling.wait_stream(reading)
            with torch.cuda.stream(pulling):
                kv.push(3, filled(-1).cuda())
                kv.pull(3, out=out)
            torch.cuda.synchronize()
            assert_same(read.cpu(), filled(turn))
            assert_same(out.cpu(), filled(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_state_of_an_optimizer_follows_the_pushes(streams, name, dtype):
    """Steps from alternating streams are bitwise identical to steps from one."""
    gradients = torch.randn(REPEATS, SIZE).to(dtype).cuda()
    options = {"momentum": 0.9, "lr": 0.1} if name == "SGD" else {"lr": 0.1}

    def weights(streams):
        torch.cuda.synchronize()
        with torchkv.create("device") as kv:
            kv.init(3, torch.zeros(SIZE, dtype=dtype, device="cuda"))
            kv.set_optimizer(getattr(optim, name)(**options))
            for gradient, stream in zip(gradients, itertools.cycle(streams)):
                with torch.cuda.stream(stream):
                    value = late(torch.nan).to(dtype)
                    value.copy_(gradient)
                    kv.push(3, [value, value])
                    value.fill_(torch.nan)
            return kv.pull(3).cpu()

    one = torch.cuda.current_stream()
    assert_same(weights(streams), weights([one]))


def test_threads_with_streams_of_their_own():
    """Every push counts once, and no pull sees half of one."""
    count, pushes = 4, 25

    def body(kv):
        with torch.cuda.stream(torch.cuda.Stream()):
            before = 0
            for _ in range(pushes):
                value = late(1.0)
                kv.push(3, [value, value])
                value.fill_(torch.nan)
                out = late(torch.nan)
                kv.pull(3, out=out)
                found = out.cpu()
                assert found.min() == found.max() >= before + 2
                before = found[0]

    with make_store() as kv:
        kv.set_optimizer(optim.SGD(lr=1.0, maximize=True))
        run_threads([lambda: body(kv)] * count)
        assert_same(kv.pull(3).cpu(), filled(2 * count * pushes))


# --- async_op -----------------------------------------------------------------


def test_an_asynchronous_call_runs_beside_the_callers_stream():
    def slow(key, input, stored):
        torch.cuda._sleep(delays.pop())
        stored.copy_(input)

    delays = [LONG_DELAY, 0]  # the first call loads all kernels
    value = filled(5).cuda()
    out = torch.full((SIZE,), torch.nan, device="cuda")
    computed, waited = torch.cuda.Event(), torch.cuda.Event()
    with make_store() as kv:
        kv.set_updater(slow)
        kv.pushpull(3, value, out, async_op=True).wait()
        out.fill_(torch.nan).add_(1)
        torch.cuda.synchronize()

        work = kv.pushpull(3, value, out, async_op=True)
        torch.ones_like(value).add_(1)
        computed.record()
        computed.synchronize()
        assert not work.is_completed()
        work.wait()
        waited.record()
        assert not waited.query()  # nor has the host waited
        waited.synchronize()
        assert work.is_completed()
        assert_same(out.cpu(), filled(5))


@pytest.mark.parametrize("waits", [True, False], ids=["waited for", "dropped"])
@pytest.mark.parametrize("updater", UPDATERS)
def test_tensors_of_an_asynchronous_call_may_be_freed(streams, updater, waits):
    total = 0
    with make_store(updater) as kv:
        for turn in range(REPEATS):
            with torch.cuda.stream(streams[turn % 3]):
                work = kv.push(3, [late(turn), late(1.0)], async_op=True)
                others = [torch.full((SIZE,), torch.nan, device="cuda")]
                if waits:
                    work.wait()
                del work
                others += [torch.full_like(others[0], torch.nan) for _ in range(2)]
            with torch.cuda.stream(streams[(turn + 1) % 3]):
                out = late(torch.nan)
                kv.pull(3, out=out, async_op=True).wait()
                found = out.cpu()
            total = turn + 1 if updater == "assign" else total + turn + 1
            assert_same(found, filled(total), f"turn {turn}")
            del others


# --- the host -----------------------------------------------------------------


@contextlib.contextmanager
def no_synchronization():
    """PyTorch's calls that wait for the GPU are errors."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("updater", [*UPDATERS, "momentum", "adamw"])
def test_the_host_is_never_blocked(streams, updater):
    values = [late(i) for i in range(2)]
    small = [torch.ones(5, device="cuda") for _ in range(2)]
    outs = [torch.zeros(SIZE, device="cuda"), torch.zeros(5, device="cuda")]
    with make_store(updater if updater in UPDATERS else "assign") as kv:
        kv.init(5, small[0])
        if updater == "momentum":
            kv.set_optimizer(optim.SGD(lr=0.1, momentum=0.9))
        elif updater == "adamw":
            kv.set_optimizer(optim.AdamW())

        def call():
            kv.push([3, 5], [values, small])
            kv.pull([3, 5], out=outs)
            kv.pushpull([3, 5], [values, small], out=outs)

        for _ in range(3):  # which allocate, load and compile
            call()
        torch.cuda.synchronize()
        with no_synchronization():
            with pytest.raises(RuntimeError, match="synchroniz"):
                values[0][0].item()
            torch.cuda._sleep(LONG_DELAY)
            slept = torch.cuda.Event()
            slept.record()
            call()
            with torch.cuda.stream(streams[0]):
                call()
            # PyTorch does not know what libtorchkv_cuda calls.
            assert not slept.query()


# --- CUDA graphs --------------------------------------------------------------

# An optimizer's count of steps is the host's: a graph repeats the step that was
# captured. So rules in whose formula it stands (Adam and the like, for their bias
# corrections) do not replay what eager calls do, and are not promised.
CAPTURED = {
    "assign": lambda: None,
    "momentum": lambda: optim.SGD(lr=0.125, momentum=0.9, weight_decay=0.01),
}


class Model:
    """A store, and replicas and outs that keep their memory."""

    FORMS = [
        (2, SIZE, torch.float32),
        (3, 4097, torch.bfloat16),
        (1, 3, torch.float32),
    ]

    def __init__(self, optimizer, forms=FORMS):
        self.keys = list(range(len(forms)))
        self.values, self.outs = [], []
        for replicas, size, dtype in forms:
            made = [
                torch.zeros(size, dtype=dtype, device="cuda")
                for _ in range(replicas + 2)
            ]
            self.values.append(made[:replicas])
            self.outs.append(made[replicas:])
        self.kv = torchkv.create("device")
        self.kv.init(self.keys, [values[0] for values in self.values])
        if optimizer is not None:
            self.kv.set_optimizer(optimizer)

    def change(self, seed):
        """Other values, and outs that must be written."""
        generator = torch.Generator("cuda").manual_seed(seed)
        for value in itertools.chain(*self.values):
            value.normal_(generator=generator)
        for out in itertools.chain(*self.outs):
            out.fill_(torch.nan)

    def step(self):
        self.kv.push(self.keys, self.values)
        self.kv.pull(self.keys, out=self.outs)

    def asynchronous_step(self):
        pushed = self.kv.push(self.keys, self.values, async_op=True)
        pulled = self.kv.pull(self.keys, out=self.outs, async_op=True)
        pushed.wait()
        pulled.wait()
        return pushed.is_completed()

    def results(self):
        return [out.cpu() for out in itertools.chain(*self.outs)]


def assert_same_results(actual, expected, note):
    for pair in zip(actual.results(), expected.results(), strict=True):
        assert_same(*pair, note)


@pytest.mark.parametrize("optimizer", CAPTURED)
def test_replays_of_a_graph_do_what_eager_calls_do(streams, optimizer):
    captured, eager = (Model(CAPTURED[optimizer]()) for _ in range(2))
    seeds = itertools.count()

    def compare(step):
        seed = next(seeds)
        for model in (captured, eager):
            model.change(seed)
        step()
        eager.step()
        assert_same_results(captured, eager, f"step {seed}")

    for _ in range(3):
        compare(captured.step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for _ in range(20):
        compare(graph.replay)

    # Calls outside the graph continue from there, on any stream, and so does the graph.
    compare(captured.step)
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        compare(captured.step)
        compare(graph.replay)
    torch.cuda.synchronize()
    compare(graph.replay)
    del graph
    compare(captured.step)


def test_a_graph_of_many_keys():
    """In several launches, as parameters are small in a capture."""
    forms = [(replicas, 257 * replicas, torch.float32) for replicas in (2, 1, 3)] * 100
    captured, eager = (Model(CAPTURED["momentum"](), forms) for _ in range(2))
    for model in (captured, eager):
        model.change(0)
        model.step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured.step()
    for seed in range(1, 21):
        for model in (captured, eager):
            model.change(seed)
        graph.replay()
        eager.step()
        assert_same_results(captured, eager, f"replay {seed}")


def test_a_graph_of_asynchronous_calls():
    captured, eager = Model(None), Model(None)
    captured.asynchronous_step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert not captured.asynchronous_step()
    for seed in range(10):
        captured.change(seed)
        eager.change(seed)
        graph.replay() if seed % 2 else captured.asynchronous_step()
        eager.step()
        assert_same_results(captured, eager, f"seed {seed}")


def test_two_graphs_of_one_store():
    """One that pushes and one that pulls, replayed in any order."""
    model = Model(None)
    model.step()
    push, pull = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(push):
        model.kv.push(model.keys, model.values)
    with torch.cuda.graph(pull):
        model.kv.pull(model.keys, out=model.outs)
    stored = [value.cpu() for value in model.kv.pull(model.keys)]
    for turn in range(10):
        model.change(turn)
        if turn % 2:
            push.replay()
            stored = [sum_of(values) for values in model.values]
        pull.replay()
        for expected, outs in zip(stored, model.outs, strict=True):
            for out in outs:
                assert_same(out.cpu(), expected, f"turn {turn}")


def sum_of(values):
    """What a push of the values stores."""
    with torchkv.create("local") as kv:
        kv.init(3, values[0].cpu())
        kv.push(3, [value.cpu() for value in values])
        return kv.pull(3)
