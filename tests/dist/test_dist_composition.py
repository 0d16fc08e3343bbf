"""Every updater with every scheme of compression and dtype, values with rows, and
row-sparse keys, by two ranks: the bits of a device store with two replicas."""

import pytest
import torch

import ranks
import torchkv
from composition import CODECS, DTYPES, SHAPE, UPDATERS, some_values, takes_rows
from torchkv.compression import TwoBit

# Values with rows are not compressed.
FORMS = {"dense": CODECS, "some rows": [None, TwoBit()], "mixed": [None]}
FORMS["row-sparse key"] = [None, TwoBit()]
# Its noise is that of a row's place on its server: see test_server_tables.py.
OTHER_BITS = {("row-sparse key", "`optim.mxnet.SGLD`")}


def cells_of(form):
    for updater in UPDATERS:
        if form != "row-sparse key" or takes_rows(updater):
            yield from ((updater, codec) for codec in FORMS[form])


def train(kv, form, updater, codec, dtype, positions):
    """The stored value after each of two pushes."""
    generator = torch.Generator().manual_seed(1)
    first = torch.rand(SHAPE, generator=generator).to(dtype)
    if form == "row-sparse key":
        first, form = first.to_sparse(1), "some rows"
    # Updaters that are not built in need all rows on one server.
    kv.init("w", first, whole=first.is_sparse and updater.startswith("a "))
    UPDATERS[updater](kv)
    kv.set_gradient_compression(codec)
    seen = []
    for _ in range(2):
        values = [value.to(dtype) for value in some_values(form, generator)]
        kv.push("w", [values[i] for i in positions])
        seen.append(kv.pull("w").to_dense())
    return seen


def train_all(rank, form, dtype):
    result = {}
    for updater, codec in cells_of(form):
        with torchkv.create("dist_sync") as kv:
            result[updater, codec] = train(kv, form, updater, codec, dtype, [rank])
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_all_combinations(form, dtype):
    of_ranks = ranks.run(train_all, 2, form, dtype)
    for updater, codec in cells_of(form):
        kv = torchkv.create("device")
        expected = train(kv, form, updater, codec, dtype, [0, 1])
        for found in of_ranks:
            for one, two in zip(found[updater, codec], expected, strict=True):
                assert (form, updater) in OTHER_BITS or torch.equal(one, two), (
                    f"{updater}, {codec}: {(one - two).abs().max()}"
                )
