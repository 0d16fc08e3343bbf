"""Lists of keys: one call gives the same results as one call per key."""

import random

import pytest
import torch

import torchkv
from dtypes import COMPLEX, FLOATS, INTS, random_tensor
from helpers import assert_same, run_threads, snapshot, stored
from kv_model import KVModel, left_to_right

MANY = 5000  # more keys than one pass takes
THREADS = 4


@pytest.fixture(params=["python", "torchscript"])
def binding(request, kv):
    """The store, or its TorchScript object: both have `push(key, value)`."""
    return kv if request.param == "python" else kv.script_object


def mixed_values(seed, count):
    """Values of many dtypes, sizes and layouts, a few of them large."""
    choose = random.Random(seed)
    values = []
    for i in range(count):
        dtype = choose.choice([*FLOATS, *INTS, *COMPLEX, torch.bool])
        shape = choose.choice([(), (0,), (1,), (7,), (33, 5), (4, 3, 65), (1000,)])
        value = random_tensor((200_001,) if i % 50 == 49 else shape, dtype)
        if value.dim() > 1 and choose.random() < 0.3:
            value = value.transpose(0, -1).contiguous().transpose(0, -1)
        values.append(value)
    return values


def replicas_of(choose, value):
    """Values to push for a stored one, now and then of another layout."""
    made = []
    for _ in range(choose.randint(1, 4)):
        replica = random_tensor(value.shape, value.dtype)
        if replica.numel() and choose.random() < 0.2:
            replica = torch.stack([replica, replica], -1)[..., 0]
        made.append(replica)
    return made


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("seed", range(3))
def test_lists_of_mixed_dtypes_sizes_and_layouts(kv, binding, seed):
    choose = random.Random(seed)
    values = mixed_values(seed, 150)
    keys = choose.sample(range(10_000), len(values))
    kv.init(keys, values)
    model = KVModel()
    model.init(keys, values)
    order = choose.sample(range(len(keys)), len(keys))
    shuffled = [keys[i] for i in order]
    pushed = [replicas_of(choose, values[i]) for i in order]
    for store in (binding, model):
        store.push(shuffled, pushed)
    outs = [[torch.zeros_like(model.stored[key]) for _ in range(2)] for key in keys]
    binding.pull(keys, outs)
    for key, (one, two), new in zip(keys, outs, kv.pull(keys), strict=True):
        assert_same(one, model.stored[key], f"key {key}")
        assert_same(two, model.stored[key], f"key {key}")
        assert_same(new, model.stored[key], f"key {key}")


def test_one_call_mixes_tensors_and_lists(kv, binding):
    model, (x, y, z) = KVModel(), (random_tensor((5,), torch.float32) for _ in "xyz")
    keys, expected = ["a", "b", "c"], [torch.zeros(5) for _ in range(4)]
    outs = [torch.zeros(5) for _ in range(4)]

    def call(op, *arguments):  # from Python, a script object takes only tuples mixed
        getattr(binding, op)(keys, *arguments)
        getattr(model, op)(keys, *arguments)

    def check(outs, expected):
        for out, right in zip(outs, expected, strict=True):
            assert_same(out, right)
        for key in keys:
            assert_same(stored(kv, key), model.stored[key])

    call("init", (x, [y], z))
    call("push", (x, [y, z], [x]))
    for store, (one, two, three, four) in ((binding, outs), (model, expected)):
        store.pull(keys, (one, [two, three], four))
    check(outs, expected)
    call("push", ([x, y, z], x, (y, x)))
    for store, (one, two, three, four) in ((binding, outs), (model, expected)):
        store.pushpull(keys, ([x, x], y, z), ([one, two], three, [four]))
    check(outs, expected)
    if binding is kv:
        kv.push(["b", "a", "b"], [x, [y, z], [x, z]])
        model.push(["b", "a", "b"], [x, [y, z], [x, z]])
        kv.delete(keys)
        model.delete(keys)
        call("broadcast", [x, [y], z], [outs[0], outs[1:3], [outs[3]]])
        check(outs, [x, y, y, z])


def test_more_keys_than_one_pass_processes(kv, binding):
    keys = list(range(MANY))
    kv.init(keys, [torch.zeros(3)] * MANY)
    binding.push(keys, [torch.full((3,), float(key)) for key in keys])
    for key, value in zip(keys, kv.pull(keys), strict=True):
        assert value.tolist() == [key] * 3
    twice = keys + keys[::-1]
    binding.push(twice, [torch.full((3,), float(i)) for i in range(2 * MANY)])
    again = kv.pull([keys[0], keys[-1], keys[7], keys[0]])
    assert [x[0].item() for x in again] == [2 * MANY - 1] * 4
    assert len({x.data_ptr() for x in again}) == 4, "new tensors, also of one key"


