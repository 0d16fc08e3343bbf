"""Sums: left to right in the accumulation type, rounded once, reproducible."""

import itertools

import pytest
import torch

import torchkv
from dtypes import COMPLEX, FLOAT8S, FLOATS, INTS, WIDE_UNSIGNED, random_tensor
from helpers import assert_same, bits, run_threads, stored
from kv_model import left_to_right

LENGTHS = [0, 1, 7, 63, 1025, 70001]

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def check_sum(kv, values, dtype, key=3):
    """Pushes `values` to a key of `dtype`; its bits must be those of the plain loop."""
    expected = left_to_right([value.cpu() for value in values], dtype)
    kv.init(key, torch.zeros_like(values[0], dtype=dtype))
    kv.push(key, values)
    assert_same(stored(kv, key), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9, 17])
def test_sums_are_bitwise_identical_to_a_plain_loop(kv, dtype, count):
    for key, length in enumerate(LENGTHS):
        values = [random_tensor((length,), dtype) for _ in range(count)]
        check_sum(kv, values, dtype, key)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_inputs_can_tell_orders_and_roundings_apart(dtype):
    values = [random_tensor((1025,), dtype) for _ in range(5)]
    right = bits(left_to_right(values, dtype))
    if dtype in (torch.float64, torch.float32):
        assert bits(left_to_right(values[::-1], dtype)) != right
        tree = (values[0] + values[1]) + (values[2] + values[3]) + values[4]
        assert bits(tree) != right
    else:
        rounded_each_time = values[0]
        for value in values[1:]:
            rounded_each_time = rounded_each_time + value
        assert bits(rounded_each_time) != right


@pytest.mark.parametrize(
    "dtype", [*FLOATS, *FLOAT8S, *INTS, *COMPLEX, torch.bool], ids=str
)
def test_every_dtype(kv, devices, dtype):
    for key, length in enumerate([1, 37]):
        values = [random_tensor((length,), dtype).to(device) for device in devices]
        check_sum(kv, values, dtype, key)


@pytest.mark.parametrize("dtype", WIDE_UNSIGNED, ids=str)
def test_wide_unsigned(kv, dtype):
    """torch cannot add these: an exact sum, or a refusal that changes nothing."""
    values = [random_tensor((37,), dtype) for _ in range(4)]
    kv.init([3, 5], [torch.zeros(37), values[0]])
    kv.push(5, values[1])
    assert_same(stored(kv, 5), values[1], "one value is not added to anything")
    try:
        kv.push([3, 5], [[torch.ones(37)] * 4, values])
    except NotImplementedError as error:
        assert str(error).startswith("push: expected") and "(key 5)" in str(error)
        assert_same(stored(kv, 3), torch.zeros(37))
        assert_same(stored(kv, 5), values[1])
    else:
        total = sum(value.to(torch.int64) for value in values)
        assert_same(stored(kv, 5), total.to(dtype))


def test_ints_wrap_and_bools_are_ored(kv):
    kv.init([3, 5], [torch.zeros(2, dtype=torch.int8), torch.zeros(2).bool()])
    kv.push(3, [torch.tensor([100, -100], dtype=torch.int8)] * 2)
    assert_same(stored(kv, 3), torch.tensor([-56, 56], dtype=torch.int8))
    kv.push(5, [torch.tensor([True, False])] * 3)
    assert_same(stored(kv, 5), torch.tensor([True, False]))


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [
        ([torch.float64, torch.float32], torch.float32),
        ([torch.float32, torch.float64, torch.float16], torch.float16),
        ([torch.float16, torch.bfloat16], torch.float16),
        ([torch.float16] * 3, torch.float32),
        ([torch.float16] * 3, torch.bfloat16),
        ([torch.bfloat16] * 3, torch.float64),
        ([torch.float32] * 3, torch.float64),
        ([torch.float64] * 3, torch.float16),
        ([torch.int64, torch.float32], torch.float32),
        ([torch.int8] * 3, torch.int64),
        ([torch.int64] * 3, torch.int8),
        ([torch.uint8, torch.int8], torch.int8),
        ([torch.bool] * 3, torch.int32),
        ([torch.bool] * 3, torch.float32),
        ([torch.bool, torch.int16], torch.float16),
        ([torch.int32] * 3, torch.bfloat16),
        ([torch.float32, torch.complex64], torch.complex128),
        ([torch.float64] * 3, torch.complex64),
    ],
    ids=str,
)
def test_mixed_dtypes(kv, devices, kinds, dtype):
    values = [
        random_tensor((37,), kind).to(device)
        for kind, device in zip(kinds, devices, strict=False)
    ]
    check_sum(kv, values, dtype)
    kv.push(3, values[0])
    assert_same(stored(kv, 3), values[0].cpu().to(dtype), "one value is converted")


