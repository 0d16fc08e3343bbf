"""Pull: every kind of `out`, and the calls made of push and pull."""

import pytest
import torch

from helpers import add_input, assert_same, full, stored

COUNT = torch.arange(1.0, 7.0).reshape(2, 3)


def misaligned():
    memory = torch.frombuffer(bytearray(64), dtype=torch.float32, offset=3, count=6)
    return memory.reshape(2, 3)


OUTS = {
    "contiguous": lambda device: torch.zeros(2, 3, device=device),
    "transposed": lambda device: torch.zeros(3, 2, device=device).t(),
    "strided": lambda device: torch.zeros(4, 9, device=device)[::2, ::3],
    "columns": lambda device: torch.zeros(2, 9, device=device)[:, 2:5],
    "unaligned": lambda device: torch.zeros(7, device=device)[1:].reshape(2, 3),
    "misaligned": lambda device: misaligned(),
    "leaf": lambda device: torch.zeros(2, 3, device=device, requires_grad=True),
    "parameter": lambda device: torch.nn.Parameter(torch.zeros(2, 3, device=device)),
    "double": lambda device: torch.zeros(2, 3, dtype=torch.float64, device=device),
    "half": lambda device: torch.zeros(2, 3, dtype=torch.float16, device=device),
    "complex": lambda device: torch.zeros(2, 3, dtype=torch.complex64, device=device),
    "imaginary part": lambda device: torch.zeros(2, 3, dtype=torch.cfloat).imag,
    "negated view": lambda device: torch.zeros(2, 3, dtype=torch.cfloat).conj().imag,
    "conjugate view": lambda device: torch.zeros(2, 3, dtype=torch.cfloat).conj(),
}


@pytest.mark.parametrize("kind", OUTS)
def test_every_out(kv, devices, kind):
    kv.init(3, COUNT.to(devices[0]))
    out = OUTS[kind](devices[-1])
    pointer, strides, version = out.data_ptr(), out.stride(), out._version
    assert kv.pull(3, out=out) is None
    assert_same(out, COUNT.to(out.dtype))
    assert (out.data_ptr(), out.stride()) == (pointer, strides)
    assert out._version > version
    others = [OUTS[kind](device) for device in devices]
    kv.pull(3, out=others)
    for other in others:
        assert_same(other, COUNT.to(other.dtype))
    assert_same(stored(kv, 3), COUNT)


def test_a_view_changes_only_its_own_part(kv):
    kv.init(3, COUNT)
    base = torch.full((4, 5), 9.0)
    version = base._version
    kv.pull(3, out=base[1:3, 1:4])
    expected = torch.full((4, 5), 9.0)
    expected[1:3, 1:4] = COUNT
    assert_same(base, expected)
    assert base._version > version, "a view shares its base's version counter"


@pytest.mark.parametrize("stored_as", ["contiguous", "transposed", "channels last"])
def test_the_stored_layout_does_not_matter(kv, stored_as):
    value = torch.arange(120.0).reshape(2, 3, 4, 5)
    laid_out = {
        "contiguous": value,
        "transposed": value.transpose(0, 3).contiguous().transpose(0, 3),
        "channels last": value.contiguous(memory_format=torch.channels_last),
    }[stored_as]
    kv.init(3, laid_out)
    for out in (
        torch.zeros(2, 3, 4, 5),
        torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.zeros(5, 4, 3, 2).permute(3, 2, 1, 0),
        torch.zeros(2, 3, 4, 10)[..., ::2],
    ):
        kv.pull(3, out=out)
        assert_same(out, value)
    assert_same(kv.pull(3), value)


def test_a_leaf_is_written_as_an_optimizer_writes_it(kv):
    kv.init(3, COUNT)
    weight = torch.nn.Parameter(full(1))
    loss = (weight * weight).sum()
    kv.pull(3, out=weight)
    assert weight.requires_grad and weight.is_leaf and weight.grad_fn is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    (weight * weight).sum().backward()
    assert_same(weight.grad, COUNT * 2)


def test_a_view_of_a_leaf(kv):
    kv.init(3, COUNT)
    weight = torch.nn.Parameter(torch.zeros(4, 3))
    kv.pull(3, out=weight[1:3])
    assert_same(weight[1:3], COUNT)
    assert weight.is_leaf and weight.grad_fn is None
    weight.sum().backward()
    assert_same(weight.grad, torch.ones(4, 3))


def test_result_of_a_graph_as_out(kv):
    kv.init(3, COUNT)
    weight = torch.nn.Parameter(full(1))
    product = weight * 2
    kv.pull(3, out=product)
    assert_same(product, COUNT)


def test_the_same_out_several_times(kv):
    kv.init([3, 5, 7], [full(3), full(5), full(7)])
    out = full(0)
    kv.pull(3, out=[out, out, out])
    assert_same(out, full(3))
    kv.pull([3, 5, 7], out=[out] * 3)
    assert_same(out, full(7), "the last key wins")
    kv.pull([3, 5, 7], out=[[out, out]] * 3)
    assert_same(out, full(7))
    kv.pull([7, 3], out=[out] * 2)
    assert_same(out, full(3))


