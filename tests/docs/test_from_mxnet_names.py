"""The tables of from_mxnet.md have all of MXNet's names, and torchkv has the others."""

import inspect
import os
import re
import subprocess

import pytest
import torch

import mxnet_members
import test_from_mxnet_launch
import test_from_mxnet_optimizers
import test_from_mxnet_store
import test_from_mxnet_trainer
import torchkv
from pages import ROOT
from tables import code_in, tables_of

MXNET = ROOT / ".venv/mxnet-1.9.1/bin/python"
TABLES = tables_of("from_mxnet.md")
LAUNCHING = "Launching"
TESTED = [
    *test_from_mxnet_store.row.headings,
    *test_from_mxnet_trainer.row.headings,
    *test_from_mxnet_optimizers.row.headings,
    *test_from_mxnet_launch.row.headings,
]


def test_the_rows_of_every_table_are_tested():
    assert sorted(TESTED) == sorted(TABLES)
    assert all(len(tables) == 1 for tables in TABLES.values())


# --- MXNet's --------------------------------------------------------------------


def mxnet_names():
    """The code of first columns, with the names' owners."""
    for heading, (rows,) in TABLES.items():
        for cell in (next(iter(row.values())) for row in rows):
            for code in code_in(cell):
                if heading == "Optimizers":
                    yield f"mx.optimizer.{code}"
                elif heading == "Schedules of the learning rate" and "." not in code:
                    yield f"mx.lr_scheduler.{code}"
                elif heading != LAUNCHING:
                    yield code


def without_case(names):
    """Of optimizers: the page has the names that `create` takes."""
    return sorted(
        re.sub(r'mx\.optimizer\."?([A-Za-z]+)"?$', lambda m: m[0].lower(), name)
        for name in names
    )


def test_the_tables_have_mxnets_members_and_no_others():
    on_page = [name.replace('"', "") for name in mxnet_names()]
    beside = {"mx.optimizer.groupadagrad"}  # in mx.optimizer.contrib
    assert len(on_page) == len({*on_page})
    assert without_case({*on_page} - beside) == without_case(mxnet_members.MEMBERS)


@pytest.mark.skipif(not MXNET.exists(), reason="needs MXNet: make bench-peers")
def test_the_members_are_mxnets():
    done = subprocess.run(
        [MXNET, mxnet_members.__file__], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == mxnet_members.MEMBERS


def test_the_launching_table_has_mxnets_variables():
    cells = " ".join(next(iter(row.values())) for row in TABLES[LAUNCHING][0])
    found = re.findall(r"\b(?:DMLC|PS|MXNET)_[A-Z0-9_]+", cells)
    assert sorted(found) == sorted(mxnet_members.VARIABLES)


@pytest.mark.skipif(not MXNET.exists(), reason="needs MXNet: make bench-peers")
def test_the_variables_are_mxnets():
    (library,) = MXNET.parents[1].glob("lib/python*/site-packages/mxnet/libmxnet.so")
    pattern = rb"\b(?:DMLC_PS_|DMLC_NUM_|PS_|MXNET_KVSTORE_)[A-Z0-9_]{3,}(?=\0)"
    found = {name.decode() for name in re.findall(pattern, library.read_bytes())}
    beside = {"DMLC_PS_WATER_MARK"}  # an option of DMLC_PS_VAN_TYPE's
    assert found - beside <= {*mxnet_members.VARIABLES}
    options = (library.parent / "tools" / "launch.py").read_text()
    cells = " ".join(next(iter(row.values())) for row in TABLES[LAUNCHING][0])
    named = re.findall(r"add_argument\('(--?[a-z-]+)'", options)
    assert len(named) > 6
    assert {*named} <= {*re.findall(r"(?<![\w-])--?[A-Za-z0-9-]+", cells)} | {"-n"}


# --- torchkv's ------------------------------------------------------------------


def owners():
    kv = torchkv.create()
    kv.set_optimizer("sgd")
    model = torch.nn.Linear(2, 1)
    return {
        "kv": kv,
        "trainer": torchkv.Trainer(model, "sgd"),
        "replicas": torchkv.replicate(torch.nn.Linear(2, 1), ["cpu"]),
        "p": model.weight,
        "model": model,
        "scheduler": torchkv.lr_scheduler.FactorScheduler(1),
        "torchkv": torchkv,
        "torch": torch,
        "os": os,
    }


OWNERS = owners()
ROWS = [
    (code_in(next(iter(row.values()))), code_in([*row.values()][1]))
    for heading, (rows,) in TABLES.items()
    if heading not in (LAUNCHING, "Optimizers")
    for row in rows
]


def found_at(name):
    owner, *path = name.split(".")
    found = OWNERS[owner]
    for part in path:
        found = getattr(found, part)
    return found


def test_the_names_are_torchkvs():
    names = [
        name.partition("(")[0] for _, codes in ROWS for name in codes if "." in name
    ]
    assert len(names) > 70
    for name in names:
        found_at(name)
    beside = {name for _, codes in ROWS for name in codes if "." not in name}
    for name in beside:
        assert hasattr(torchkv.lr_scheduler, name), name


def parameters_of(code):
    """Those that the page gives in parentheses, or None."""
    found = re.search(r"\((.*)\)$", code)
    return None if found is None else re.findall(r"\w+", found[1])


def name_before(code):
    return code.partition("(")[0]


def are_compared(mxnet, ours):
    """Methods of one name, or where the page has parameters of both."""
    last = [name_before(code).split(".")[-1] for code in (mxnet, ours)]
    return (
        "..." not in ours
        and parameters_of(mxnet) is not None
        and (last[0] == last[1] or parameters_of(ours) is not None)
        and callable(found_at(name_before(ours)))
    )


CALLS = [
    (mxnet, ours)
    for theirs, codes in ROWS
    for mxnet, ours in zip(theirs, codes, strict=False)
    if are_compared(mxnet, ours)
]


@pytest.mark.parametrize(("mxnet", "ours"), CALLS)
def test_parameters_have_the_same_order(mxnet, ours):
    """And the same names, if the page has no others in torchkv's column."""
    expected = parameters_of(ours) or parameters_of(mxnet)
    parameters = inspect.signature(found_at(name_before(ours))).parameters.values()
    taken = [p for p in parameters if p.kind is not p.VAR_KEYWORD][: len(expected)]
    assert len(taken) == len(expected) == len(parameters_of(mxnet))
    for parameter, name in zip(taken, expected, strict=True):
        assert parameter.name == name or parameter.kind is parameter.POSITIONAL_ONLY


def test_the_methods_with_parameters_are_found():
    """Else the test above would compare nothing."""
    assert len(CALLS) > 20
    assert ("kv.push(key, value, priority)", "kv.push") in CALLS
    assert ("mx.kv.create(name)", "torchkv.create(type)") in CALLS
