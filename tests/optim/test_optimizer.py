"""set_optimizer: SGD fused with the sum, bit for bit, and as an updater."""

import copy
import itertools
import pickle

import pytest
import torch

import torchkv
from dtypes import random_tensor
from helpers import (
    ScriptHolder,
    add_input,
    assert_same,
    bits,
    full,
    jit_save_load,
    script,
    snapshot,
    stored,
    torch_save_load,
)
from kv_model import kept, sgd_step

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
]

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    # Newer Pythons warn about any fork of a process with threads.
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]


def gradients(shape, dtype, replicas):
    """Gradients small enough that no step leaves the range of half precision."""
    kind = dtype if dtype.is_complex else torch.float64
    return [torch.randn(shape, dtype=kind).to(dtype) for _ in range(replicas)]


@pytest.mark.parametrize("wd", [0.0, 0.01])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_hundred_steps_are_bitwise_equal_to_plain_steps(kv, dtype, wd):
    keys, shapes = [3, 5, 7], [(37,), (6, 11), (2, 5, 3)]
    weights = [random_tensor(shape, dtype) for shape in shapes]
    kv.init(keys, weights)
    weights = [kept(weight) for weight in weights]
    kv.set_optimizer("sgd", learning_rate=0.1, wd=wd)
    for step in range(100):
        pushed = [gradients(shape, dtype, 1 + step % 4) for shape in shapes]
        before = [[bits(value) for value in values] for values in pushed]
        kv.push(keys, pushed)
        steps = zip(pushed, weights, strict=True)
        weights = [sgd_step(*pair, 0.1, wd) for pair in steps]
        for value, weight in zip(kv.pull(keys), weights, strict=True):
            assert_same(value, weight.to(dtype), f"step {step}")
        assert [[bits(value) for value in values] for values in pushed] == before


@pytest.mark.parametrize("wd", [0.0, 0.01])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_matches_torch_optim_sgd(kv, dtype, wd):
    """Half precision: compared with torch's steps in fp32, rounded."""
    kind = torch.float32 if dtype.itemsize == 2 else dtype
    weight = torch.nn.Parameter(random_tensor((3, 37), dtype).to(kind))
    optimizer = torch.optim.SGD([weight], lr=0.1, weight_decay=wd, foreach=False)
    kv.init("w", weight.to(dtype))
    kv.set_optimizer("sgd", learning_rate=0.1, wd=wd)
    for _ in range(100):
        values = gradients((3, 37), dtype, 3)
        kv.push("w", values)
        weight.grad = values[0].to(kind) + values[1].to(kind) + values[2].to(kind)
        optimizer.step()
    # torch fuses multiply and add if the processor can, which rounds once less and
    # sometimes changes the rounding to half precision.
    error = torch.finfo(dtype).eps * (1 if kind is dtype else 4)
    expected = weight.detach().to(dtype)
    torch.testing.assert_close(stored(kv, "w"), expected, rtol=error, atol=20 * error)


@pytest.mark.parametrize(
    ("dtype", "kinds"),
    [
        (torch.float32, [torch.bfloat16, torch.float32]),
        (torch.float32, [torch.float16]),
        (torch.float32, [torch.float64, torch.int32]),
        (torch.float16, [torch.float32]),
        (torch.bfloat16, [torch.float16, torch.bfloat16, torch.bool]),
        (torch.float64, [torch.float32, torch.float64]),
        (torch.complex64, [torch.float32, torch.complex64]),
        (torch.complex32, [torch.complex32, torch.complex64]),
        (torch.float8_e5m2, [torch.float32]),
        (torch.float8_e4m3fn, [torch.float8_e4m3fn]),
    ],
    ids=str,
)
def test_gradients_of_other_dtypes(kv, dtype, kinds):
    weight = random_tensor((1025,), dtype)
    kv.init(3, weight)
    weight = kept(weight)
    kv.set_optimizer("sgd", learning_rate=0.125, wd=0.01)
    for _ in range(5):
        values = [random_tensor((1025,), kind) for kind in kinds]
        kv.push(3, values)
        if any(kind.is_floating_point and kind.itemsize == 1 for kind in kinds):
            values = [v.float() for v in values]
        weight = sgd_step(values, weight, 0.125, 0.01)
        assert_same(stored(kv, 3), weight.to(dtype))


