"""Initial values of rows: reproducible, and of their distribution."""

import dataclasses
import math
import subprocess
import sys

import pytest
import torch

import torchkv
from helpers import assert_same
from torchkv.initializers import Initializer, Normal, Uniform, Zeros


def rows_of(init, ids, size=(64,), dtype=torch.float32, num_rows=None):
    kv = torchkv.create()
    kv.init_rows("a", size, dtype, num_rows=num_rows, init=init)
    return kv.row_sparse_pull("a", row_ids=torch.as_tensor(ids))


INITS = [Zeros(), Normal(), Normal(1.0, 0.1, seed=7), Uniform(-0.5, 0.5, seed=-3)]


@pytest.mark.parametrize("init", INITS, ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
def test_a_row_depends_on_seed_and_id_alone(init, dtype):
    ids = torch.tensor([5, 0, 2**50, 5])
    rows = rows_of(init, ids, dtype=dtype)
    assert_same(rows[0], rows[3])
    one_by_one = torch.stack([rows_of(init, int(i), dtype=dtype) for i in ids])
    assert_same(rows, one_by_one)
    assert_same(rows, rows_of(init, ids, dtype=torch.float64).to(dtype))
    if not isinstance(init, Zeros):
        assert not torch.equal(rows[0], rows[1])
        other = dataclasses.replace(init, seed=init.seed + 1)
        assert not torch.equal(rows, rows_of(other, ids, dtype=dtype))


def test_rows_have_it_before_and_after_the_first_push():
    kv = torchkv.create()
    kv.init_rows("a", (4,), torch.bfloat16, num_rows=9, init=Normal(seed=1))
    ids = torch.arange(9)
    before = kv.row_sparse_pull("a", row_ids=ids)
    kv.set_optimizer(torchkv.optim.SGD(lr=0.5))
    push = torch.sparse_coo_tensor(
        [[2, 7]], torch.ones(2, 4, dtype=torch.bfloat16), (9, 4), check_invariants=True
    )
    kv.push("a", push)
    after = before.clone()
    after[[2, 7]] -= 0.5
    assert_same(kv.row_sparse_pull("a", row_ids=ids), after)
    out = torch.zeros(9, 4, dtype=torch.bfloat16)
    kv.pull("a", out=out)
    assert_same(out, after)
    kv.delete("a", row_ids=torch.tensor([2, 7]))
    assert_same(kv.row_sparse_pull("a", row_ids=ids), before)


def test_another_process_makes_the_same_rows():
    code = """
import torch, torchkv
kv = torchkv.create()
kv.init_rows("a", (3,), init=torchkv.initializers.Normal(seed=4))
print(kv.row_sparse_pull("a", row_ids=torch.tensor(123456789012)).tolist())
"""
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    assert eval(printed) == rows_of(Normal(seed=4), 123456789012, (3,)).tolist()


def test_known_rows():
    """A later version of torchkv must make the rows of this one."""
    normal = rows_of(Normal(seed=1), [0, 1], (2,), torch.float64)
    uniform = rows_of(Uniform(seed=1), [0, 1], (2,), torch.float64)
    assert normal.flatten().tolist() == KNOWN_NORMAL
    assert uniform.flatten().tolist() == KNOWN_UNIFORM


KNOWN_NORMAL = [0.5058303907210688, -0.19368454193333826, -0.40801505604755306,
                -0.1515144934176339]  # fmt: skip
KNOWN_UNIFORM = [0.6935121390102292, 0.42321144819582723, 0.34163131066679175,
                 0.4397849393639228]  # fmt: skip


def test_normal_numbers_are_the_quantiles_of_the_uniform_ones():
    """To the last bits of fp64, in the middle and the tails."""
    ids = torch.arange(20_000)
    uniform = rows_of(Uniform(seed=3), ids, dtype=torch.float64)
    normal = rows_of(Normal(seed=3), ids, dtype=torch.float64)
    # p = uniform + 2^-54; the library's own quantiles, from torch.special.
    expected = torch.special.ndtri(uniform + 2.0**-54)
    torch.testing.assert_close(normal, expected, rtol=2e-14, atol=2e-15)
    assert normal.abs().max() > 4.5


def test_distributions():
    ids = torch.arange(20_000)
    normal = rows_of(Normal(2.0, 3.0, seed=5), ids, dtype=torch.float64)
    uniform = rows_of(Uniform(-1.0, 3.0, seed=5), ids, dtype=torch.float64)
    count = normal.numel()
    # Five standard errors of each moment.
    assert abs(normal.mean() - 2) < 5 * 3 / math.sqrt(count)
    assert abs(normal.var() - 9) < 5 * 9 * math.sqrt(2 / count)
    assert abs(uniform.mean() - 1) < 5 * math.sqrt(16 / 12 / count)
    assert abs(uniform.var() - 16 / 12) < 5 * 16 * math.sqrt(1 / 180 / count)
    assert uniform.min() >= -1 and uniform.max() < 3
    # Neighbouring columns and rows are not correlated.
    for values in (normal, uniform):
        z = (values - values.mean()) / values.std()
        for a, b in ((z[:, :-1], z[:, 1:]), (z[:-1], z[1:])):
            assert abs((a * b).mean()) < 5 / math.sqrt(a.numel())


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("limits", [(0, 1), (-3, -2), (-1, 0), (0, 2.0**-30)], ids=str)
def test_uniform_numbers_are_below_their_limit(limits, dtype):
    low, high = limits
    rows = rows_of(Uniform(low, high, seed=1), torch.arange(20_000), dtype=dtype)
    assert rows.double().min() >= low and rows.double().max() < high


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: Normal(std=-1), ValueError, "init_rows: expected a std of at least 0"),
        (lambda: Normal(mean=math.nan), ValueError, "expected a finite mean"),
        (lambda: Uniform(2, 1), ValueError, "low to be at most high"),
        (lambda: Uniform(-1e308, 1e308), ValueError, "difference to be finite"),
        (lambda: Uniform("a"), TypeError, "init_rows"),
        (lambda: Normal(seed=1.5), TypeError, "init_rows: expected an int as seed"),
        (lambda: Normal(seed=True), TypeError, "init_rows: expected an int as seed"),
        (lambda: Normal(seed=2**63), ValueError, "seed of 64 bits"),
        (Initializer, ValueError, "init_rows: unknown initial value of rows ''"),
    ],
)
def test_errors(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_they_are_values():
    assert Normal(seed=3) == Normal(seed=3) != Normal(seed=4)
    assert repr(Uniform(0, 2)) == "Uniform(low=0, high=2, seed=0)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        Zeros().seed = 3
