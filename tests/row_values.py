"""Sparse values with rows, and their sum row by row."""

import torch

from helpers import assert_same
from torchkv import optim

LARGE = (3001, 67)  # three shards, whose rows are divided between them


def sparse(ids, rows, shape, **options):
    return torch.sparse_coo_tensor(
        torch.tensor([ids], dtype=torch.long),
        rows,
        shape,
        check_invariants=False,
        **options,
    )


def numbers(shape, dtype=torch.float32):
    """Of many magnitudes, so that every order of additions has its own bits."""
    wide = torch.randn(shape) * torch.exp(2 * torch.randn(shape))
    return wide.to(dtype) if dtype.is_floating_point else (wide * 9).to(dtype)


def some_rows(shape, count, dtype=torch.float32, coalesced=False):
    """A sparse value with `count` rows, with repeats unless it is coalesced."""
    if coalesced:
        ids = torch.randperm(shape[0])[:count].sort().values
    else:
        ids = torch.randint(shape[0], (count,))
    rows = numbers((len(ids), *shape[1:]), dtype)
    return sparse(ids.tolist(), rows, shape, is_coalesced=coalesced)


def model_sum(values, shape, dtype):
    """The sum row by row, in the order of replicas and of rows, and which it has."""
    total = torch.zeros(shape, dtype=dtype)
    has = torch.zeros(shape[0], dtype=torch.bool)

    def add(row, numbers):
        numbers = numbers.to(dtype)
        total[row] = total[row] + numbers if has[row] else numbers
        has[row] = True

    for value in values:
        if value.is_sparse:
            for row, numbers in zip(value._indices()[0], value._values(), strict=True):
                add(int(row), numbers)
        else:
            for row, numbers in enumerate(value):
                add(row, numbers)
    return total, has


def row_ids_of(kv, key=3):
    """The rows that a row-sparse key keeps."""
    return kv.pull(key).indices()[0].tolist()


def dense_of(kv, key=3):
    return kv.pull(key).to_dense()


def check_rows(kv, expected, ids, key=3):
    """Every way to read a key gives these rows, and zeros elsewhere."""
    shape, dtype = expected.shape, expected.dtype
    value = kv.pull(key)
    assert value.is_coalesced() and value.shape == shape
    assert value.indices()[0].tolist() == sorted(ids)
    assert kv.num_rows(key) == len(ids)
    assert_same(value.values(), expected[value.indices()[0]])
    out = torch.full(shape, 7, dtype=dtype)
    kv.pull(key, out=out)
    assert_same(out, expected)
    order = torch.randint(shape[0], (2, 9))
    assert_same(kv.row_sparse_pull(key, row_ids=order), expected[order])


ROW_OPTIMIZERS = {
    "SGD": lambda **o: optim.SGD(lr=0.1, weight_decay=0.01, **o),
    "momentum": lambda **o: optim.SGD(lr=0.1, momentum=0.9, nesterov=True, **o),
    "Adam": lambda **o: optim.Adam(lr=0.1, amsgrad=True, **o),
    "AdamW": lambda **o: optim.AdamW(lr=0.1, **o),
    "Adagrad": lambda **o: optim.Adagrad(lr=0.1, initial_accumulator_value=0.3, **o),
    "RMSprop": lambda **o: optim.RMSprop(lr=0.1, centered=True, momentum=0.5, **o),
    "Lion": lambda **o: optim.Lion(lr=0.1, **o),
    "accumulate": lambda **o: optim.Adam(lr=0.1, accumulate=2, **o),
    "clip_value": lambda **o: optim.SGD(lr=0.1, clip_value=0.3, **o),
    "skip_nonfinite": lambda **o: optim.Adam(lr=0.1, skip_nonfinite=True, **o),
    "MXNet's Ftrl": lambda **o: optim.mxnet.Ftrl(**o),
}
