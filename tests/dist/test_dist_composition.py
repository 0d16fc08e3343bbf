"""Every updater with every scheme of compression and dtype, and values with rows, by
two ranks: the bits of a device store with two replicas."""

import pytest
import torch

import ranks
import torchkv
from composition import CODECS, DTYPES, SHAPE, UPDATERS, some_values
from torchkv.compression import TwoBit

# Values with rows are not compressed.
FORMS = {"dense": CODECS, "some rows": [None, TwoBit()], "mixed": [None]}


def train(kv, form, updater, codec, dtype, positions):
    """The stored value after each of two pushes."""
    generator = torch.Generator().manual_seed(1)
    kv.init("w", torch.rand(SHAPE, generator=generator).to(dtype))
    UPDATERS[updater](kv)
    kv.set_gradient_compression(codec)
    seen = []
    for _ in range(2):
        values = [value.to(dtype) for value in some_values(form, generator)]
        kv.push("w", [values[i] for i in positions])
        seen.append(kv.pull("w"))
    return seen


def train_all(rank, form, dtype):
    result = {}
    for updater in UPDATERS:
        for codec in FORMS[form]:
            with torchkv.create("dist_sync") as kv:
                result[updater, codec] = train(kv, form, updater, codec, dtype, [rank])
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_all_combinations(form, dtype):
    of_ranks = ranks.run(train_all, 2, form, dtype)
    for updater in UPDATERS:
        for codec in FORMS[form]:
            kv = torchkv.create("device")
            expected = train(kv, form, updater, codec, dtype, [0, 1])
            for found in of_ranks:
                for one, two in zip(found[updater, codec], expected, strict=True):
                    assert torch.equal(one, two), (
                        f"{updater}, {codec}: {(one - two).abs().max()}"
                    )
