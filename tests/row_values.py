"""Sparse values with rows, and their sum row by row."""

import torch

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
