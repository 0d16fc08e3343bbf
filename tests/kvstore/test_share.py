"""init and assign with share=True: the stored value is the caller's tensor."""

import copy
import pickle

import pytest
import torch

import torchkv
from dtypes import FLOATS, random_tensor
from helpers import AddStr, add_input, assert_same, bits, full, run_threads, script
from optim_cases import FEW, ids
from torchkv import optim

LAMB = ("LAMB", {"lr": 0.05, "weight_decay": 0.02})
LION = ("Lion", {"lr": 0.05, "weight_decay": 0.02})


@pytest.fixture(params=["local", "device", "sharding"])
def kv(request, monkeypatch):
    """A store of each type, and one that would shard what is pushed as a list."""
    if request.param == "sharding":
        monkeypatch.setenv("TORCHKV_PLACES", "cpu,cpu,cpu")
    with torchkv.create("local" if request.param == "local" else "device") as store:
        yield store


@pytest.fixture
def twin(kv):
    """A store of the same type, whose values are copies."""
    with torchkv.create(kv.type) as store:
        yield store


def is_shared(kv, key, tensor):
    """Whether a write to the tensor changes the stored value; restores it."""
    with torch.no_grad():
        before = tensor.clone()
        tensor.add_(1)
        found = torch.equal(kv.pull(key), tensor)
        tensor.copy_(before)
    return found


def state_of(kv, key):
    return {
        name: bits(value) if isinstance(value, torch.Tensor) else value
        for name, value in kv.optimizer.state_dict()["state"][key].items()
    }


# --- one value, two names --------------------------------------------------------


def test_a_push_writes_the_tensor_in_place(kv):
    weight = full(1)
    data, version = weight.data_ptr(), weight._version
    kv.init(3, weight, share=True)
    kv.push(3, [full(2), full(3)])
    assert_same(weight, full(5))
    assert weight.data_ptr() == data
    assert weight._version > version
    assert_same(kv.pull(3), full(5))
    kv.assign(3, full(7))
    assert_same(weight, full(7))


def test_what_the_caller_writes_is_the_stored_value(kv):
    weight = full(1)
    kv.init(3, weight, share=True)
    weight.data.fill_(4)
    assert_same(kv.pull(3), full(4))
    out = full(0)
    kv.pull(3, out)
    assert_same(out, full(4))
    kv.set_updater(add_input)
    kv.push(3, full(1))
    assert_same(weight, full(5))


def test_pulling_returns_a_copy(kv):
    weight = full(1)
    kv.init(3, weight, share=True)
    pulled = kv.pull(3)
    kv.push(3, full(2))
    assert_same(pulled, full(1))


def test_pulling_into_itself_changes_nothing_and_fills_the_other_outs(kv):
    weight, others = full(1), [full(0), full(0)]
    kv.init(3, weight, share=True)
    version = weight._version
    kv.pull(3, weight)
    kv.pull(3, [others[0], weight, others[1]])
    assert weight._version == version
    for tensor in (weight, *others):
        assert_same(tensor, full(1))
    kv.pushpull(3, [full(2), full(3)], [weight, *others])
    for tensor in (weight, *others):
        assert_same(tensor, full(5))


def test_without_share_it_is_a_copy(kv):
    weight = full(1)
    kv.init(3, weight)
    kv.push(3, full(2))
    assert_same(weight, full(1))


def test_an_updater_gets_the_tensor(kv):
    weight, seen = full(1), []

    def update(key, input, stored):
        seen.append(stored.data_ptr())
        stored += input

    kv.init(3, weight, share=True)
    kv.set_updater(update)
    kv.push(3, [full(1)] * 3)
    assert seen == [weight.data_ptr()]
    assert_same(weight, full(4))


def test_a_parameter_is_written_as_by_an_optimizer(kv):
    weight = torch.nn.Parameter(full(2))
    kv.init(3, weight, share=True)
    loss = (weight * weight).sum()
    kv.push(3, full(1))
    assert weight.requires_grad
    assert weight.grad_fn is None
    assert not kv.pull(3).requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("binding", ["script object", "scripted function"])
