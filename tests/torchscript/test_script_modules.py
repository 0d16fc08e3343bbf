"""Scripted code with a Python KVStore as attribute or argument: the same store."""

import copy
import gc
import io
from pathlib import Path

import pytest
import torch
from torch import nn

import torchkv
from helpers import (
    add_input,
    assert_same,
    full,
    jit_save_load,
    run_program,
    script,
    stored,
)


class Holder(nn.Module):
    """Has the store itself as an attribute, not its ``script_object``."""

    def __init__(self, kv):
        super().__init__()
        self.kv = kv

    def forward(self, x: torch.Tensor):
        self.kv.push(3, x)
        pulled = self.kv.pull(3)
        assert isinstance(pulled, torch.Tensor)
        return x + pulled


class Annotated(nn.Module):
    kv: torchkv.KVStore

    def __init__(self, kv):
        super().__init__()
        self.kv = kv

    def forward(self, x: torch.Tensor):
        self.kv.push(3, x)
        return len(self.kv)


class Several(nn.Module):
    def __init__(self, stores):
        super().__init__()
        self.stores = stores

    def forward(self, x: torch.Tensor):
        for kv in self.stores:
            kv.push(3, x)
        return x


def pushed(kv: torchkv.KVStore, x: torch.Tensor):
    kv.push(3, x)
    return str(kv)


@pytest.fixture
def store(kv):
    kv.init(3, full(0))
    return kv


def test_a_module_runs_the_same_in_python_and_scripted(store):
    module = Holder(store)
    scripted = script(module)
    assert_same(module(full(1)), full(2))
    assert_same(scripted(full(3)), full(6))
    assert_same(stored(store, 3), full(3))
    store.set_updater(add_input)
    scripted(full(4))
    assert_same(stored(store, 3), full(7), "the Python updater runs")
    again = torchkv.KVStore.from_script_object(scripted.kv)
    assert again._impl is store._impl


def test_the_module_keeps_the_store_alive(store_type):
    kv = torchkv.create(store_type)
    kv.init(3, full(0))
    scripted = script(Holder(kv))
    del kv
    gc.collect()
    assert_same(scripted(full(3)), full(6))


def test_annotations_lists_and_arguments(store):
    assert script(Annotated(store))(full(1)) == 1
    assert_same(stored(store, 3), full(1))
    other = torchkv.create()
    other.init(3, full(0))
    script(Several([store, other]))(full(2))
    assert_same(stored(store, 3), full(2))
    assert_same(stored(other, 3), full(2))
    function = script(pushed)
    assert function(store, full(5)) == repr(store)
    assert_same(stored(store, 3), full(5))
    function(store.script_object, full(6))
    assert_same(stored(store, 3), full(6))
    with pytest.raises(RuntimeError, match="KVStore.*but instead found type 'int'"):
        function(3, full(1))


def test_a_module_with_a_store_is_saved_and_copied(store):
    scripted = script(Holder(store))
    scripted(full(3))
    for copied in (jit_save_load(scripted), copy.deepcopy(scripted)):
        assert_same(copied.kv.pull(3), full(3))
        copied(full(4))
    assert_same(stored(store, 3), full(3))


def test_a_closed_store_refuses_every_call(store):
    scripted = script(Holder(store))
    store.close()
    with pytest.raises(RuntimeError, match="push: expected an open store"):
        scripted(full(1))


def test_str_in_torchscript(store):
    class Told(nn.Module):
        def __init__(self, kv):
            super().__init__()
            self.kv = kv

        def forward(self):
            return str(self.kv)

    assert script(Told(store))() == repr(store)
    work = store.script_object.push(3, full(1), 0, True)
    assert str(work) == "Work(is_completed=True)"


LOADS = """
import sys, torch
if sys.argv[2] == "with":
    import torchkv
torch.jit.load(sys.argv[1])
"""


def test_an_archive_is_loaded_after_import_torchkv(store, tmp_path):
    """The page for TorchScript quotes PyTorch's message for a missing import."""
    program = tmp_path / "loads.py"
    program.write_text(LOADS)
    archive = tmp_path / "archive.pt"
    archive.write_bytes(saved(script(Holder(store))))
    unknown = "Unknown type name '__torch__.torch.classes.torchkv.KVStore'"
    assert unknown in run_program(program, str(archive), "without").stderr
    assert run_program(program, str(archive), "with").returncode == 0
    page = Path(__file__).parents[2] / "docs" / "cpp.md"
    assert unknown in " ".join(page.read_text().split())


def saved(module):
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    return buffer.getvalue()


class Sub(torchkv.KVStore):
    """A class of a program's own."""


class HoldsSub(nn.Module):
    def __init__(self):
        super().__init__()
        self.kv = Sub()

    def forward(self, x: torch.Tensor):
        self.kv.push(3, x)
        return self.kv.pull(3)


def test_a_subclass_is_a_store_in_torchscript():
    module = HoldsSub()
    module.kv.init(3, full(0))
    scripted = script(module)
    assert_same(scripted(full(4)), full(4))
    assert_same(module.kv.pull(3), full(4))


def make_store():
    return torchkv.create("local")


def test_a_scripted_create_names_the_class():
    """PyTorch's message, which shows the line that says how."""
    with pytest.raises(torch.jit.frontend.FrontendError) as caught:
        script(make_store)
    message = str(caught.value)
    assert "INTERNAL ASSERT" not in message
    assert "in TorchScript: torch.classes.torchkv.KVStore(type)" in message
