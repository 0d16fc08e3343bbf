"""assign: replaces values and their masters, keeps the rest, all keys or none."""

import random

import pytest
import torch

import torchkv
from dtypes import COMPLEX, FLOAT8S, FLOATS, INTS, random_tensor
from helpers import (
    AddStr,
    add_input,
    assert_same,
    bits,
    full,
    run_threads,
    script,
    snapshot,
    stored,
)
from optim_cases import FEW, ids
from test_push import LAYOUTS
from torchkv import optim

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture(params=["local", "device", "sharded"])
def kv(request, monkeypatch):
    """A store of each type, and one that shards what is pushed as a list."""
    if request.param == "sharded":
        monkeypatch.setenv("TORCHKV_PLACES", "cpu,cpu,cpu")
    with torchkv.create("local" if request.param == "local" else "device") as store:
        yield store


def optimizer_state(kv, key, leave_out=()):
    """The bits of what the optimizer keeps for a key."""
    state = kv.optimizer.state_dict()["state"][key]
    return {
        name: bits(value) if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
        if name not in leave_out
    }


def master_of(kv, key):
    return kv.optimizer.state_dict()["state"][key]["master"]


def step(kv, key, size=40):
    """A step on gradients of three replicas, over which a sharded store shards."""
    kv.push(key, [torch.randn(size).to(kv.dtype(key)) for _ in range(3)])


# --- values ---------------------------------------------------------------------


@pytest.mark.parametrize("binding", ["python", "script object"])
def test_every_form(kv, binding):
    kv.init([3, 5, 7], [full(0)] * 3)
    kv.push([3, 5, 7], [[full(1)] * 3] * 3)
    store = kv if binding == "python" else kv.script_object
    assert store.assign(3, full(2)) is None
    store.assign(5, [full(3)])
    assert [stored(kv, key)[0, 0].item() for key in (3, 5, 7)] == [2, 3, 3]
    store.assign([7, 3], [full(4), full(5)])
    store.assign((5,), ((full(6),),))
    assert [stored(kv, key)[0, 0].item() for key in (3, 5, 7)] == [5, 6, 4]
    store.assign([3, 5, 7], (full(7), [full(8)], full(9)))
    assert [stored(kv, key)[0, 0].item() for key in (3, 5, 7)] == [7, 8, 9]
    kv.assign(key=3, value=full(1))
    assert_same(stored(kv, 3), full(1))
    assert kv.keys() == [3, 5, 7]


def test_a_scripted_function_assigns():
    def assign(kv: torch.classes.torchkv.KVStore, x: torch.Tensor) -> None:
        kv.assign("a", x)
        kv.assign(key=["b", "c"], value=(x + 1, [x + 2]))

    with torchkv.create() as kv:
        kv.init(["a", "b", "c"], [full(0)] * 3)
        script(assign)(kv.script_object, full(1))
        for key, value in zip("abc", (1, 2, 3), strict=True):
            assert_same(stored(kv, key), full(value))


