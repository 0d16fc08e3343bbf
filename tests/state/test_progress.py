"""Progress bars of save and load."""

import sys

import pytest
import torch

import torchkv


@pytest.fixture
def store():
    with torchkv.create() as kv:
        kv.init(["a", "b"], [torch.zeros(1 << 20), torch.zeros(3)])
        kv.set_optimizer("adam")
        kv.push("a", torch.ones(1 << 20))
        yield kv


def test_save_and_load_show_a_bar(store, tmp_path, capfd):
    store.save(tmp_path / "s", progress=True)
    shown = capfd.readouterr().err
    assert "save: 100%" in shown
    assert "12.0M/12.0M" in shown  # the value and two states
    torchkv.load(tmp_path / "s", progress=True)
    assert "load: 100%" in capfd.readouterr().err
    store.load(tmp_path / "s", progress=True)
    assert "load: 100%" in capfd.readouterr().err


def test_nothing_is_shown_by_default(store, tmp_path, capfd):
    store.save(tmp_path / "s")
    torchkv.load(tmp_path / "s")
    assert capfd.readouterr().err == ""


def test_without_tqdm_the_error_comes_first(store, tmp_path, monkeypatch):
    store.save(tmp_path / "s")
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match=r"^save: expected tqdm for progress=True"):
        store.save(tmp_path / "new", progress=True)
    assert not (tmp_path / "new").exists()
    with pytest.raises(ImportError, match=r"^load: expected tqdm for progress=True"):
        torchkv.load(tmp_path / "s", progress=True)
