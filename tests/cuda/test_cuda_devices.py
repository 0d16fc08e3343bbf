"""Several GPUs: placement of values, sums across devices, and NCCL."""

import os

import pytest
import torch

import torchkv
from dtypes import FLOATS, random_tensor
from helpers import assert_same, run_threads, snapshot
from kv_model import left_to_right
from torchkv import optim

NUM_DEVICES = torch.cuda.device_count()

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(NUM_DEVICES < 2, reason="needs two GPUs"),
    pytest.mark.skipif(
        bool(os.environ.get("TORCHKV_PLACES")),
        reason="TORCHKV_PLACES is set: values are shared out over its places instead",
    ),
]

DEVICES = [torch.device("cuda", index) for index in range(NUM_DEVICES)]
SIZE = 70_001
DELAY = 2_000_000  # cycles: a millisecond


def on_each(values):
    """Each value on a GPU of its own, in turn."""
    return [value.to(DEVICES[i % NUM_DEVICES]) for i, value in enumerate(values)]


def empty_outs(dtype=torch.float32):
    return [torch.full((SIZE,), 77, dtype=dtype, device=d) for d in DEVICES]


@pytest.fixture(params=["device", "nccl"])
def kv(request):
    with torchkv.create(request.param) as store:
        yield store


@pytest.mark.parametrize("first_call", ["push", "pull"])
def test_home_devices_are_balanced_by_bytes_largest_first(kv, first_call):
    sizes = torch.randint(1, 10_000, (40,)).tolist()
    keys = list(range(len(sizes)))
    values = [on_each([torch.ones(size)] * NUM_DEVICES) for size in sizes]
    kv.init(keys, [torch.zeros(size) for size in sizes])
    if first_call == "push":
        kv.push(keys, values)
    else:
        kv.pull(keys, out=values)
    loads = dict.fromkeys(DEVICES, 0)
    for pulled in kv.pull(keys):
        loads[pulled.device] += pulled.numel()
    # Largest first onto the least loaded: no two differ by more than a small key.
    assert max(loads.values()) - min(loads.values()) <= sorted(sizes)[20]


def test_a_value_of_a_gpu_stays_on_it(kv):
    for key, device in enumerate(DEVICES):
        kv.init(key, torch.zeros(5, device=device))
        kv.push(key, on_each([torch.ones(5)] * NUM_DEVICES))
        assert kv.pull(key).device == device


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.complex64], ids=str)
@pytest.mark.parametrize("home", range(min(NUM_DEVICES, 2)))
def test_sums_are_bitwise_identical_to_the_cpu(dtype, home):
    values = [random_tensor((SIZE,), dtype) for _ in range(2 * NUM_DEVICES + 1)]
    expected = left_to_right(values, dtype)
    with torchkv.create("device") as kv:
        kv.init(3, torch.zeros(SIZE, dtype=dtype, device=DEVICES[home]))
        for pushed in (on_each(values), on_each(values[:1]) + values[1:]):
            kv.push(3, pushed)
            outs = empty_outs(dtype)
            kv.pull(3, out=[*outs, torch.zeros(SIZE, dtype=dtype)])
            for out in outs:
                assert_same(out.cpu(), expected)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_steps_are_bitwise_identical_to_those_on_one_gpu(name):
    gradients = torch.randn(5, NUM_DEVICES, SIZE)

    def weights(bring):
        with torchkv.create("device") as kv:
            kv.init(3, torch.zeros(SIZE, device=DEVICES[0]))
            kv.set_optimizer(getattr(optim, name)(lr=0.1))
            for pushed in gradients:
                kv.push(3, bring(pushed))
            return kv.pull(3).cpu()

    expected = weights(lambda pushed: [value.to(DEVICES[0]) for value in pushed])
    assert_same(weights(on_each), expected)