@pytest.mark.parametrize(
    "dtype", [*FLOATS, *INTS, *COMPLEX, *FLOAT8S, torch.bool], ids=str
)
def test_dtypes(kv, dtype):
    given = [other for other in (dtype, *FLOATS, *INTS) if torch.can_cast(other, dtype)]
    kv.init(3, random_tensor((7, 5), dtype))
    kv.push(3, [random_tensor((7, 5), dtype) for _ in range(3)])
    for other in given:
        value = random_tensor((7, 5), other)
        kv.assign(3, value)
        assert_same(stored(kv, 3), value.to(dtype), f"from {other}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(kv, layout):
    value = LAYOUTS[layout]()
    plain = torch.empty_like(value, memory_format=torch.contiguous_format).detach()
    plain.copy_(value.detach())
    kv.init([3, 5], [torch.zeros_like(plain), value])
    kv.push([3, 5], [[torch.zeros_like(plain)] * 3] * 2)
    kv.assign([3, 5], [value, plain])
    assert_same(stored(kv, 3), plain)
    assert_same(stored(kv, 5), plain)
    kv.assign(5, value)
    assert_same(stored(kv, 5), plain)


def test_the_store_keeps_no_reference(kv):
    value, weight = full(1), torch.nn.Parameter(full(2))
    kv.init([3, 5], [full(0)] * 2)
    kv.assign([3, 5], [value, weight])
    value.fill_(9)
    assert_same(stored(kv, 3), full(1))
    assert not kv.pull(5).requires_grad
    with torch.inference_mode():
        kv.assign(3, full(4))
    kv.push(5, [full(1), full(1)])
    assert not kv.pull(3).is_inference()
    assert_same(weight.detach(), full(2))


@pytest.mark.parametrize("updater", [add_input, script(AddStr())])
def test_the_updater_does_not_run_and_stays(kv, updater):
    kv.init("a", full(0))
    kv.set_updater(updater)
    kv.assign("a", full(5))
    assert_same(stored(kv, "a"), full(5))
    kv.push("a", full(1))
    assert_same(stored(kv, "a"), full(6))


# --- refused --------------------------------------------------------------------

REFUSED = {
    "unknown key": (lambda a: ([3, 9], [a, a]), KeyError, r"init\(9"),
    "key of the other kind": (lambda a: ("w", a), TypeError, "int.*str"),
    "no keys": (lambda a: ((), ()), ValueError, "at least one key"),
    "repeated key": (lambda a: ([3, 5, 3], [a] * 3), ValueError, r"\(key 3\)"),
    "two tensors": (lambda a: (3, [a, a]), ValueError, r"one tensor.*\(key 3\)"),
    "two tensors of the last key": (
        lambda a: ([3, 5], (a, [a, a])),
        ValueError,
        r"one tensor.*\(key 5\)",
    ),
    "empty list": (lambda a: ([3, 5], (a, ())), ValueError, r"\(key 5\)"),
    "too few values": (lambda a: ([3, 5], [a]), ValueError, "expected 2 values"),
    "shape": (lambda a: ([3, 5], [a, torch.ones(7)]), ValueError, r"shape.*\(key 5\)"),
    "dtype": (lambda a: ([3, 5], [a, a * 1j]), TypeError, r"\(key 5\)"),
    "no tensor": (lambda a: ([3, 5], [a, None]), TypeError, r"\(key 5\)"),
    "sparse": (lambda a: ([3, 5], [a, a.to_sparse()]), NotImplementedError, "key 5"),
    "meta": (lambda a: ([3, 5], [a, a.to("meta")]), NotImplementedError, "key 5"),
}


@pytest.mark.parametrize("binding", ["python", "script object"])
@pytest.mark.parametrize("call", REFUSED)
def test_a_refused_call_changes_nothing(kv, call, binding):
    arguments, error, message = REFUSED[call]
    kv.init([3, 5], [full(1), full(2)])
    kv.set_optimizer("sgd", momentum=0.5)
    kv.push([3, 5], [[full(1)] * 3] * 2)
    before = snapshot(kv), [optimizer_state(kv, key) for key in (3, 5)]
    store = kv
    if binding != "python":
        store, error = kv.script_object, IndexError if error is KeyError else error
    with pytest.raises(error, match=f"(?s)^(?:'|\")?assign: .*{message}"):
        store.assign(*arguments(full(9)))
    assert (snapshot(kv), [optimizer_state(kv, key) for key in (3, 5)]) == before


# --- the optimizer's state ------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "options"), [*FEW, ("Lion", {}), ("LAMB", {})], ids=ids
)
def test_state_is_kept(kv, name, options, dtype):
    """As if the key were deleted, initialized and given back its state."""
    value = torch.randn(40).to(dtype)
    gradients = [torch.randn(40).to(dtype) for _ in range(3)]
    with torchkv.create() as other:
        for store in (kv, other):
            store.init([3, 5], [torch.ones(40, dtype=dtype)] * 2)
            store.set_optimizer(getattr(optim, name)(**options))
            store.push([3, 5], [gradients, gradients])
        before = optimizer_state(kv, 3, ["master"])
        kv.assign(3, value)
        assert optimizer_state(kv, 3, ["master"]) == before

        saved = other.optimizer.state_dict()
        saved["state"][3].pop("master", None)
        other.delete(3)
        other.init(3, value)
        other.optimizer.load_state_dict(saved)
        for store in (kv, other):
            store.push([3, 5], [gradients, gradients])
        for key in (3, 5):
            assert_same(stored(kv, key), stored(other, key))
            assert optimizer_state(kv, key) == optimizer_state(other, key)


