"""CUDA kernels: results of a store on a GPU, compared with the same on the CPU.

Sums and copies have the same bits, with a NaN as a NaN; steps of optimizers are off by
at most two units in the last place. Tests with `tiny` in their name run under
compute-sanitizer, too.
"""

from operator import attrgetter

import pytest
import torch

import torchkv
from dtypes import COMPLEX, FLOAT8S, FLOATS, INTS, WIDE_UNSIGNED, random_tensor
from helpers import assert_same
from kv_model import kept, left_to_right, sgd_step
from optim_cases import CASES, ids
from torchkv import optim

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

DEVICE = "cuda"
DTYPES = [*FLOATS, *FLOAT8S, *INTS, *WIDE_UNSIGNED, *COMPLEX, torch.bool]
COUNTS = [1, 2, 3, 4, 5, 8, 9]
TINY = [0, 1, 3, 4097]
SIZES = pytest.mark.parametrize(
    "sizes", [pytest.param(TINY, id="tiny"), pytest.param([2**20 + 1], id="large")]
)
PERIOD = 4999


def specials(dtype):
    """What sums may treat in ways of their own."""
    info = torch.finfo(dtype)
    tiny = info.smallest_normal
    numbers = [torch.nan, torch.inf, -torch.inf, -0.0, 0.0, tiny / 2, info.max]
    return torch.tensor(numbers, dtype=torch.float64)


