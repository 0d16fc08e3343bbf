"""Which updaters, dtypes, forms of values, schemes of compression and types compose.

A cell of the table pushes twice and compares the stored value with a model. Printed by

    python tests/composition.py > docs/composition.md
"""

import copy
import sys
import warnings
from itertools import cycle
from typing import NamedTuple

import torch

import torchkv
from compression_model import Model
from helpers import script
from torchkv import optim
from torchkv.compression import BF16, FP8, FP16, Int4, OneBit, TopK, TwoBit

SHAPE = (6, 4)
RATE = 0.0625
TYPES = ["local", "device"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VALUES = ["dense", "row-sparse", "mixed", "some rows"]
# The values of row-sparse keys are not compressed.
CODECS = [None, OneBit(), TwoBit(), FP16(), BF16(), FP8(), Int4(), TopK(k=5)]
KEYS = {"dense": CODECS, "row-sparse": [None, TwoBit()]}


def python_updater(key, input, stored):
    stored.add_(input, alpha=0.5)


def script_updater(key: str, input: torch.Tensor, stored: torch.Tensor):
    stored.add_(input, alpha=0.5)


def rows_updater(key, input, stored):
    if stored.is_sparse:  # the same rows
        stored.values().add_(input.values(), alpha=0.5)
    else:
        stored.add_(input, alpha=0.5)


def rows_script_updater(key: str, input: torch.Tensor, stored: torch.Tensor):
    if stored.is_sparse:
        stored.values().add_(input.values(), alpha=0.5)
    else:
        stored.add_(input, alpha=0.5)


def _optimizers():
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Lion", "LAMB"):
        yield (
            f"`optim.{name}`",
            lambda kv, n=name: kv.set_optimizer(getattr(optim, n)(lr=RATE)),
        )
    for cls in optim.mxnet.ALL:
        options = {"seed": 7} if cls is optim.mxnet.SGLD else {}
        yield (
            f"`optim.mxnet.{cls.__name__}`",
            lambda kv, c=cls, o=options: kv.set_optimizer(c(**o)),
        )


# They see values of the stored dtype; optimizers keep an fp32 master of half precision.
OF_STORED_DTYPE = {
    "none (ASSIGN)": lambda kv: None,
    "a Python function": lambda kv: kv.set_updater(python_updater),
    "a TorchScript function": lambda kv: kv.set_updater(script(script_updater)),
    "a Python function, `sparse=True`": lambda kv: kv.set_updater(
        rows_updater, sparse=True
    ),
    "a TorchScript function, `sparse=True`": lambda kv: kv.set_updater(
        script(rows_script_updater), sparse=True
    ),
    "`torch.optim.SGD`": lambda kv: kv.set_optimizer(torch.optim.SGD, lr=RATE),
}
UPDATERS = {**OF_STORED_DTYPE, **dict(_optimizers())}


# Those that need whole values.
_WHOLE = ("LAMB", "LARS", "torch.optim.SGD")


def takes_rows(updater):
    """Whether row-sparse keys take an updater."""
    if updater.startswith("a "):
        return "sparse=True" in updater
    return not any(f"{name}`" in updater for name in _WHOLE)


class Cell(NamedTuple):
    """A combination."""

    updater: str
    dtype: torch.dtype
    values: str
    codec: object
    type: str
    key: str = "dense"


def cells(updater, types=TYPES):
    """All combinations with an updater."""
    return [
        Cell(updater, dtype, values, codec, type, key)
        for dtype in DTYPES
        for values in VALUES
        for type in types
        for key, codecs in KEYS.items()
        for codec in codecs
    ]


def some_values(form, generator):
    """Three replicas; sparse ones have rows in random order, some twice."""

    def numbers(*shape):
        return torch.randn(*shape, generator=generator)

    def rows():
        if form == "some rows":
            ids = torch.randint(SHAPE[0] // 2, (3,), generator=generator)
        else:
            every = torch.randperm(SHAPE[0], generator=generator)
            ids = torch.cat([every, torch.tensor([3, 0])])
        return torch.sparse_coo_tensor(
            ids[None], numbers(len(ids), SHAPE[1]), SHAPE, check_invariants=False
        )

    forms = {
        "dense": [False, False, False],
        "row-sparse": [True, True, True],
        "mixed": [True, False, True],
        "some rows": [True, True, True],
    }
    return [rows() if is_sparse else numbers(*SHAPE) for is_sparse in forms[form]]


class _Sums:
    """What the values of a cell's pushes add up to, in fp32."""

    def __init__(self, cell):
        self.cell = cell
        self.is_compressed = (
            cell.codec is not None and cell.values == "dense" and cell.key == "dense"
        )
        if not self.is_compressed:
            return
        if isinstance(cell.codec, Int4):  # whose random numbers no model repeats
            self.store = torchkv.create("device")
            self.store.init("w", torch.zeros(SHAPE))
            self.store.set_gradient_compression(cell.codec)
        else:
            self.model = Model(cell.codec, SHAPE)

    def of(self, values):
        """The sum of one push."""
        if not self.is_compressed:
            return sum(value.to_dense() for value in values)
        if isinstance(self.cell.codec, Int4):
            self.store.push("w", values)
            return self.store.pull("w")
        return self.model.sum(values)


class _Lazy:
    """A copy of a store that steps all rows, and what the pushed ones are then."""

    def __init__(self, kv):
        self.before = kv.pull("w").to_dense().cpu()
        self.store = copy.deepcopy(kv)
        self.store.set_gradient_compression(None)

    def push(self, key, total):
        """Steps with a sum, whose other rows are zero."""
        self.has = (total != 0).any(dim=1, keepdim=True)
        self.store.push(key, total)

    def pull(self, key):
        """The dense value."""
        return torch.where(self.has, self.store.pull(key).to_dense().cpu(), self.before)


def refusal(cell, devices=("cpu",)):
    """None if the cell agrees with its model, or the error that refuses it.

    Args:
        devices: Of the replicas, in turn.

    Raises:
        AssertionError: it does neither.
    """
    generator = torch.Generator().manual_seed(1)
    first = torch.rand(SHAPE, generator=generator).to(cell.dtype)
    kv, plain = torchkv.create(cell.type), torchkv.create("local")
    on_device = first.to(devices[0])
    kv.init("w", on_device if cell.key == "dense" else on_device.to_sparse(1))
    plain.init("w", first if cell.updater in OF_STORED_DTYPE else first.float())
    for store in (kv, plain):
        UPDATERS[cell.updater](store)
    try:
        kv.set_gradient_compression(cell.codec)
    except ValueError as error:
        return str(error)
    sums = _Sums(cell)
    for step in range(2):
        values = some_values(cell.values, generator)
        if (
            cell.values == "some rows"
            and takes_rows(cell.updater)
            and getattr(kv.optimizer, "lazy", False)
        ):
            plain = _Lazy(kv)
        try:
            kv.push("w", [v.to(d) for v, d in zip(values, cycle(devices))])
        except NotImplementedError as error:
            return str(error)
        total = sums.of(values)
        plain.push("w", total)
        actual = kv.pull("w").to_dense().float().cpu()
        expected = plain.pull("w").to(cell.dtype).float()
        # One unit in the last place: sparse rows are added up in another order.
        most = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
        near = {"rtol": most[cell.dtype], "atol": most[cell.dtype]}
        assert torch.allclose(actual, expected, **near), (
            f"{cell}, step {step}: {(actual - expected).abs().max()}"
        )
    return None


def page():
    """The page of the documentation."""
    columns = [
        ("local", None, "dense"),
        *(("device", codec, "dense") for codec in CODECS),
        ("device", None, "row-sparse"),
    ]
    names = [f"`{t}`" if c is None else f"`device`, `{c.type}`" for t, c, _ in columns]
    names[-1] = "row-sparse key"
    lines = [f"| updater | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for updater in UPDATERS:
        row = []
        for column in columns:
            found = {
                refusal(cell)
                for cell in cells(updater)
                if (cell.type, cell.codec, cell.key) == column
            }
            assert len(found) == 1, (updater, column, found)
            row.append("yes" if found == {None} else "no")
        lines.append(f"| {updater} | {' | '.join(row)} |")
    errors = {
        refusal(Cell("none (ASSIGN)", dtype, values, codec, "local"))
        for dtype in DTYPES
        for values in VALUES
        for codec in CODECS[1:]
    }
    (error,) = errors
    of_key = Cell(
        "`optim.LAMB`", torch.float32, "row-sparse", None, "local", "row-sparse"
    )
    return TEXT.format(table="\n".join(lines), error=error, of_key=refusal(of_key))


TEXT = """\
# What composes

Which updaters work with which types of stores and schemes of
[compression](compression.md). Each cell stands for fp32, bf16 and fp16 values, and for
three replicas that are dense, [row-sparse](updaters.md#sparse-gradients) with all rows,
the same with some rows, or mixed: the tests push each combination twice and compare the
stored value with a model. (`tests/composition.py` generates this page.) If one of a
key's values is row-sparse, or the [key itself](embeddings.md#row-sparse-keys), it is
not compressed. The last column is that of `local` and `device` stores, with and without
compression.

{table}

A `local` store refuses every scheme of compression, in words:

```text
{error}
```

A row-sparse key refuses updaters that need the whole value:

```text
{of_key}
```

Type `nccl` needs GPUs. On these, row-sparse and compressed values are summed as in a
`device` store, so the columns of `device` are its columns, too. Where there are GPUs,
the tests of this page run with values on them; so far, they have run nowhere with
GPUs. On GPUs simulated in CPU memory, a test compares all of it but the Python
functions with the results in CPU memory, for both types
(`tests/cpp/mock_cuda/composition_test.cpp`). Stores of several processes combine all
updaters, schemes and forms of values and keys (`tests/dist/test_dist_composition.py`,
`test_server_tables.py`).
"""


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.stdout.write(page())