def negated_twice(x):
    """A view of -x whose bits say that it is x."""
    return torch.complex(x, -x).conj().imag


LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
    "sliced": lambda x: torch.stack([x, x], -1)[..., 1],
    "expanded": lambda x: x[:1].expand(x.shape),
    # Bits that make the sum one of torch's operators.
    "lazily conjugated": lambda x: x.conj().resolve_conj().conj(),
    "lazily negated": lambda x: x if x.is_complex() else negated_twice(x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.half, torch.cfloat], ids=str)
@pytest.mark.parametrize("laid_out", ["contiguous", "channels last", "sliced"])
def test_layouts(kv, dtype, laid_out):
    """Gradients of the stored layout, of another, and of one per replica."""
    weight = random_tensor((17, 5, 3, 7), dtype)
    mixes = [[name] * 2 for name in LAYOUTS] + list(itertools.combinations(LAYOUTS, 3))
    kv.init(3, LAYOUTS[laid_out](weight))
    weight = kept(weight)
    kv.set_optimizer("sgd", learning_rate=0.1, wd=0.01)
    for mix in mixes:
        values = [LAYOUTS[name](random_tensor(weight.shape, dtype)) for name in mix]
        kv.push(3, values)
        weight = sgd_step(values, weight, 0.1, 0.01)
        assert_same(stored(kv, 3), weight.to(dtype), str(mix))


def test_the_same_step_on_every_device(kv, devices):
    weight = random_tensor((1025,), torch.float32)
    kv.init(3, weight.to(devices[0]))
    kv.set_optimizer("sgd", learning_rate=0.1, wd=0.01)
    for _ in range(10):
        values = gradients((1025,), torch.float32, len(devices))
        kv.push(3, [v.to(d) for v, d in zip(values, devices, strict=True)])
        weight = sgd_step(values, weight, 0.1, 0.01)
        assert_same(stored(kv, 3), weight)


def test_large_values_in_several_threads(kv):
    shape = (700_001,)
    weight = random_tensor(shape, torch.float32)
    small = random_tensor((5,), torch.bfloat16)
    kv.init([3, 5], [weight, small])
    kv.set_optimizer("sgd", learning_rate=0.1, wd=0.01)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            values = [random_tensor(shape, torch.float32) for _ in range(2)]
            kv.push([5, 3], [[small], values])
            weight = sgd_step(values, weight, 0.1, 0.01)
            assert_same(stored(kv, 3), weight, f"{threads} threads")
    finally:
        torch.set_num_threads(before)


def test_infinite_and_nan_weights_and_gradients(kv):
    inf, nan = torch.inf, torch.nan
    kv.init(3, torch.tensor([inf, -inf, nan, 1.0, 1.0, 0.0]))
    kv.set_optimizer("sgd", learning_rate=0.5)
    kv.push(3, torch.tensor([1.0, 1.0, 1.0, inf, nan, -0.0]))
    # Without weight decay there is no 0 * inf.
    assert_same(stored(kv, 3)[:2], torch.tensor([inf, -inf]))
    assert_same(stored(kv, 3)[3], torch.tensor(-inf))
    assert stored(kv, 3)[[2, 4]].isnan().all()
    assert stored(kv, 3)[5] == 0


def test_a_learning_rate_of_zero_keeps_the_values(kv):
    kv.init([3, 5], [full(3), full(5)])
    kv.set_optimizer("sgd", learning_rate=0.0, wd=1.0)
    kv.push([3, 5], [[full(7)], [full(8), full(9)]])
    assert_same(stored(kv, 3), full(3))
    assert_same(stored(kv, 5), full(5))


def test_defaults(kv):
    kv.init(3, full(1))
    kv.set_optimizer("sgd")
    kv.push(3, full(100))
    assert_same(stored(kv, 3), full(1) - full(100) * 0.01)


def test_a_repeated_key_makes_one_step(kv):
    kv.init(3, full(8))
    kv.set_optimizer("sgd", learning_rate=0.5, wd=0.5)
    kv.push([3, 3], [full(1), full(1)])
    assert_same(stored(kv, 3), full(8 - 0.5 * (2 + 0.5 * 8)))