def test_torchscript_shares(kv, binding):
    weight = full(1)
    if binding == "script object":
        kv.script_object.init(3, weight, share=True)
    else:

        def init(kv: torch.classes.torchkv.KVStore, weight: torch.Tensor) -> None:
            kv.init(3, weight, share=True)
            kv.assign(3, weight, share=True)

        script(init)(kv.script_object, weight)
    kv.push(3, full(2))
    assert_same(weight, full(2))


@pytest.mark.parametrize(
    "weight",
    [
        torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last),
        torch.randn(4, 5).t(),
        torch.randn(40)[8:20],
        torch.randn(()),
        torch.randn(0, 3),
        torch.randn(1, 5, 1).transpose(0, 2),
    ],
    ids=["channels_last", "transposed", "view", "0-dim", "empty", "strides of ones"],
)
def test_any_dense_tensor(kv, weight):
    weight = weight.detach()
    strides, size = weight.stride(), weight.shape
    kv.init("w", weight, share=True)
    kv.set_optimizer(optim.SGD(lr=0.5, momentum=0.9))
    expected = weight.clone()
    gradients = [torch.randn(size) for _ in range(3)]
    kv.pushpull("w", gradients, weight)
    expected -= 0.5 * (gradients[0] + gradients[1] + gradients[2])
    torch.testing.assert_close(weight, expected)
    assert weight.stride() == strides


def test_an_inference_tensor(kv):
    with torch.inference_mode():
        weight = full(1)
    kv.init(3, weight, share=True)
    kv.push(3, full(2))
    assert_same(weight, full(2))


def test_async_calls(kv):
    weight = full(1)
    kv.init(3, weight, share=True)
    kv.push(3, full(2), async_op=True).wait()
    kv.pushpull(3, full(3), weight, async_op=True).wait()
    assert_same(weight, full(3))


def test_keys_of_one_storage_in_threads(kv):
    flat = torch.zeros(8 * 1000)
    weights = list(flat.split(1000))
    kv.init(list(range(8)), weights, share=True)
    kv.set_updater(None)
    kv.set_optimizer(optim.SGD(lr=1.0, maximize=True))

    def pushes(keys):
        for _ in range(200):
            kv.push(keys, [[torch.ones(1000)] * 2] * len(keys))

    run_threads([lambda k=k: pushes([k, (k + 1) % 8]) for k in range(8)])
    assert_same(flat, torch.full((8000,), 800.0))


# --- the same results as with copies -----------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", [*FEW, LAMB, LION], ids=ids)
def test_steps_have_the_bits_of_a_copy(kv, twin, case, dtype):
    name, options = case
    weight = random_tensor((37,), dtype)
    twin.init("w", weight)
    kv.init("w", weight, share=True)
    for store in (kv, twin):
        store.set_optimizer(getattr(optim, name)(**options))
    for _ in range(4):
        gradients = [random_tensor((37,), dtype) for _ in range(3)]
        kv.pushpull("w", gradients, weight)
        twin.push("w", gradients)
        assert_same(weight, twin.pull("w"))
    assert state_of(kv, "w") == state_of(twin, "w")


def test_updaters_and_torch_optim_have_the_bits_of_a_copy(kv, twin):
    weight = torch.randn(2, 3)
    kv.init("w", weight, share=True)
    twin.init("w", weight)
    updaters = [
        lambda store: store.set_updater(None),
        lambda store: store.set_updater(add_input),
        lambda store: store.set_updater(script(AddStr())),
        lambda store: store.set_optimizer(torch.optim.NAdam, lr=0.1),
    ]
    for set_on in updaters:
        set_on(kv)
        set_on(twin)
        for _ in range(3):
            values = [torch.randn(2, 3) for _ in range(2)]
            kv.push("w", values)
            twin.push("w", values)
            assert_same(weight, twin.pull("w"))


