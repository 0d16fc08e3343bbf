"""Every updater with every scheme of compression and dtype, by two ranks: the bits of a
device store with two replicas."""

import pytest
import torch

import ranks
import torchkv
from composition import CODECS, DTYPES, SHAPE, UPDATERS

# Whose noise is of the process that steps.
_RANDOM = "`optim.mxnet.SGLD`"


def train(kv, updater, codec, dtype, positions):
    """The stored value after each of two pushes."""
    generator = torch.Generator().manual_seed(1)
    kv.init("w", torch.rand(SHAPE, generator=generator).to(dtype))
    UPDATERS[updater](kv)
    kv.set_gradient_compression(codec)
    seen = []
    for _ in range(2):
        values = [torch.randn(SHAPE, generator=generator).to(dtype) for _ in range(2)]
        kv.push("w", [values[i] for i in positions])
        seen.append(kv.pull("w"))
    return seen


def train_all(rank, dtype):
    result = {}
    for updater in UPDATERS:
        for codec in CODECS:
            with torchkv.create("dist_sync") as kv:
                result[updater, codec] = train(kv, updater, codec, dtype, [rank])
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_combinations(dtype):
    of_ranks = ranks.run(train_all, 2, dtype)
    for updater in UPDATERS:
        for codec in CODECS:
            kv = torchkv.create("device")
            expected = train(kv, updater, codec, dtype, [0, 1])
            for found in of_ranks:
                for one, two in zip(found[updater, codec], expected, strict=True):
                    same = torch.equal(one, two) or updater == _RANDOM
                    assert same, f"{updater}, {codec}: {(one - two).abs().max()}"