def test_pushpull_sees_the_step(kv):
    kv.init([3, 5], [full(8), full(4)])
    kv.set_optimizer("sgd", learning_rate=0.5)
    outs = [full(0), full(0)]
    kv.pushpull([3, 5], [full(1), full(2)], out=outs)
    assert_same(outs[0], full(7.5))
    assert_same(outs[1], full(3))
    kv.pushpull(3, outs[1])
    assert_same(outs[1], full(6))


@pytest.mark.parametrize("key", [3, -(2**40), "w", "größe"])
def test_keys_of_both_kinds(store_type, key):
    for when in ("before", "after"):
        with torchkv.create(store_type) as store:
            if when == "before":
                store.set_optimizer("sgd", learning_rate=0.5)
            store.init(key, full(8))
            if when == "after":
                store.set_optimizer("sgd", learning_rate=0.5)
            store.push(key, [full(1), full(1)])
            assert_same(stored(store, key), full(7))


def test_setting_an_optimizer_changes_no_value_and_replaces_the_updater(kv):
    kv.init([3, 5], [full(3), full(5)])
    before = snapshot(kv)
    kv.set_optimizer("sgd", learning_rate=1.0)
    assert snapshot(kv) == before
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(2))
    kv.set_optimizer("sgd", learning_rate=2.0)
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(0))
    kv.set_updater(add_input)
    kv.push(3, full(7))
    assert_same(stored(kv, 3), full(7))
    kv.set_optimizer("sgd", learning_rate=1.0)
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(6))
    kv.set_updater(None)
    kv.push(3, full(9))
    assert_same(stored(kv, 3), full(9), "ASSIGN is back")


def test_a_rejected_optimizer_keeps_the_updater(kv):
    kv.init(3, full(1))
    kv.set_updater(add_input)
    with pytest.raises(ValueError, match="a lr of"):
        kv.set_optimizer("sgd", learning_rate=-1.0)
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(2))


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int8, torch.uint8, torch.uint16, torch.bool], ids=str
)
def test_a_key_of_integer_dtype_cannot_be_pushed(kv, dtype):
    kv.set_optimizer("sgd")
    value = full(1, dtype=dtype)
    kv.init([3, 5], [full(1), value])
    with pytest.raises(TypeError, match=r"^push: expected .* but got .*\(key 5\)"):
        kv.push([3, 5], [full(7), value])
    assert_same(stored(kv, 3), full(1))
    assert_same(stored(kv, 5), value)
    kv.push(3, full(0))
    kv.set_updater(None)
    kv.push([3, 5], [full(7), value])
    assert_same(stored(kv, 3), full(7))


# --- Through TorchScript


def numbers(kv: torch.classes.torchkv.KVStore) -> None:
    kv.set_optimizer("sgd", {"lr": 0.5, "weight_decay": 0.25})


def by_keyword(kv: torch.classes.torchkv.KVStore) -> None:
    kv.set_optimizer(rule="sgd", numbers={"weight_decay": 0.25, "lr": 0.5})


def defaults(kv: torch.classes.torchkv.KVStore) -> None:
    empty: dict[str, float] = {}
    kv.set_optimizer("sgd", empty)


def unknown(kv: torch.classes.torchkv.KVStore) -> None:
    kv.set_optimizer("sdg", {"lr": 0.5})


def unknown_number(kv: torch.classes.torchkv.KVStore) -> None:
    kv.set_optimizer("sgd", {"learning_rate": 0.5})


def negative(kv: torch.classes.torchkv.KVStore) -> None:
    kv.set_optimizer("sgd", {"lr": -1.0})


@pytest.mark.parametrize(
    ("function", "expected"),
    [(numbers, (0.5, 0.25)), (by_keyword, (0.5, 0.25)), (defaults, (0.001, 0.0))],
)
def test_it_is_set_in_torchscript(kv, function, expected):
    kv.init(3, full(8))
    script(function)(kv.script_object)
    kv.push(3, full(1))
    assert_same(stored(kv, 3), sgd_step([full(1)], full(8), *expected))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (unknown, "unknown optimizer 'sdg'.*did you mean 'sgd'"),
        (unknown_number, "unexpected hyperparameter 'learning_rate' for optimizer"),
        (negative, "expected a lr of at least 0"),
    ],
)
def test_torchscript_raises_the_same_errors(kv, function, message):
    with pytest.raises(RuntimeError, match=f"set_optimizer: {message}"):
        script(function)(kv.script_object)


# --- Saved with the store