@pytest.mark.parametrize("case", [None, *FEW, LAMB, LION], ids=ids)
def test_the_tensor_itself_can_be_pushed(kv, twin, case):
    weight = torch.randn(5000)
    kv.init("w", weight, share=True)
    twin.init("w", weight)
    if case is not None:
        for store in (kv, twin):
            store.set_optimizer(getattr(optim, case[0])(**case[1]))
    for _ in range(3):
        other = torch.randn(5000)
        twin.push("w", [weight.clone(), other])
        kv.push("w", [weight, other])
        assert_same(weight, twin.pull("w"))


# --- masters follow what is written ----------------------------------------------


# Gradients of 2**-14, which are rounded away in the values.
SMALL = {
    "dense": lambda ones: ones * 2.0**-14,
    "list": lambda ones: [ones * 2.0**-15] * 2,
    "strided": lambda ones: (ones * 2.0**-14).repeat_interleave(2, -1)[..., ::2],
    "fp32": lambda ones: ones.float() * 2.0**-14,
    "rows": lambda ones: (ones * 2.0**-14).to_sparse(1),
}


@pytest.mark.parametrize("form", SMALL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_written_element_replaces_its_master_and_no_other(kv, dtype, form):
    weight = torch.ones(6, 1, dtype=dtype)
    kv.init("w", weight, share=True)
    kv.set_optimizer(optim.SGD(lr=1.0))
    small = SMALL[form](torch.ones_like(weight))
    kv.push("w", small)
    assert_same(weight, torch.ones_like(weight))
    weight.data[2] = 3
    weight.data[4] = float("nan")
    kv.push("w", small)
    expected = torch.full((6, 1), 1 - 2 * 2.0**-14)
    expected[2], expected[4] = 3 - 2.0**-14, float("nan")
    for written in (None, 8):  # a write since the last step counts, too
        if written is not None:
            weight.data[0] = expected[0] = written
        master = kv.optimizer.state_dict()["state"]["w"]["master"]
        torch.testing.assert_close(master, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("optimizer", "gradient"),
    [
        (optim.LAMB(lr=1.0), {}),
        (optim.AdamW(lr=1.0), {}),
        (optim.SGD(lr=1.0, max_norm=1.0), {}),
        (optim.Adagrad(lr=1.0, accumulate=2), {}),
        (optim.SGD(lr=1.0, momentum=0.9), {"type": "2bit", "threshold": 0.5}),
    ],
    ids=["lamb", "adamw", "max_norm", "accumulate", "2bit"],
)
def test_writes_count_with_any_optimizer(kv, twin, optimizer, gradient):
    """As if the masters had been assigned what was written, where the value differs."""
    if gradient and kv.type == "local":
        pytest.skip("no compression in a local store")
    weight = torch.randn(3000).bfloat16()
    kv.init("w", weight, share=True)
    twin.init("w", weight)
    for store in (kv, twin):
        store.set_optimizer(copy.deepcopy(optimizer))
        if gradient:
            store.set_gradient_compression(gradient)
    for step in range(4):
        pushed = torch.randn(3000).bfloat16()
        for store in (kv, twin):
            store.push("w", pushed)
        weight.data[step::7] = 0.25 * step
        masters = twin.optimizer.state_dict()["state"]["w"]["master"]
        kept = masters.bfloat16() == weight
        twin.assign("w", torch.where(kept, masters, weight.float()))
        assert_same(weight, twin.pull("w"))


# --- what shares nothing ---------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state_dict", "load"])
def test_copies_and_loaded_stores_share_nothing(kv, tmp_path, how):
    weight = full(1)
    kv.init("w", weight, share=True)
    kv.set_optimizer(optim.SGD(lr=1.0))
    if how == "deepcopy":
        other = copy.deepcopy(kv)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(kv))
    elif how == "state_dict":
        state = kv.state_dict()
        kv.push("w", full(8))
        kv.load_state_dict(state)
        other = kv
        assert_same(weight, full(-7))
        weight.fill_(1)
    else:
        kv.save(tmp_path / "saved")
        other = torchkv.load(tmp_path / "saved")
    assert_same(other.pull("w"), full(1))
    other.push("w", full(5))
    assert_same(weight, full(1))
    assert_same(other.pull("w"), full(-4))