def numbers(size, dtype):
    """Values over several binades with special ones; periodic, for speed."""
    if not (dtype.is_floating_point or dtype.is_complex):
        value = random_tensor((PERIOD,), dtype)
    else:
        kind = torch.complex128 if dtype.is_complex else torch.float64
        wide = random_tensor((PERIOD,), kind)
        reals = torch.view_as_real(wide).view(-1) if dtype.is_complex else wide
        for special in specials(dtype):
            reals[torch.randint(reals.numel(), (20,))] = special
        value = wide.to(dtype)
    return value.repeat(size // PERIOD + 1)[:size]


def comparable(tensor):
    """Numbers as doubles, which hold them all, and one NaN instead of many."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not tensor.is_floating_point():
        return tensor
    wide = tensor.double()
    return torch.where(wide.isnan(), torch.nan, wide)


def assert_same_numbers(actual, expected, note=""):
    assert actual.dtype == expected.dtype
    assert_same(comparable(actual.cpu()), comparable(expected), note)


def check_on_gpu(scenario):
    """The scenario's tensors must be the same numbers on the GPU as on the CPU.

    A scenario takes a function that brings a tensor where the store shall find it.
    """
    expected = scenario(lambda tensor: tensor)
    actual = scenario(lambda tensor: tensor.to(DEVICE))
    for i, pair in enumerate(zip(actual, expected, strict=True)):
        assert pair[0].device.type == DEVICE
        assert_same_numbers(*pair, f"tensor {i}")


def poisoned(tensor):
    """A tensor of the same kind that is correct only after all of it is written."""
    poison = 1 if tensor.dtype is torch.bool else 77
    return torch.full_like(tensor, poison)


# --- sums and copies ----------------------------------------------------------


def pushed(stored, values):
    """A scenario: one push of all keys, then one pull into two outs per key."""

    def scenario(put):
        keys = list(range(len(stored)))
        with torchkv.create("device") as kv:
            kv.init(keys, [put(poisoned(value)) for value in stored])
            kv.push(keys, [[put(value) for value in each] for each in values])
            outs = [[put(poisoned(value)) for _ in range(2)] for value in stored]
            kv.pull(keys, out=outs)
            return [out for each in outs for out in each] + kv.pull(keys)

    return scenario


@SIZES
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums(dtype, count, sizes):
    values = [[numbers(size, dtype) for _ in range(count)] for size in sizes]
    check_on_gpu(pushed([each[0] for each in values], values))


@pytest.mark.parametrize("count", [64, 600], ids=lambda count: f"tiny-{count}")
def test_sums_of_many_values(count):
    """The pointers of 600 do not fit into the parameters of a small launch."""
    values = [[numbers(100, torch.float32) for _ in range(count)]]
    check_on_gpu(pushed([values[0][0]], values))


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [
        ([torch.bfloat16] * 3, torch.float32),
        ([torch.float16], torch.float32),
        ([torch.float32, torch.bfloat16, torch.bfloat16], torch.float32),
        ([torch.float32] * 2, torch.bfloat16),
        ([torch.bfloat16, torch.float16], torch.float16),
        ([torch.float32, torch.float64], torch.float32),
        ([torch.int8] * 2, torch.int64),
        ([torch.bool] * 2, torch.float32),
        ([torch.complex64] * 2, torch.complex128),
    ],
    ids=str,
)
def test_tiny_sums_of_several_dtypes(kinds, dtype):
    values = [[numbers(size, kind) for kind in kinds] for size in TINY]
    check_on_gpu(pushed([each[0].to(dtype) for each in values], values))


def shifted(tensor):
    """A copy whose memory starts at an offset of one element."""
    flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return flat[1:].view(tensor.shape).copy_(tensor)


LAYOUTS = {
    "dense": lambda tensor: tensor.clone(),
    "misaligned": shifted,
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(0, 3).contiguous().transpose(0, 3),
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 1],
}


def pushed_in_layouts(dtype, count, layout):
    """A scenario: values stored in `layout`, pushed and pulled in each, and mixed."""
    shape = (5, 7, 6, 11)
    forms = [[each] * count for each in LAYOUTS] + [list(LAYOUTS)]
    values = [[numbers(2310, dtype).view(shape) for _ in form] for form in forms]

    def scenario(put):
        keys = list(range(len(forms)))
        pushed = [
            [LAYOUTS[name](put(value)) for name, value in zip(form, each, strict=True)]
            for form, each in zip(forms, values, strict=True)
        ]
        with torchkv.create("device") as kv:
            kv.init(keys, [LAYOUTS[layout](put(each[0])) for each in values])
            kv.push(keys, pushed)
            # Into the pushed tensors, which have every layout.
            kv.pull(keys, out=pushed)
            return [out for outs in pushed for out in outs] + kv.pull(keys)

    return scenario


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda name: f"tiny-{name}")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_layouts(dtype, count, layout):
    check_on_gpu(pushed_in_layouts(dtype, count, layout))


@pytest.mark.parametrize("first_on_gpu", [0, 1])
def test_values_and_outs_of_the_cpu_among_those_of_the_gpu(first_on_gpu):
    values = [numbers(4097, torch.bfloat16) for _ in range(5)]
    outs = []

    def scenario(put):
        def mixed(tensors):
            return [
                put(tensor) if i % 2 == first_on_gpu else tensor.clone()
                for i, tensor in enumerate(tensors)
            ]

        with torchkv.create("device") as kv:
            kv.init(3, torch.zeros(4097, dtype=torch.bfloat16))
            kv.push(3, mixed(values))
            outs.append(mixed([poisoned(value) for value in values]))
            kv.pull(3, out=outs[-1])
            return [kv.pull(3)]

    check_on_gpu(scenario)
    for actual, expected in zip(outs[1], outs[0], strict=True):
        assert_same(comparable(actual.cpu()), comparable(expected))


@pytest.mark.parametrize("optimizer", [None, "SGD", "AdamW", "Adagrad", "LAMB"])
def test_many_keys_in_one_call(optimizer):
    """More than fit into the parameters of one launch, of two dtypes."""
    dtypes = [torch.float32, torch.bfloat16]
    sizes = torch.randint(1, 300, (1000,)).tolist()
    weights = [torch.randn(size).to(dtypes[i % 2]) for i, size in enumerate(sizes)]
    values = [[torch.randn_like(weight) for _ in range(2)] for weight in weights]

    def scenario(put):
        keys = list(range(1000))
        with torchkv.create("device") as kv:
            kv.init(keys, [put(weight) for weight in weights])
            if optimizer:
                kv.set_optimizer(getattr(optim, optimizer)(lr=0.01))
            outs = [[put(poisoned(weight)) for _ in range(2)] for weight in weights]
            kv.push(keys, [[put(value) for value in each] for each in values])
            kv.pull(keys, out=outs)
            return [out for each in outs for out in each]

    if optimizer:
        check_steps_on_gpu(scenario)
    else:
        check_on_gpu(scenario)


@pytest.mark.slow
def test_more_than_2_to_the_31_elements():
    size = 2**31 + 4099
    needed = size * (5 * 2 + 4) + 2**33  # values, stored, outs; master; rest
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of GPU memory")
    values = []
    for period in (65_521, 65_519):
        some = random_tensor((period,), torch.bfloat16).to(DEVICE)
        values.append(some.repeat(size // period + 1)[:size])
    weight = None

    def check(step):
        for begin in range(0, size, 2**27):
            part = slice(begin, begin + 2**27)
            before = None if weight is None else weight[part]
            expected = step([value[part] for value in values], before)
            assert torch.equal(out[part], expected), begin

    with torchkv.create("device") as kv:
        kv.init(3, values[0])
        kv.push(3, values)
        out = torch.full_like(values[0], torch.nan)
        kv.pull(3, out=out)
        check(lambda parts, _: left_to_right(parts, torch.bfloat16))
        kv.set_optimizer("sgd", learning_rate=1.0)
        kv.push(3, values)
        weight = out
        out = torch.full_like(weight, torch.nan)
        kv.pull(3, out=out)
    check(lambda parts, w: sgd_step(parts, kept(w), 1.0).bfloat16())


# --- optimizers ---------------------------------------------------------------

INTS_OF = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def places(tensor):
    """The rank of each number among all numbers of its dtype, counted from zero."""
    raw = tensor.view(INTS_OF[tensor.dtype]).long()
    lowest = -(2 ** (8 * tensor.itemsize - 1))
    return torch.where(raw < 0, lowest - raw, raw)


def assert_within_two_ulp(actual, expected):
    assert actual.device.type == DEVICE and actual.dtype == expected.dtype
    actual = actual.cpu()
    if expected.is_complex():
        actual, expected = torch.view_as_real(actual), torch.view_as_real(expected)
    assert expected.isfinite().all() and actual.isfinite().all()
    apart = places(actual) - places(expected)
    # Not by abs(): of doubles far apart the difference may have wrapped.
    assert ((apart <= 2) & (apart >= -2)).all(), f"{actual}\n{expected}"


def check_steps_on_gpu(scenario, assert_near=assert_within_two_ulp):
    """As check_on_gpu, for what optimizers have made."""
    expected = scenario(lambda tensor: tensor)
    actual = scenario(lambda tensor: tensor.to(DEVICE))
    for pair in zip(actual, expected, strict=True):
        assert_near(*pair)


def stepped(name, options, dtype, sizes, count=2, steps=3):
    """A scenario: values and the optimizer's state after some steps."""
    kind = dtype if dtype.is_complex else torch.float64
    weights = [torch.randn(size, dtype=kind).to(dtype) for size in sizes]
    gradients = [
        [[torch.randn(n, dtype=kind).to(dtype) for _ in range(count)] for n in sizes]
        for _ in range(steps)
    ]

    def scenario(put):
        keys = list(range(len(sizes)))
        with torchkv.create("device") as kv:
            kv.init(keys, [put(weight) for weight in weights])
            kv.set_optimizer(attrgetter(name)(optim)(**options))
            for pushed in gradients:
                kv.push(keys, [[put(value) for value in each] for each in pushed])
            states = kv.optimizer.state_dict()["state"]
            return kv.pull(keys) + [
                tensor
                for key in keys
                for _, tensor in sorted(states[key].items())
                if isinstance(tensor, torch.Tensor)
            ]

    return scenario


@pytest.mark.parametrize(("name", "options"), CASES, ids=ids)
def test_every_option_of_the_optimizers(name, options):
    check_steps_on_gpu(stepped(name, options, torch.float32, TINY))


FEW = [
    ("SGD", {"lr": 0.05}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.02}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.02}),
    ("AdamW", {"lr": 0.01}),
    ("Adagrad", {"lr": 0.05, "initial_accumulator_value": 0.5}),
    ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.8}),
    ("Lion", {"lr": 0.01, "weight_decay": 0.02}),
    ("SGD", {"lr": 0.05, "rescale_grad": 0.5, "clip_value": 0.25}),
    ("AdamW", {"lr": 0.01, "accumulate": 2}),
]


