"""A push makes no copy of the replica list and allocates nothing that grows with it."""

import copy
import os

import pytest
import torch

from helpers import (
    Add,
    add_input,
    allocated_bytes,
    peak_bytes,
    script,
    scripted_add_twice,
)

pytestmark = pytest.mark.skipif(
    bool(os.environ.get("TORCHKV_PLACES")),
    reason="TORCHKV_PLACES is set: first calls move values, odd layouts are copied",
)

SIZE = 1 << 16
BYTES = 4 * SIZE
# What the profiler itself and small fixed things may take.
SLACK = 1 << 12


def wide(dtype=torch.float32):
    return torch.ones(SIZE, dtype=dtype)


# Values for one key of SIZE float32 elements.
VALUES = {
    "one": lambda: wide(),
    "list of one": lambda: [wide()],
    "four": lambda: [wide() for _ in range(4)],
    "nine": lambda: [wide() for _ in range(9)],
    "strided": lambda: [torch.ones(SIZE, 3)[:, 1] for _ in range(4)],
    "one strided": lambda: torch.ones(SIZE, 3)[:, 1],
    "expanded": lambda: [torch.ones(1).expand(SIZE) for _ in range(4)],
    "one double": lambda: wide(torch.float64),
    "one half": lambda: wide(torch.float16),
    "doubles": lambda: [wide(torch.float64) for _ in range(4)],
    "halves": lambda: [wide(torch.float16) for _ in range(4)],
    "mixed": lambda: [wide(torch.float16), wide(), wide(torch.int32), wide()],
    "mixed and strided": lambda: [torch.ones(SIZE, 2).half()[:, 1], wide(), wide()],
}


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_assign_allocates_nothing(kv, values, dtype):
    kv.init(3, wide(dtype))
    value = VALUES[values]()
    kv.push(3, value)
    assert allocated_bytes(lambda: kv.push(3, value)) < SLACK
    assert allocated_bytes(lambda: kv.push([3, 3], [value, value])) < SLACK


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_an_optimizer_allocates_nothing(kv, values, dtype):
    kv.init([3, 5], [wide(dtype), torch.ones(SIZE, 3, dtype=dtype)[:, 1]])
    kv.set_optimizer("sgd", wd=0.1)
    value = VALUES[values]()
    kv.push([3, 5], [value, value])
    assert allocated_bytes(lambda: kv.push(3, value)) < SLACK
    assert allocated_bytes(lambda: kv.push([5, 3], [value, value])) < SLACK


def test_a_long_list_of_keys_allocates_nothing(kv):
    keys = list(range(100))
    kv.init(keys, [torch.zeros(1000)] * 100)
    values = [[torch.ones(1000)] * 3] * 100
    kv.push(keys, values)
    assert allocated_bytes(lambda: kv.push(keys, values)) < SLACK
    assert allocated_bytes(lambda: kv.pull(keys, out=values)) < SLACK


def test_values_of_another_layout_are_copied_in_blocks(kv):
    stored, value = torch.ones(4096, 4096).t(), torch.ones(4096, 4096)
    kv.init(3, stored)
    values = [value] * 4
    assert peak_bytes(lambda: kv.push(3, values)) < 17 << 20
    assert peak_bytes(lambda: kv.push(3, value)) < 17 << 20
    kv.init(5, torch.ones(1024, 64, 3, 3))
    values = [torch.ones(1024, 64, 3, 3).to(memory_format=torch.channels_last)] * 4
    assert peak_bytes(lambda: kv.push(5, values)) < 2 << 20


def test_slices_are_not_copied(kv):
    kv.init(3, torch.ones(256, 256).t())
    values = [torch.ones(256, 512).t()[::2] for _ in range(4)]
    kv.push(3, values)
    assert allocated_bytes(lambda: kv.push(3, values)) < SLACK
    assert allocated_bytes(lambda: kv.push(3, values[0])) < SLACK


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("updater", ["python", "script"])
def test_an_updater_without_temporaries_reuses_the_first_pushs_memory(
    kv, values, updater
):
    kv.set_updater(add_input if updater == "python" else script(Add()))
    kv.init([3, 5], [wide(), wide()])
    value = VALUES[values]()
    kv.push([3, 5], [value, value])
    assert allocated_bytes(lambda: kv.push(3, value)) < SLACK
    assert allocated_bytes(lambda: kv.push([5, 3], [value, value])) < SLACK


@pytest.mark.parametrize("kind", ["python", "script"])
def test_the_memory_of_an_updater_is_measured(kv, kind):
    def add_twice(key, input, stored):
        stored += input * 2

    kv.set_updater(add_twice if kind == "python" else scripted_add_twice())
    kv.init(3, wide())
    values = [wide() for _ in range(4)]
    kv.push(3, values)
    used = allocated_bytes(lambda: kv.push(3, values))
    assert BYTES <= used < BYTES + SLACK, "one product, made by the updater itself"


def test_the_measure_sees_an_allocation(kv):
    value = wide()
    assert allocated_bytes(lambda: value.clone()) >= BYTES
    assert allocated_bytes(lambda: value + value + value) >= 2 * BYTES
    assert allocated_bytes(lambda: None) < SLACK
    kv.init(3, value)
    assert BYTES <= allocated_bytes(lambda: kv.pull(3)) < BYTES + SLACK
    assert allocated_bytes(lambda: kv.init(5, value)) >= BYTES


def test_a_copy_takes_little_more_than_itself_and_a_snapshot(kv):
    kv.init([3, 5, 7], [wide(), wide(), wide()])
    kv.init(9, torch.ones(2 * SIZE, 2).t())
    kv.set_updater(script(Add()))
    largest, total = 4 * BYTES, 7 * BYTES
    copies = []
    peak = peak_bytes(lambda: copies.append(copy.deepcopy(kv)))
    assert total <= peak <= 2 * total + largest + SLACK


def test_the_measure_sees_a_peak(kv):
    assert BYTES <= peak_bytes(lambda: [wide().sum() for _ in range(9)]) < 2 * BYTES
    assert 3 * BYTES <= peak_bytes(lambda: wide() + (wide() + 1)) < 4 * BYTES


def test_pull_allocates_nothing(kv):
    kv.init(3, wide())
    outs = [wide(), torch.zeros(SIZE, 2)[:, 1], wide(torch.float64)]
    assert allocated_bytes(lambda: kv.pull(3, out=outs)) < SLACK
