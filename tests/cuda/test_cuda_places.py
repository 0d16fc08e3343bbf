"""TORCHKV_PLACES: one device as four logical devices, over which values are sharded.

Places in CPU memory show without a GPU what is computed; streams and graphs need one.
"""

import contextlib
import functools

import pytest
import torch

import test_cuda_streams
import torchkv
from helpers import allocated_bytes, assert_same, script
from optim_cases import ids
from saved_stores import everything
from test_cuda_results import (
    COUNTS,
    DTYPES,
    FEW,
    LAYOUTS,
    TINY,
    assert_same_numbers,
    numbers,
    pushed,
    pushed_in_layouts,
    stepped,
)
from torchkv import optim

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

NUM_PLACES = 4
SIZE = 1 << 18
BYTES = 4 * SIZE
SLACK = 1 << 12  # what a profiler takes, and what a GPU's allocator rounds up


@pytest.fixture(autouse=True)
def whole_values(monkeypatch):
    """Unless a test says otherwise."""
    monkeypatch.delenv("TORCHKV_PLACES", raising=False)


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.cuda)])
def device(request):
    return request.param


@contextlib.contextmanager
def places(text):
    """Stores created inside the context use these logical devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHKV_PLACES", text)
        yield


def four_times(device):
    return places(",".join([device] * NUM_PLACES))


def create(device):
    with four_times(device):
        return torchkv.create("device")


def on_each(value, device):
    """Four tensors of the device; the place of each is another."""
    return [torch.full((SIZE,), float(value), device=device) for _ in range(NUM_PLACES)]


def assert_filled(tensors, value):
    for tensor in tensors:
        assert_same(tensor.cpu(), torch.full((SIZE,), float(value)))


def allocated(device, function):
    """Bytes of device memory that are allocated while `function` runs."""
    if device == "cpu":
        return allocated_bytes(function)
    name = "allocated_bytes.all.allocated"
    before = torch.cuda.memory_stats()[name]
    function()
    return torch.cuda.memory_stats()[name] - before


def test_the_first_list_shards_a_value_and_later_ones_allocate_nothing(device):
    """Without places it stays where it is: so what is below is of cut values."""
    values, outs = on_each(1, device), on_each(0, device)
    with torchkv.create("device") as whole, create(device) as cut:
        for kv, needed in ((whole, 0), (cut, BYTES)):
            kv.init(3, values[0])
            moved = allocated(device, lambda kv=kv: kv.push(3, values))
            assert needed <= moved < needed + SLACK
            kv.pull(3, out=outs)
            assert_filled(outs, 4)

        def step():
            cut.push(3, values)
            cut.pull(3, out=outs)
            cut.pushpull(3, values[0], out=outs)

        cut.set_optimizer(optim.SGD(lr=1.0, momentum=0.5))
        step()
        assert allocated(device, step) < SLACK


# --- the same results -----------------------------------------------------------


def check(device, scenario):
    """Its results for sharded values must equal those of whole values on the CPU."""
    expected = scenario(lambda tensor: tensor)
    with four_times(device):
        actual = scenario(lambda tensor: tensor.to(device))
    for i, pair in enumerate(zip(actual, expected, strict=True)):
        assert_same_numbers(*pair, f"tensor {i}")


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_bitwise_identical_to_the_cpu(device, dtype, count):
    values = [[numbers(size, dtype) for _ in range(count)] for size in TINY]
    check(device, pushed([each[0] for each in values], values))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts(device, dtype, layout):
    check(device, pushed_in_layouts(dtype, NUM_PLACES, layout))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str
)
@pytest.mark.parametrize(("name", "options"), [*FEW, ("LAMB", {})], ids=ids)
def test_steps_on_shards_are_bitwise_identical_to_those_on_whole_values(
    device, name, options, dtype
):
    """Results on a GPU are close to the CPU's: see test_cuda_results.py."""
    scenario = stepped(name, options, dtype, TINY, count=NUM_PLACES)
    expected = scenario(lambda tensor: tensor.to(device))
    with four_times(device):
        actual = scenario(lambda tensor: tensor.to(device))
    for pair in zip(actual, expected, strict=True):
        assert_same(*pair)


