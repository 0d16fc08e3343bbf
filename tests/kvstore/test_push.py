"""Push: valid values; pushed tensors are only read and never kept."""

import pytest
import torch

import torchkv
from helpers import (
    add_input,
    assert_same,
    bits,
    full,
    scripted_add_twice,
    snapshot,
    stored,
)
from kv_model import left_to_right


def numbers(shape, start=1.0):
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count).reshape(shape)


def misaligned(offset):
    memory = bytearray(64)
    tensor = torch.frombuffer(memory, dtype=torch.float32, offset=offset, count=6)
    return tensor.copy_(numbers((6,))).reshape(2, 3)


class Subclass(torch.Tensor):
    pass


# Each makes one value of 2 x 3 x ... in a layout of its own.
LAYOUTS = {
    "contiguous": lambda: numbers((2, 3)),
    "transposed": lambda: numbers((3, 2)).t(),
    "strided": lambda: numbers((4, 9))[::2, ::3],
    "slice of columns": lambda: numbers((2, 9))[:, 2:5],
    "unaligned slice": lambda: numbers((7,))[1:].reshape(2, 3),
    "misaligned by one byte": lambda: misaligned(1),
    "misaligned by two bytes": lambda: misaligned(2),
    "flipped": lambda: numbers((2, 3)).flip(0),
    "expanded": lambda: numbers((1, 3)).expand(2, 3),
    "expanded scalar": lambda: torch.tensor(5.0).expand(2, 3),
    "overlapping": lambda: numbers((6,)).as_strided((2, 3), (1, 1)),
    "channels last": lambda: numbers((2, 3, 4, 5)).to(
        memory_format=torch.channels_last
    ),
    "channels last 3d": lambda: numbers((2, 3, 2, 4, 5)).to(
        memory_format=torch.channels_last_3d
    ),
    "permuted": lambda: numbers((5, 2, 3)).permute(1, 2, 0),
    "empty": lambda: torch.zeros(2, 3, 0),
    "empty first": lambda: torch.zeros(0, 3),
    "scalar": lambda: torch.tensor(5.0),
    "one": lambda: torch.tensor([5.0]),
    "odd length": lambda: numbers((1031,)),
    "complex conjugate": lambda: torch.complex(numbers((2, 3)), numbers((2, 3))).conj(),
    "negated view": lambda: torch.complex(numbers((2, 3)), numbers((2, 3))).conj().imag,
    "real part": lambda: torch.complex(numbers((2, 3)), numbers((2, 3))).real,
    "parameter": lambda: torch.nn.Parameter(numbers((2, 3))),
    "subclass": lambda: numbers((2, 3)).as_subclass(Subclass),
    "graph": lambda: torch.nn.Parameter(numbers((2, 3))) * 2,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(kv, devices, layout):
    value = LAYOUTS[layout]()
    plain = torch.empty_like(value, memory_format=torch.contiguous_format).detach()
    plain.copy_(value.detach())
    placed = [value.to(device) for device in devices]

    kv.init(3, placed[0])
    assert_same(stored(kv, 3), plain)
    kv.delete(3)
    kv.init(3, torch.zeros_like(plain))
    kv.push(3, placed[0])
    assert_same(stored(kv, 3), plain)
    kv.push(3, placed)
    assert_same(stored(kv, 3), left_to_right([plain] * 4, plain.dtype))
    kv.push(3, [placed[0], plain.to(devices[1]), placed[2]])
    assert_same(stored(kv, 3), left_to_right([plain] * 3, plain.dtype))
    kv.set_updater(add_input)
    kv.push(3, placed)
    assert_same(stored(kv, 3), left_to_right([plain] * 7, plain.dtype))


def test_a_zero_tensor_counts_as_zeros(kv):
    zeros = torch._efficientzerotensor(2, 3)
    kv.init([3, 5], [zeros, full(1)])
    assert_same(stored(kv, 3), full(0))
    for value in (zeros, [zeros, zeros], torch._efficientzerotensor(2, 3).half()):
        kv.push([3, 5], [value, value])
        assert_same(stored(kv, 3), full(0))
        kv.push(5, full(1))
        kv.push(5, value)
        assert_same(stored(kv, 5), full(0))
    kv.push([3, 5], [[zeros, full(1), zeros, full(2)], [full(4)]])
    assert_same(stored(kv, 3), full(3))
    kv.set_updater(add_input)
    kv.push([3, 5], [[zeros], [full(1), zeros]])
    assert_same(stored(kv, 3), full(3))
    assert_same(stored(kv, 5), full(5))


@pytest.mark.parametrize("layout", ["transposed", "channels last", "expanded"])
def test_the_stored_layout_does_not_matter(kv, layout):
    value = LAYOUTS[layout]()
    kv.init([3, 5], [value, value.contiguous()])
    for pushed in (value, [value] * 3, value.contiguous(), [value.contiguous()] * 2):
        kv.push([3, 5], [pushed] * 2)
        assert bits(stored(kv, 3)) == bits(stored(kv, 5))


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("updater", ["assign", "python", "script"])
def test_a_pushed_tensor_may_be_changed_immediately(kv, count, updater):
    if updater != "assign":
        kv.set_updater(add_input if updater == "python" else scripted_add_twice())
    kv.init(3, full(0))
    gradients = [full(1) for _ in range(count)]
    kv.push(3, gradients if count > 1 else gradients[0])
    before = stored(kv, 3)
    assert bits(before) != bits(full(0))
    for gradient in gradients:
        gradient.fill_(99)
    assert_same(stored(kv, 3), before)


def test_pushed_tensors_are_only_read(kv):
    def scribble(key, input, stored):
        stored += input
        input.fill_(99)

    kv.set_updater(scribble)
    kv.init(3, full(0))
    value = full(1)
    version = value._version
    kv.push(3, value)
    kv.push(3, [value])
    kv.push(3, [value, value])
    kv.push([3, 3], [value, value])
    assert_same(value, full(1))
    assert value._version == version
    assert_same(stored(kv, 3), full(6))


def test_a_tensor_may_be_repeated(kv):
    value = full(1)
    kv.init([3, 5], [value, value])
    kv.push(3, [value] * 5)
    assert_same(stored(kv, 3), full(5))
    kv.push([3, 5], [[value, value], [value, value]])
    assert_same(stored(kv, 5), full(2))
    assert_same(value, full(1))


def test_views_of_one_tensor(kv):
    base = numbers((4, 2, 3))
    kv.init(3, full(0))
    kv.push(3, list(base))
    assert_same(stored(kv, 3), left_to_right(list(base), torch.float32))
    kv.push(3, [base[0], base[:2].sum(0), base[0]])
    assert_same(stored(kv, 3), base[0] + base[:2].sum(0) + base[0])


def test_keys_repeated_in_one_call_make_one_update(kv):
    calls = []

    def record(key, input, stored):
        calls.append((key, input.clone()))

    kv.init([3, 5], [full(0), full(0)])
    kv.push([3, 3], [full(1), full(2)])
    assert_same(stored(kv, 3), full(3))
    kv.set_updater(record)
    kv.push([5, 3, 5, 3], [full(1), full(2), full(4), full(8)])
    kv.push([3, 5, 3], [[full(1), full(2)], [full(4)], [full(8), full(16)]])
    assert [key for key, _ in calls] == [5, 3, 3, 5]
    for (_, seen), value in zip(calls, [5, 10, 27, 4], strict=True):
        assert_same(seen, full(value))


def test_repeated_keys_are_added_left_to_right(kv):
    values = [torch.randn(1025) * 10.0**i for i in (0, 3, -3, 2, -1)]
    kv.init([3, 5], [torch.zeros(1025)] * 2)
    kv.push([3, 5, 3, 3, 3, 3], [*values[:1], values[0], *values[1:]])
    assert_same(stored(kv, 3), left_to_right(values, torch.float32))
    kv.push([3, 3], [values[:2], values[2:]])
    assert_same(stored(kv, 3), left_to_right(values, torch.float32))


def test_no_graph_is_recorded(kv):
    weight = torch.nn.Parameter(full(2))
    kv.init(3, weight)
    kv.push(3, [weight * 2, weight])
    kv.push(3, weight)
    out = kv.pull(3)
    assert not out.requires_grad and out.grad_fn is None
    kv.set_updater(add_input)
    kv.push(3, weight * 3)
    assert_same(stored(kv, 3), full(8))
    assert not kv.pull(3).requires_grad
    assert weight.grad is None


def test_init_under_inference_mode_stores_normal_tensors(kv):
    seen = []

    def update(key, input, stored):
        seen.append((stored.is_inference(), input.is_inference()))
        stored += input

    with torch.inference_mode():
        kv.init(3, full(1))
        kv.push(3, full(2))
    kv.push(3, full(3))
    kv.set_updater(update)
    kv.push(3, [full(1), full(1)])
    with torch.inference_mode():
        kv.push(3, full(1))
        kv.push(3, [full(1), full(1)])
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(9))
    assert {inference for inference, _ in seen} == {False}
    assert not kv.pull(3).is_inference()


def test_inference_tensors_may_be_pushed(kv):
    with torch.inference_mode():
        value = full(2)
    kv.init(3, value)
    kv.push(3, value)
    kv.push(3, [value, full(1), value])
    kv.set_updater(add_input)
    kv.push(3, value)
    assert_same(stored(kv, 3), full(7))
    assert not kv.pull(3).is_inference()


def test_priority_never_changes_results(store_type):
    results = []
    for priorities in ([0, 0, 0], [3, 1, 2], [-5, 10**6, 0]):
        with torchkv.create(store_type) as kv:
            kv.init([3, 5], [full(1), full(1)])
            kv.set_updater(add_input)
            kv.push([3, 5], [full(1), full(2)], priority=priorities[0])
            kv.push(3, full(5), priorities[1])
            kv.pull(3, out=full(0), priority=priorities[2])
            kv.pushpull(5, full(2), priority=priorities[0])
            results.append(snapshot(kv))
    assert results[0] == results[1] == results[2]


def test_push_returns_none(kv):
    assert kv.init(3, full(1)) is None
    assert kv.push(3, full(1)) is None
    assert kv.push([3], [[full(1)]]) is None