@SIZES
@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64], ids=str)
@pytest.mark.parametrize(("name", "options"), FEW, ids=ids)
def test_optimizers_of_every_dtype(name, options, dtype, sizes):
    check_steps_on_gpu(stepped(name, options, dtype, sizes))


@pytest.mark.parametrize("count", COUNTS, ids=lambda count: f"tiny-{count}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_optimizers_of_any_number_of_values(name, dtype, count):
    options = {"momentum": 0.9} if name == "SGD" else {}
    check_steps_on_gpu(stepped(name, options, dtype, TINY, count))


WITH_NORMS = [
    ("LAMB", {"weight_decay": 0.1}),
    ("mxnet.LAMB", {"lower_bound": 0.5, "upper_bound": 8.0}),
    ("mxnet.LARS", {"momentum": 0.9, "eta": 0.5, "wd": 0.1}),
    ("mxnet.LARS", {"momentum": 0.9, "eta": 0.5, "momentum_correction": False}),
    ("mxnet.LBSGD", {"momentum": 0.9, "warmup_strategy": "lars"}),
]


@SIZES
@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64], ids=str)
@pytest.mark.parametrize(("name", "options"), WITH_NORMS, ids=ids)
def test_rules_that_need_norms_are_near(name, options, dtype, sizes):
    def assert_near(actual, expected):
        tolerance = 1e-2 if expected.dtype in (torch.half, torch.bfloat16) else 1e-5
        torch.testing.assert_close(
            actual.cpu(), expected, rtol=tolerance, atol=tolerance
        )

    check_steps_on_gpu(stepped(name, options, dtype, sizes), assert_near)