@pytest.mark.parametrize("target", ["whole", "cut"])
@pytest.mark.parametrize("source", ["whole", "cut"])
def test_a_state_dict_is_the_same_for_sharded_values(device, source, target):
    keys = [3, 5]
    weights = [torch.randn(33), torch.randn(2, 3, 5, 4).permute(0, 3, 1, 2)]
    first, second = (
        [[torch.randn_like(w).to(device) for _ in range(NUM_PLACES)] for w in weights]
        for _ in range(2)
    )
    make = {
        "whole": functools.partial(torchkv.create, "device"),
        "cut": functools.partial(create, device),
    }
    with make[source]() as kv, make[target]() as loaded:
        kv.init(keys, [weight.to(device) for weight in weights])
        kv.set_optimizer(optim.AdamW(lr=0.1))
        kv.push(keys, first)
        loaded.load_state_dict(kv.state_dict())
        assert everything(loaded) == everything(kv)
        for store in (kv, loaded):
            store.push(keys, second)
        assert everything(loaded) == everything(kv)


def add_cumsum(key: int, input: torch.Tensor, stored: torch.Tensor) -> None:
    stored.add_(input.cumsum(0))


@pytest.mark.parametrize("updater", ["python", "scripted"])
def test_an_opaque_updater_gets_whole_values(device, updater):
    """Before and after optimizers, for which values are sharded."""
    values, outs = on_each(1, device), on_each(0, device)
    opaque = add_cumsum if updater == "python" else script(add_cumsum)
    with create(device) as kv:
        kv.init(3, values[0])
        kv.push(3, values)
        kv.set_updater(opaque)
        kv.push(3, values)
        kv.pull(3, out=outs)
        expected = 4.0 + 4 * torch.arange(1, SIZE + 1)
        for out in outs:
            assert_same(out.cpu(), expected)
        kv.set_optimizer(optim.SGD(lr=0.25))
        kv.push(3, values)
        kv.set_updater(opaque)
        kv.push(3, values[0])
        expected = expected - 1 + torch.arange(1, SIZE + 1)
        assert_same(kv.pull(3).cpu(), expected)


def test_asynchronous_calls(device):
    outs = on_each(0, device)
    with create(device) as kv:
        kv.init(3, outs[0])
        kv.set_optimizer(optim.SGD(lr=1.0, maximize=True))
        for turn in range(1, 10):
            values = on_each(1, device)
            works = [kv.push(3, values, async_op=True)]
            works.append(kv.pull(3, out=outs, async_op=True))
            for work in works:
                work.wait()
            for value in values:
                value.fill_(torch.nan)
            assert_filled(outs, 4 * turn)


@pytest.mark.parametrize("text", ["gpu:0", "cuda:0,,cuda:0", "cpu;cpu"])
def test_a_list_of_no_devices_is_refused(text):
    expected = r"^create: expected TORCHKV_PLACES to be a list of devices .* got '"
    with places(text), pytest.raises(ValueError, match=f"{expected}{text}'$"):
        torchkv.create("device")
    torchkv.create("device").close()


# --- streams and graphs -----------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("updater", test_cuda_streams.UPDATERS)
def test_tensors_may_be_overwritten_and_freed_right_after_a_push(streams, updater):
    with four_times("cuda:0"):
        test_cuda_streams.test_a_pull_sees_pushes_of_other_streams(
            streams, updater, NUM_PLACES
        )


@pytest.mark.cuda
@pytest.mark.parametrize("optimizer", test_cuda_streams.CAPTURED)
def test_replays_of_a_graph_do_what_eager_calls_do(streams, optimizer):
    with four_times("cuda:0"):
        test_cuda_streams.test_replays_of_a_graph_do_what_eager_calls_do(
            streams, optimizer
        )


@pytest.mark.cuda
def test_a_graph_of_asynchronous_calls():
    with four_times("cuda:0"):
        test_cuda_streams.test_a_graph_of_asynchronous_calls()