def through_a_script_module(make):
    def copied(kv):
        return torchkv.KVStore.from_script_object(make(script(ScriptHolder(kv))).kv)

    return copied


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda kv: pickle.loads(pickle.dumps(kv)),
    "torch.save": torch_save_load,
    "jit.save": through_a_script_module(jit_save_load),
    "deepcopy of a script module": through_a_script_module(copy.deepcopy),
}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("key", [3, "w"])
def test_it_is_copied_with_the_store_and_without_keys(store_type, make, key):
    with torchkv.create(store_type) as kv:
        kv.set_optimizer("sgd", learning_rate=1 / 3, wd=1e-300)
        empty = make(kv)
        kv.init(key, full(8))
        other = make(make(kv))
        empty.init(key, full(8))
        kv.set_optimizer("sgd", learning_rate=0.5)
        for store in (other, empty):
            store.push(key, full(1))
            expected = sgd_step([full(1)], full(8), 1 / 3, 1e-300)
            assert_same(stored(store, key), expected)
        assert_same(stored(kv, key), full(8), "two stores from here on")
        other.set_updater(None)
        again = make(other)
        again.push(key, full(9))
        assert_same(stored(again, key), full(9), "and so does ASSIGN")


def test_a_copy_keeps_numbers_in_double_precision(kv):
    kv.init(3, full(1, dtype=torch.float64))
    kv.set_optimizer("sgd", learning_rate=0.1, wd=0.3)
    other = copy.deepcopy(kv)
    for store in (kv, other):
        store.push(3, full(1, dtype=torch.float64))
    assert snapshot(kv) == snapshot(other)


def load(state):
    return torchkv.KVStore._of(torchkv._C.KVStore.from_state(tuple(state)))


OPTIMIZER = 8  # in StoreState::Tuple
# Parts of a saved optimizer: see StoreState::OptimizerTuple.
(
    NAME,
    GROUPS,
    GRADIENT,
    INT_KEYS,
    _,
    GROUP_OF,
    MULTIPLIERS,
    STEPS,
    ACCUMULATED,
    TENSORS,
) = range(10)

DAMAGES = {
    "an unknown rule": (NAME, lambda _: "sdg"),
    "ASSIGN": (NAME, lambda _: "assign"),
    "no groups": (GROUPS, lambda _: []),
    "an unknown number": (GROUPS, lambda groups: [{**groups[0], "speed": 1.0}]),
    "a learning rate of NaN": (GROUPS, lambda x: [{**x[0], "lr": float("nan")}]),
    "a weight decay of -inf": (
        GROUPS,
        lambda x: [{**x[0], "weight_decay": -torch.inf}],
    ),
    "an unknown gradient option": (GRADIENT, lambda x: {**x, "speed": 1.0}),
    "a negative clip value": (GRADIENT, lambda x: {**x, "clip_value": -1.0}),
    "a key without a group": (INT_KEYS, lambda _: [3]),
    "a group too many": (GROUP_OF, lambda _: [0]),
    "multipliers of no key": (MULTIPLIERS, lambda _: [1.0, 1.0]),
    "a step too many": (STEPS, lambda steps: [*steps, 1]),
    "no steps": (STEPS, lambda _: []),
    "a negative step": (STEPS, lambda _: [-1]),
    "counts of no key": (ACCUMULATED, lambda _: []),
    "a count without its sum": (ACCUMULATED, lambda _: [1]),
    "tensors of no key": (TENSORS, lambda _: []),
    "an unknown tensor": (TENSORS, lambda _: [{"speed": full(1)}]),
    "a tensor of another shape": (TENSORS, lambda _: [{"momentum_buffer": full(1)[0]}]),
    "no tensor": (TENSORS, lambda _: [{"momentum_buffer": full(1).to("meta")}]),
}


@pytest.mark.parametrize(("place", "damage"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_optimizer_is_rejected(kv, place, damage):
    kv.init(3, full(8))
    kv.set_optimizer("sgd", learning_rate=0.5, wd=0.25, momentum=0.5)
    kv.push(3, full(0))
    state = list(kv._impl.state())
    saved = list(state[OPTIMIZER])
    load(state)
    saved[place] = damage(saved[place])
    state[OPTIMIZER] = tuple(saved)
    before = snapshot(kv)
    with pytest.raises((ValueError, NotImplementedError), match=": (expected|un).+"):
        load(state)
    assert snapshot(kv) == before