def test_a_skipped_step_changes_nothing():
    def scenario(put):
        with torchkv.create("device") as kv:
            kv.init(3, put(torch.arange(5.0)))
            kv.set_optimizer(optim.SGD(lr=1.0, skip_nonfinite=True))
            kv.push(3, put(torch.tensor([1.0, torch.nan, 1, 1, 1])))
            kv.push(3, put(torch.ones(5)))
            return [kv.pull(3)]

    check_on_gpu(scenario)


@pytest.mark.parametrize("behind", [0, 1], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str
)
def test_tiny_norms_are_near(dtype, count, behind):
    """Equal up to rounding: a GPU adds up the squares in another order."""
    sizes = [1, 3, 4097, 70_001]
    values = [
        [torch.randn(size + behind).to(dtype) for _ in range(count)] for size in sizes
    ]

    def norm_and_weights(device):
        keys = list(range(len(sizes)))
        with torchkv.create("device") as kv:
            kv.init(keys, [torch.zeros(n, dtype=dtype, device=device) for n in sizes])
            kv.set_optimizer(optim.SGD(lr=1.0, max_norm=2.0, clip_value=1.5))
            kv.push(keys, [[v.to(device)[behind:] for v in each] for each in values])
            return kv.optimizer.grad_norm, [value.cpu() for value in kv.pull(keys)]

    norm, weights = norm_and_weights(DEVICE)
    expected, others = norm_and_weights("cpu")
    assert norm == pytest.approx(expected, rel=1e-12)
    for weight, other in zip(weights, others, strict=True):
        torch.testing.assert_close(
            weight, other, rtol=1e-2 if weight.itemsize == 2 else 1e-6, atol=1e-7
        )


# --- memory -------------------------------------------------------------------


def num_allocations():
    return torch.cuda.memory_stats()["allocation.all.allocated"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "options"), [(None, {}), ("SGD", {"momentum": 0.9}), ("AdamW", {})]
)
def test_a_steady_state_allocates_nothing(name, options, dtype):
    keys = [0, 1, 2]
    values = [
        [torch.ones(size, dtype=dtype, device=DEVICE) for _ in range(2)]
        for size in (1, 4097, 2**20 + 1)
    ]
    outs = [[torch.zeros_like(value) for value in each] for each in values]

    with torchkv.create("device") as kv:
        kv.init(keys, [each[0] for each in values])
        if name:
            kv.set_optimizer(getattr(optim, name)(**options))

        def step():
            kv.push(keys, values)
            kv.pull(keys, out=outs)
            kv.pushpull(keys, values, out=outs)
            kv.push(1, values[1][0])

        step()
        before = num_allocations()
        for _ in range(5):
            step()
        assert num_allocations() == before
        kv.pull(1)  # which must allocate: the counter works
        assert num_allocations() == before + 1
