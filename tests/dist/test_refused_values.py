"""Stores of several processes refuse sparse values, and go on."""

import pytest
import torch

import ranks
import torchkv


def push_rows(rank, type):
    kv = torchkv.create(type)
    kv.init("w", torch.zeros(4, 2))
    rows = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (4, 2))
    try:
        kv.push("w", [torch.ones(4, 2), rows])
        error = None
    except NotImplementedError as caught:
        error = str(caught)
    kv.push("w", torch.ones(4, 2))
    kv.barrier()
    value = kv.pull("w").tolist()
    kv.close()
    return error, value


@pytest.mark.parametrize("type", ["dist_sync", "dist_async"])
def test_sparse_values_are_refused_before_anything_is_sent(type):
    for error, value in ranks.run(push_rows, 2, type):
        assert error.startswith("push: expected a dense tensor")
        assert "(key 'w')" in error
        assert value == [[2.0, 2.0] if type == "dist_sync" else [1.0, 1.0]] * 4