def test_repeated_keys_fill_every_out(kv):
    kv.init([3, 5], [full(3), full(5)])
    a, b, c = full(0), full(0), full(0)
    kv.pull([3, 5, 3], out=[a, b, c])
    assert_same(a, full(3))
    assert_same(b, full(5))
    assert_same(c, full(3))
    x, y = kv.pull([3, 3])
    x.fill_(9)
    assert_same(y, full(3), "two new tensors")


def test_the_pushed_tensor_itself(kv):
    kv.init(3, full(1))
    kv.set_updater(add_input)
    value = full(2)
    kv.push(3, value)
    kv.pull(3, out=value)
    assert_same(value, full(3))
    kv.push(3, [value, value])
    kv.pull(3, out=[value, value])
    assert_same(value, full(9))
    value.fill_(0)
    assert_same(stored(kv, 3), full(9))


def test_without_out(kv):
    kv.init([3, 5], [COUNT, full(5, dtype=torch.float16)])
    out = kv.pull(3)
    assert isinstance(out, torch.Tensor)
    assert_same(out, COUNT)
    out.fill_(9)
    assert_same(stored(kv, 3), COUNT, "a new tensor, no alias")
    outs = kv.pull([5, 3])
    assert type(outs) is list and len(outs) == 2
    assert_same(outs[0], full(5, dtype=torch.float16))
    assert_same(outs[1], COUNT)
    assert type(kv.pull([3])) is list
    kv.push(3, full(1))
    assert_same(outs[1], COUNT, "a later push does not reach it")
    assert not outs[0].requires_grad


def test_empty_and_scalar_values(kv):
    kv.init([3, 5, 7], [torch.zeros(0), torch.tensor(5.0), torch.zeros(2, 0, 3)])
    outs = [torch.zeros(0), torch.tensor(0.0), torch.zeros(2, 0, 3)]
    kv.pull([3, 5, 7], out=outs)
    assert_same(outs[1], torch.tensor(5.0))
    assert_same(kv.pull(7), torch.zeros(2, 0, 3))
    assert_same(kv.pull(5), torch.tensor(5.0))


def test_under_inference_mode(kv):
    kv.init(3, COUNT)
    normal, inside = full(0), []
    version = normal._version
    with torch.inference_mode():
        inside.append(full(0))
        kv.pull(3, out=[normal, inside[0]])
        assert_same(kv.pull(3), COUNT)
        assert inside[0].is_inference()
        assert_same(inside[0], COUNT)
    assert_same(normal, COUNT)
    assert normal._version > version
    kv.push(3, full(7))
    with torch.inference_mode():
        kv.pushpull(3, full(8), out=inside[0])
        assert_same(inside[0], full(8))


def test_inference_tensor_outside_inference_mode(kv):
    kv.init(3, COUNT)
    with torch.inference_mode():
        out = full(0)
    kv.pull(3, out=out)
    assert_same(out, COUNT)


def test_ignore_sparse_has_no_effect_on_a_dense_key(kv):
    kv.init(3, COUNT)
    for flag in (True, False):
        out = full(0)
        kv.pull(3, out=out, ignore_sparse=flag)
        assert_same(out, COUNT)


def test_pushpull(kv, devices):
    placed = [full(1, device) for device in devices]
    outs = [full(0, device) for device in devices]
    kv.init([3, 5], [full(0), full(0)])
    assert kv.pushpull(3, placed, out=outs) is None
    for value, out in zip(placed, outs, strict=True):
        assert_same(out, full(4))
        assert_same(value, full(1), "with an out, the value is only read")
    kv.set_updater(add_input)
    kv.pushpull([3, 5], [placed, placed], out=[outs[0], outs[1]])
    assert_same(outs[0], full(8))
    assert_same(outs[1], full(4))
    kv.pushpull([3, 3], [full(1), full(1)], out=[outs[0], outs[1]])
    assert_same(outs[0], full(10))
    assert_same(outs[1], full(10))


def test_pushpull_without_out_writes_over_the_value(kv, devices):
    kv.init([3, 5], [full(0), full(0)])
    kv.set_updater(add_input)
    one = full(1, devices[0])
    kv.pushpull(3, one)
    kv.pushpull(3, one)
    assert_same(one, full(2))
    placed = [full(1, device) for device in devices]
    kv.pushpull(3, placed)
    for value in placed:
        assert_same(value, full(6))
    kv.pushpull([3, 5], [placed, [one]])
    assert_same(placed[3], full(30))
    assert_same(one, full(2))
    one.fill_(0)
    assert_same(stored(kv, 5), full(2))


def test_broadcast(kv, devices):
    outs = [full(0, device) for device in devices]
    value = full(3)
    assert kv.broadcast(3, value, outs) is None
    for out in outs:
        assert_same(out, full(3))
    a, b = full(0), full(0)
    kv.broadcast([5, 7], [full(5), full(7)], out=[a, b], priority=1)
    assert_same(a, full(5))
    assert_same(b, full(7))
    assert kv.keys() == [3, 5, 7]
    value.fill_(9)
    assert_same(stored(kv, 3), full(3))
    weight = torch.nn.Parameter(COUNT.clone())
    kv.broadcast(9, weight, weight)
    assert_same(stored(kv, 9), COUNT)


def test_pull_sees_the_push_before_it(kv):
    kv.init(3, full(0))
    out = full(0)
    for value in range(200):
        kv.push(3, full(value))
        kv.pull(3, out=out)
        assert_same(out, full(value))