def test_accumulated_gradients_are_kept(kv):
    kv.init(3, full(1))
    kv.set_optimizer(optim.SGD(lr=1.0, accumulate=2))
    kv.push(3, [full(1)] * 3)
    kv.assign(3, full(10))
    kv.push(3, full(2))
    assert_same(stored(kv, 3), full(5))


def test_the_state_of_a_torch_optimizer_is_kept(kv):
    kv.init(3, full(0))
    kv.set_optimizer(torch.optim.SGD, lr=1.0, momentum=0.5)
    kv.push(3, [full(1)] * 4)
    kv.assign(3, full(100))
    kv.push(3, full(4))
    assert_same(stored(kv, 3), full(94))  # 100 - (4 + 4 / 2)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
class TestMasters:
    """The fp32 masters of half-precision values."""

    @pytest.fixture
    def kv(self, kv, dtype):
        kv.init([3, 5], [torch.randn(40).to(dtype)] * 2)
        kv.set_optimizer(optim.SGD(lr=0.01))
        step(kv, 3)
        assert (master_of(kv, 3) != stored(kv, 3)).any()
        return kv

    def test_a_master_is_replaced(self, kv, dtype):
        value = torch.randn(40).to(dtype)
        kv.assign(3, value)
        assert_same(stored(kv, 3), value)
        assert_same(master_of(kv, 3), value.float())

    @pytest.mark.parametrize("give", ["pulled", "strided"])
    def test_a_master_that_rounds_to_the_value_is_kept(self, kv, dtype, give):
        master, value = master_of(kv, 3), kv.pull(3)
        if give == "strided":
            value = torch.stack([value, value], -1)[..., 1]
        kv.assign([3, 5], [value, torch.ones(40)])
        assert_same(master_of(kv, 3), master)
        step(kv, 3)
        assert (master_of(kv, 3) != master).any()

    @pytest.mark.parametrize("position", [0, 20, 39])
    def test_one_other_element_replaces_the_whole_master(self, kv, dtype, position):
        """However the value is sharded."""
        value = kv.pull(3)
        value[position] = 100
        kv.assign(3, value)
        assert_same(master_of(kv, 3), value.float())

    def test_a_value_of_fp32_becomes_the_master(self, kv, dtype):
        value = torch.randn(40)
        kv.assign([3, 5], [value, value])
        assert_same(master_of(kv, 3), value)
        assert_same(stored(kv, 3), value.to(dtype))
        kv.assign(3, stored(kv, 3).float())
        assert_same(master_of(kv, 3), value.to(dtype).float())

    def test_an_int_that_the_master_truncates_to_replaces_it(self, kv, dtype):
        kv.optimizer.lr = 1.0
        kv.assign(3, torch.zeros(40))
        kv.push(3, torch.full((40,), -2.7, dtype=dtype))
        kv.assign(3, torch.full((40,), 2))
        assert_same(stored(kv, 3), torch.full((40,), 2.0, dtype=dtype))
        assert_same(master_of(kv, 3), torch.full((40,), 2.0))


# --- threads --------------------------------------------------------------------


def test_threads_see_whole_values(kv):
    keys, size = list(range(8)), 5000
    kv.init(keys, [torch.zeros(size)] * len(keys))
    kv.push(keys, [[torch.zeros(size)] * 3] * len(keys))

    def write(thread, choose):
        for i in range(30):
            values = [torch.full((size,), float(thread * 100 + i))] * len(keys)
            kv.assign(choose.sample(keys, len(keys)), values)

    def read():
        for _ in range(30):
            for value in kv.pull(keys):
                assert (value == value[0]).all()

    writers = [lambda n=n: write(n, random.Random(n)) for n in range(2)]
    run_threads([*writers, read])


def test_a_master_that_a_push_steps_meanwhile_is_not_kept(kv):
    """Either the push or assign comes first: the master rounds to the value."""
    size = 20_000
    kv.init(3, torch.ones(size, dtype=torch.bfloat16))
    kv.set_optimizer(optim.SGD(lr=1.0))
    gradient = torch.ones(size, dtype=torch.bfloat16)
    kv.push(3, [gradient] * 3)

    def assign():
        for _ in range(100):
            kv.assign(3, kv.pull(3))

    def push():
        for _ in range(100):
            kv.push(3, gradient)

    for _ in range(3):
        run_threads([assign, push])
        assert_same(master_of(kv, 3).bfloat16(), stored(kv, 3))