def test_tensors_may_be_overwritten_and_freed_right_after_a_call(kv):
    """Values come late on their own GPUs; outs are read there."""
    kv.init(3, torch.zeros(SIZE, device=DEVICES[0]))
    for turn in range(50):
        values = []
        for i, device in enumerate(DEVICES):
            with torch.cuda.device(device):
                values.append(torch.full((SIZE,), torch.nan, device=device))
                torch.cuda._sleep(DELAY)
                values[-1].fill_(turn + i)
        outs = empty_outs()
        kv.push(3, values)
        for value in values:
            value.fill_(torch.nan)
        del values, value
        kv.pull(3, out=outs)
        total = torch.full((SIZE,), float(sum(turn + i for i in range(NUM_DEVICES))))
        for out in outs:
            assert_same(out.cpu(), total, f"turn {turn}")


def test_threads_with_a_gpu_each(kv):
    kv.init(3, torch.zeros(SIZE, device=DEVICES[0]))
    kv.set_optimizer(optim.SGD(lr=1.0, maximize=True))

    def body(device):
        with torch.cuda.device(device):
            for _ in range(25):
                value = torch.ones(SIZE, device=device)
                kv.push(3, value)
                out = torch.zeros(SIZE, device=device)
                kv.pull(3, out=out)
                assert out.min() == out.max() >= 1

    run_threads([lambda device=device: body(device) for device in DEVICES])
    assert_same(kv.pull(3).cpu(), torch.full((SIZE,), 25.0 * NUM_DEVICES))


# --- nccl ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64], ids=str)
def test_nccl_sums_are_near(dtype):
    keys = [0, 1, 2]
    kind = torch.complex64 if dtype.is_complex else torch.float64
    values = [
        [torch.randn(size, dtype=kind).to(dtype) for _ in DEVICES]
        for size in (0, 1, SIZE)
    ]
    with torchkv.create("nccl") as kv:
        kv.init(keys, [torch.zeros_like(each[0]) for each in values])
        kv.push(keys, [on_each(each) for each in values])
        outs = [on_each([torch.zeros_like(value) for value in each]) for each in values]
        kv.pull(keys, out=outs)
        for each, pulled in zip(values, outs, strict=True):
            expected = left_to_right(each, dtype)
            # NCCL rounds at every hop.
            near = {torch.float16: 5e-2, torch.bfloat16: 2e-1}.get(dtype, 1e-5)
            for out in pulled:
                torch.testing.assert_close(out.cpu(), expected, rtol=near, atol=near)
                assert_same(out.cpu(), pulled[0].cpu(), "one value went to all")


def test_nccl_and_device_stores_interleaved():
    """On the same tensors, with small integers, whose sums are exact."""
    stores = [torchkv.create(name) for name in ("device", "nccl", "device")]
    for store in stores:
        store.init([3, 5], [torch.zeros(SIZE), torch.zeros(7)])
        store.set_optimizer(optim.SGD(lr=1.0))
    for turn in range(10):
        large = on_each(
            [torch.full((SIZE,), float(turn + i)) for i in range(NUM_DEVICES)]
        )
        small = on_each([torch.full((7,), float(turn))] * NUM_DEVICES)
        for store in stores:
            store.push([3, 5], [large, small])
            store.pull([3, 5], out=[empty_outs(), [small[0].clone()]])
    total = sum(turn + i for turn in range(10) for i in range(NUM_DEVICES))
    for store in stores:
        assert_same(store.pull(3).cpu(), torch.full((SIZE,), -float(total)))
        assert snapshot(store) == snapshot(stores[0])
    for store in stores:
        store.close()


# --- errors -------------------------------------------------------------------


def test_errors_name_the_key_and_change_nothing(kv):
    kv.init([3, 5], [torch.zeros(5), torch.zeros(5)])
    right = on_each([torch.ones(5)] * NUM_DEVICES)
    wrong = [*right[:-1], torch.ones(4, device=DEVICES[-1])]
    before = snapshot(kv)
    with pytest.raises(ValueError, match=r"^push: expected .*\(key 5\)"):
        kv.push([3, 5], [right, wrong])
    with pytest.raises(ValueError, match=r"^pull: expected .*\(key 5\)"):
        kv.pull([3, 5], out=[right, wrong])
    with pytest.raises(KeyError, match="7"):
        kv.push([3, 7], [right, right])
    assert snapshot(kv) == before
    assert all(bool((value == 1).all()) for value in right)
    kv.push([3, 5], [right, right])
    assert_same(kv.pull(5).cpu(), torch.full((5,), float(NUM_DEVICES)))