def test_views_of_one_buffer(kv, binding):
    """Gradients and weights as parts of flat buffers, as DDP and FSDP lay them out."""
    sizes = [1, 1000, 3, 70_000, 17, 0, 250_000]
    keys = list(range(len(sizes)))
    kv.init(keys, [torch.zeros(n) for n in sizes])
    buffers = [random_tensor((sum(sizes),), torch.float32) for _ in range(3)]
    parts = [buffer.split(sizes) for buffer in buffers]
    binding.push(keys, [list(group) for group in zip(*parts, strict=True)])
    out = torch.zeros(sum(sizes))
    binding.pull(keys, list(out.split(sizes)))
    assert_same(out, left_to_right(buffers, torch.float32))
    # The same buffer many times, in overlapping parts.
    binding.push([1, 1], [buffers[0][:1000], buffers[0][1:1001]])
    assert_same(stored(kv, 1), buffers[0][:1000] + buffers[0][1:1001])


def test_the_push_of_several_large_values(kv, binding):
    """More than 256 MiB moved by one call, which is more than one pass moves."""
    size, keys = 8 << 20, [3, 5, 7]
    kv.init(keys, [torch.zeros(size, dtype=torch.int8)] * 3)
    one, two = torch.ones(size, dtype=torch.int8), torch.arange(size).to(torch.int8)
    binding.push(keys, [[one] * 20, [two] * 20, [one, two] * 8])
    expected = [one * 20, two * 20, (one + two) * 8]
    for value, right in zip(kv.pull(keys), expected, strict=True):
        assert torch.equal(value, right)


@pytest.mark.parametrize("size", [7, 20_000])
def test_each_push_of_a_list_counts_once_per_key(kv, size):
    """Threads push and pull one list, in all orders; with SGD each push adds one."""
    keys = list(range(MANY if size < 100 else 60))
    rounds = 5
    kv.init(keys, [torch.zeros(size)] * len(keys))
    kv.set_optimizer("sgd", learning_rate=1.0)
    values = [torch.full((size,), -1.0)] * len(keys)

    def body(thread):
        mine = keys[::-1] if thread % 2 else keys
        for number in range(1, rounds + 1):
            kv.push(mine, values)
            pulled = torch.stack(kv.pull(mine))
            assert (pulled == pulled[:, :1]).all(), "a pull saw half a push"
            assert (pulled[:, 0] >= number).all(), "a thread sees its own pushes"

    run_threads([lambda thread=thread: body(thread) for thread in range(THREADS)])
    for value in kv.pull(keys):
        assert_same(value, torch.full((size,), float(THREADS * rounds)))


def test_lists_single_keys_and_updaters_of_many_threads(kv):
    """The updater changes in the meantime; either of the two adds one."""
    keys = list(range(30))
    kv.init(keys, [torch.zeros(100)] * len(keys))
    value = torch.full((100,), -1.0)
    rounds = 60

    def subtract(key, input, stored):
        stored -= input

    def by_lists(seed):
        choose = random.Random(seed)
        for _ in range(rounds):
            kv.push(choose.sample(keys, len(keys)), [value] * len(keys))

    def one_by_one():
        for i in range(rounds * len(keys)):
            kv.push(keys[i % len(keys)], value)

    def setter():
        for _ in range(rounds):
            kv.set_optimizer("sgd", learning_rate=1.0)
            kv.set_updater(subtract)

    def looker():
        for _ in range(rounds):
            for value in kv.pull(keys):
                assert (value == value[0]).all()

    kv.set_updater(subtract)
    bodies = [lambda n=n: by_lists(n) for n in range(3)]
    run_threads([*bodies, one_by_one, setter, looker])
    for value in kv.pull(keys):
        assert_same(value, torch.full((100,), 4.0 * rounds))


def test_a_refused_list_changes_no_key(kv, binding):
    keys = list(range(100))
    kv.init(keys, [torch.zeros(50)] * 100)
    before = snapshot(kv)
    values = [torch.ones(50)] * 99 + [torch.ones(51)]
    with pytest.raises(ValueError, match=r"\(key 99\)"):
        binding.push(keys, values)
    assert snapshot(kv) == before


def test_lists_of_two_stores_at_once():
    """A call of one store does not block calls of another."""
    keys = list(range(200))
    stores = [torchkv.create() for _ in range(2)]
    for store in stores:
        store.init(keys, [torch.zeros(64)] * 200)

    def body(number):
        first, second = stores if number % 2 else stores[::-1]
        for i in range(20):
            values = [torch.full((64,), float(i))] * 200
            first.push(keys, values)
            second.push(keys[::-1], values)
            first.pull(keys, out=[torch.zeros(64) for _ in keys])

    run_threads([lambda number=number: body(number) for number in range(4)])
    for store in stores:
        for value in store.pull(keys):
            assert_same(value, torch.full((64,), 19.0))