def test_delete_and_close_leave_the_tensor(kv):
    weight = full(1)
    kv.init("w", weight, share=True)
    kv.delete("w")
    kv.init("w", weight, share=True)
    kv.close()
    assert_same(weight, full(1))


def test_the_store_keeps_the_memory_of_a_tensor_that_is_gone(kv):
    weight = full(1)
    kv.init("w", weight, share=True)
    del weight
    trash = [full(9) for _ in range(100)]
    assert_same(kv.pull("w"), full(1))
    del trash


# --- assign ----------------------------------------------------------------------


@pytest.mark.parametrize("before", ["copied", "shared", "sharded"])
@pytest.mark.parametrize(
    "case", [*FEW, LAMB, ("SGD", {"lr": 0.1, "accumulate": 2})], ids=ids
)
@pytest.mark.parametrize("layout", ["same", "transposed"])
def test_assign_shares_and_keeps_the_state(kv, twin, case, before, layout):
    name, options = case
    first = torch.randn(40, 6)
    kv.init("w", first.clone(), share=before == "shared")
    twin.init("w", first)
    weight = torch.randn(40, 6)
    if layout == "transposed":
        weight = torch.randn(6, 40).t()
    for store in (kv, twin):
        store.set_optimizer(getattr(optim, name)(**options))
    for step in range(6):
        if step == 3:
            version = kv.version("w")
            kv.assign("w", weight, share=True)
            twin.assign("w", weight)
            assert kv.version("w") == version + 1 == twin.version("w")
        count = 3 if before == "sharded" else 1
        values = [torch.randn(40, 6) for _ in range(count)]
        kv.push("w", values)
        twin.push("w", values)
    assert_same(weight, twin.pull("w"))
    assert state_of(kv, "w") == state_of(twin, "w")


def test_assigning_the_shared_tensor_again_is_no_update(kv):
    weight = full(1)
    kv.init("w", weight, share=True)
    kv.assign("w", weight, share=True)
    kv.assign("w", weight.view(2, 3), share=True)
    assert kv.version("w") == 0
    assert is_shared(kv, "w", weight)


def test_assign_lets_go_of_the_tensor_before(kv):
    first, second = full(1), full(2)
    kv.init(["a", "b"], [first, full(0)], share=True)
    kv.assign("a", second, share=True)
    kv.push("a", full(5))
    assert_same(first, full(1))
    assert_same(second, full(5))
    kv.assign("b", first, share=True)  # free for another key
    kv.assign(["a", "b"], [first, second], share=True)  # exchanged
    kv.push(["a", "b"], [full(6), full(7)])
    assert_same(first, full(6))
    assert_same(second, full(7))


def test_assign_to_another_dtype_is_refused(kv):
    kv.init("w", full(1), share=True)
    with pytest.raises(
        TypeError,
        match=r"^assign: expected a tensor of dtype .*loat to share.*\(key 'w'\)$",
    ):
        kv.assign("w", full(2).double(), share=True)
    assert_same(kv.pull("w"), full(1))


@pytest.mark.cuda
@pytest.mark.parametrize("async_op", [False, True])
def test_a_cuda_tensor_is_written_in_stream_order(async_op):
    weight = torch.zeros(1 << 22, device="cuda")
    gradients = [torch.ones(1 << 22, device="cuda") for _ in range(2)]
    with torchkv.create("device") as kv:
        kv.init("w", weight, share=True)
        kv.set_optimizer(optim.SGD(lr=1.0, maximize=True))
        for _ in range(5):
            weight.add_(1)
            work = kv.pushpull("w", gradients, weight, async_op=async_op)
            if async_op:
                work.wait()
        assert weight.eq(15).all()
