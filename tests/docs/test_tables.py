"""What tables of the documentation say, compared with the store."""

import pytest
import torch

import torchkv
from helpers import allocated_bytes
from tables import DOCS, rows_below

DTYPES = {
    "fp32": [torch.float32],
    "fp16, bf16": [torch.float16, torch.bfloat16],
    "fp64": [torch.float64],
}
SIZE = 1 << 16

# --- Memory ---------------------------------------------------------------------

PER_PARAMETER = rows_below("memory.md", "In the store, per parameter")


def bytes_per_parameter(options, dtype, share=False):
    """Allocated by init and the first pushes; later ones allocate nothing."""
    store = torchkv.create("local")
    if options != "none":
        eval(f"store.set_optimizer({options})", {"store": store, "torchkv": torchkv})
    value, gradient = torch.ones(SIZE, dtype=dtype), torch.ones(SIZE, dtype=dtype)

    def push():
        store.push(3, [gradient, gradient])

    def begin():
        store.init(3, value, share=share)
        push()
        push()

    first = allocated_bytes(begin)
    assert allocated_bytes(lambda: (push(), push())) < SIZE / 16
    return first / SIZE


@pytest.mark.parametrize("row", PER_PARAMETER, ids=lambda row: row[next(iter(row))])
def test_memory_per_parameter(row):
    options, *cells = row.values()
    assert [*row] == ["`set_optimizer(...)`", *DTYPES]
    for cell, dtypes in zip(cells, DTYPES.values(), strict=True):
        for dtype in dtypes:
            measured = bytes_per_parameter(options.strip("`"), dtype)
            assert measured == pytest.approx(int(cell), abs=0.1), dtype


@pytest.mark.parametrize(("dtype", "saved"), [(torch.float32, 4), (torch.float64, 8)])
def test_memory_of_shared_values(dtype, saved):
    own = bytes_per_parameter('"adam"', dtype)
    shared = bytes_per_parameter('"adam"', dtype, share=True)
    assert own - shared == pytest.approx(saved, abs=0.1)


def test_memory_with_another_updater():
    store = torchkv.create("local")
    store.set_updater(lambda key, input, stored: stored.add_(input))
    value = torch.ones(SIZE)
    used = allocated_bytes(lambda: (store.init(3, value), store.push(3, [value] * 2)))
    assert used / SIZE == pytest.approx(8, abs=0.1)
    assert "8 bytes per parameter in fp32" in (DOCS / "memory.md").read_text()
