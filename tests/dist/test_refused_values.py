"""Stores of several processes refuse sparse and compressed values, and go on."""

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


def compress(rank, type, folder):
    kv = torchkv.create(type)
    kv.init("w", torch.zeros(4))
    errors = []
    try:
        kv.load(folder)
    except NotImplementedError as caught:
        errors.append(str(caught))
    kv.push("w", torch.full((4,), 0.125))
    kv.barrier()
    value = kv.pull("w").tolist()
    found = kv.gradient_compression
    kv.close()
    return errors, value, found


@pytest.mark.parametrize("type", ["dist_sync", "dist_async"])
def test_compression_is_refused(type, tmp_path):
    with torchkv.create("device") as compressed:
        compressed.init("w", torch.zeros(4))
        compressed.set_gradient_compression({"type": "2bit"})
        compressed.save(tmp_path)
    for errors, value, found in ranks.run(compress, 2, type, tmp_path):
        assert errors[0].startswith("load: expected a store without gradient compr")
        assert value == [0.25 if type == "dist_sync" else 0.125] * 4
        assert found is None