def test_an_updaters_input_is_rounded_once(kv):
    seen = []
    kv.set_updater(lambda key, input, stored: seen.append(input.clone()))
    for key, dtype in enumerate(FLOATS):
        values = [random_tensor((1025,), torch.float64) for _ in range(5)]
        kv.init(key, torch.zeros(1025, dtype=dtype))
        kv.push(key, values)
        assert_same(seen[-1], left_to_right(values, dtype))
        halves = [value.half() for value in values]
        kv.push(key, halves)
        assert_same(seen[-1], left_to_right(halves, dtype))
        kv.push(key, values[0])
        assert_same(seen[-1], values[0].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_signed_zeros_infinities_and_subnormals(kv, dtype):
    tiny = torch.finfo(dtype).smallest_normal / 2
    top = torch.finfo(dtype).max
    rows = [[-0.0, 0.0, tiny, torch.inf, top], [-0.0, -0.0, tiny, -1.0, top]]
    values = [torch.tensor(row, dtype=dtype) for row in rows]
    check_sum(kv, values, dtype)
    kv.push(3, values[0])
    assert_same(stored(kv, 3), values[0])
    kv.push(3, [torch.tensor([torch.nan] * 5, dtype=dtype), values[0]])
    assert stored(kv, 3).isnan().all()


def test_intermediate_overflow_of_half_does_not_overflow_the_sum(kv):
    values = [torch.full((7,), v, dtype=torch.float16) for v in (60000, 60000, -60000)]
    check_sum(kv, values, torch.float16)
    assert_same(stored(kv, 3), values[0])


def test_local_and_device_give_the_same_bits_on_every_run():
    values = [random_tensor((70001,), torch.float32) for _ in range(7)]
    seen = set()
    threads = torch.get_num_threads()
    try:
        for run, name in enumerate(["local", "device"] * 3):
            torch.set_num_threads(1 + run % 3)
            with torchkv.create(name) as kv:
                kv.init(3, torch.zeros(70001))
                kv.push(3, values)
                seen.add(bits(stored(kv, 3)))
    finally:
        torch.set_num_threads(threads)
    assert len(seen) == 1


def several_binades(size, dtype):
    """Like random_tensor, but faster for large tensors."""
    some = random_tensor((50_021,), dtype)
    return some.repeat(size // some.numel() + 1)[:size]


@pytest.fixture
def num_threads():
    """torch.set_num_threads, until the end of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


LARGE = 5_000_001  # with replicas, more than any cache holds


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.complex64],
    ids=str,
)
def test_large_values_in_one_thread_and_in_several(num_threads, dtype):
    values = [several_binades(LARGE, dtype) for _ in range(3)]
    odd = values[0][1:].roll(1)  # shifted in memory, too
    with torchkv.create() as kv:
        kv.init([3, 5], [torch.zeros(LARGE, dtype=dtype), odd])
        for count in (1, 3):
            expected = left_to_right(values[:count], dtype)
            for threads in (1, 2):
                num_threads(threads)
                kv.push([3, 5], [values[:count], [odd, odd]])
                assert torch.equal(stored(kv, 3), expected), f"{threads} threads"
                assert torch.equal(stored(kv, 5), odd + odd)
                out = torch.zeros(LARGE + 1, dtype=dtype)[1:]
                kv.pull(3, out=[out, values[0].clone()])
                assert torch.equal(out, expected)


def test_large_values_pushed_by_several_threads(kv):
    """The callers share the threads of the sums."""
    sizes = [3, 900_001, 1_000_000, 1_100_003]
    values = [[several_binades(n, torch.float32) for _ in range(2)] for n in sizes]
    expected = [left_to_right(pair, torch.float32) for pair in values]
    kv.init([0, 1, 2, 3], [torch.zeros(n) for n in sizes])

    def body(key):
        for _ in range(6):
            kv.push(key, values[key])
            assert torch.equal(stored(kv, key), expected[key])
        kv.push([key, 0], [values[key], values[0]])

    run_threads([lambda key=key: body(key) for key in (1, 2, 3)])
    for key in range(4):
        assert_same(stored(kv, key), expected[key])


@pytest.mark.parametrize(
    "shape", [(65, 17, 33), (130, 70), (2, 3, 4, 5, 6), (1, 65, 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_with_a_layout_transposed_to_the_stored_one(kv, shape, dtype):
    """Permuted, sliced and expanded replicas, mixed: these are transposed in tiles."""
    dims = range(len(shape))
    stored_value = random_tensor(shape, dtype)
    kv.init(3, stored_value)
    for order in itertools.islice(itertools.permutations(dims), 0, 24, 5):
        lengths = [shape[i] for i in order]
        back = [order.index(i) for i in dims]
        values = [
            random_tensor(lengths, dtype).permute(back),
            random_tensor(shape, dtype),
            random_tensor([*lengths, 2], torch.float32)[..., 1].permute(back),
            random_tensor((1, *shape[1:]), dtype).expand(shape),
        ]
        kv.push(3, values)
        assert_same(stored(kv, 3), left_to_right(values, dtype), str(order))
        kv.push(3, values[0])
        assert_same(stored(kv, 3), values[0])


@pytest.mark.cuda
def test_same_bits_on_cpu_and_cuda(kv):
    for key, dtype in enumerate(FLOATS):
        values = [random_tensor((70001,), dtype) for _ in range(5)]
        kv.init(key, torch.zeros(70001, dtype=dtype))
        kv.push(key, values)
        on_cpu = stored(kv, key)
        kv.push(key, [value.cuda() for value in values])
        assert_same(stored(kv, key), on_cpu)
        mixed = [value.cuda() if i % 2 else value for i, value in enumerate(values)]
        kv.push(key, mixed)
        assert_same(stored(kv, key), on_cpu)
