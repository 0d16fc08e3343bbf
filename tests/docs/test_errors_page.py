"""Every error that the page "Errors and what to do" lists is raised as it says."""

import builtins
import copy
import os
import re

import pytest
import torch
from torch import nn

import torchkv
from helpers import in_child, outcome
from tables import rows_below
from torchkv.compression import TopK


def store_with(value=None, updater=None):
    store = torchkv.create("local")
    store.init("a", torch.zeros(2) if value is None else value)
    store.set_updater(updater)
    return store


def push_to_a_row_sparse_key():
    store = torchkv.create("local")
    store.init_rows("a", (1,), num_rows=2)
    store.set_updater(fail)
    store.push("a", torch.ones(2, 1))


def closed():
    store = store_with()
    store.close()
    return store


def call_from_the_updater():
    store = store_with(updater=lambda key, input, stored: store.pull(key))
    store.push("a", torch.ones(2))


def call_with_shared_memory():
    values = torch.zeros(3)
    store = torchkv.create("local")
    store.init("a", values[:2], share=True)
    store.push("a", values[1:])


def call_in_a_child():
    store = store_with()
    kind, _, text = in_child(lambda: outcome(lambda: store.pull("a"))).partition(": ")
    raise getattr(builtins, kind)(text)


def fail(key, input, stored):
    raise ZeroDivisionError("of the updater")


def call_under_a_tracer():
    store = store_with()
    torch.jit.trace(lambda x: store.pull("a") + x, torch.ones(2))


def compress(scheme, value=None):
    store = torchkv.create("device")
    store.init("a", torch.zeros(2) if value is None else value)
    store.set_gradient_compression(scheme)
    return store


def push_compressed_integers():
    integers = torch.ones(2, dtype=torch.int64)
    compress({"type": "2bit"}, integers).push("a", integers)


ON_ONE_MACHINE = {
    "`KeyError` (`IndexError` in TorchScript and C++)": lambda: store_with().pull("b"),
    "`ValueError`: key already initialized": lambda: store_with().init(
        "a", torch.ones(2)
    ),
    "`ValueError`: shape, number of values, empty list": lambda: store_with().push(
        "a", torch.ones(3)
    ),
    "`ValueError`: overlaps with memory that a key shares": call_with_shared_memory,
    "`ValueError`: expected a store of type 'device' or 'nccl'": lambda: (
        store_with().set_gradient_compression({"type": "2bit"})
    ),
    "`TypeError`: floating-point dtype": push_compressed_integers,
    "`IndexError`: row ids": lambda: store_with().push(
        "a",
        torch.sparse_coo_tensor([[9]], [1.0], (2,), check_invariants=False),
    ),
    "`ValueError`: one sparse dimension": lambda: store_with(torch.zeros(2, 2)).push(
        "a", torch.eye(2).to_sparse()
    ),
    "`TypeError`: row ids of dtype": lambda: store_with().row_sparse_pull(
        "a", row_ids=torch.tensor([0.5])
    ),
    "`ValueError`: threshold, k or ratio": lambda: TopK(k=0),
    "`ValueError`: unknown compression": lambda: compress({"type": "3bit"}),
    "`NotImplementedError`: the key is row-sparse": push_to_a_row_sparse_key,
    "`TypeError`: int and str keys": lambda: store_with().pull(3),
    "`TypeError`: dtype": lambda: store_with(torch.zeros(2, dtype=torch.int64)).push(
        "a", torch.ones(2)
    ),
    "`TypeError`: the updater returned a new tensor": lambda: store_with(
        updater=lambda key, input, stored: stored + input
    ).push("a", torch.ones(2)),
    "`TypeError`: a Python updater cannot be copied or saved": lambda: copy.deepcopy(
        store_with(updater=fail)
    ),
    "`RuntimeError`: forked": call_in_a_child,
    "`RuntimeError`: called from its own updater": call_from_the_updater,
    "`RuntimeError`: closed": lambda: closed().pull("a"),
    "`RuntimeError`: under a tracer": call_under_a_tracer,
    "`NotImplementedError`": lambda: store_with().init(
        "b", torch.ones(2, device="meta")
    ),
    "any other": lambda: store_with(updater=fail).push("a", torch.ones(2)),
}


def trainer_of(model, **options):
    return torchkv.Trainer(model, "sgd", **options)


def step_of_the_earlier_trainer():
    model = nn.Linear(2, 2)
    earlier, later = trainer_of(model), trainer_of(model)
    model(torch.ones(1, 2)).sum().backward()
    try:
        earlier.step()
    finally:
        later.step()


def scale_the_optimizer():
    trainer = trainer_of(nn.Linear(2, 2))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError):
        scaler.unscale_(trainer.optimizer)
    scaler.step(trainer.optimizer)


OF_THE_TRAINER = {
    "`UserWarning`, raised": lambda: trainer_of(nn.Linear(2, 2)).step(),
    "`RuntimeError`: a later Trainer has the parameter": step_of_the_earlier_trainer,
    "`RuntimeError`: the optimizer runs on the store": lambda: trainer_of(
        torchkv.replicate(nn.Linear(2, 2), ["cpu", "cpu"])
    ).allreduce_grads(),
    "`RuntimeError`: the optimizer's `step()`": lambda: trainer_of(
        nn.Linear(2, 2)
    ).optimizer.step(),
    "`TypeError`: Trainer is not an Optimizer": lambda: torch.optim.lr_scheduler.StepLR(
        trainer_of(nn.Linear(2, 2)), 1
    ),
    "`RuntimeError`: the scaler expected the trainer (or `AssertionError`, of "
    "`unscale_`)": scale_the_optimizer,
    "`ValueError`: a store with keys": lambda: trainer_of(
        nn.Linear(2, 2), kvstore=store_with()
    ),
}

TABLES = {"Stores on one machine": ON_ONE_MACHINE, "The Trainer": OF_THE_TRAINER}


@pytest.mark.parametrize("heading", TABLES)
def test_every_row_has_a_case(heading):
    rows = [row["error"] for row in rows_below("errors.md", heading)]
    assert rows == list(TABLES[heading])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of fork
@pytest.mark.parametrize(
    ("error", "call"),
    [(error, call) for table in TABLES.values() for error, call in table.items()],
)
def test_the_error_is_raised(error, call):
    named = re.match("`(\\w+)`", error)
    kind = getattr(builtins, named[1]) if named else ZeroDivisionError
    with pytest.raises(kind) as raised:
        call()
    assert raised.type is kind


def test_a_program_without_a_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert "RANK" not in os.environ
    with pytest.raises(RuntimeError, match="RANK"):
        torchkv.create("dist_sync")
