"""Residuals and the compression itself in every saved form, resumed bit by bit."""

import copy
import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchkv
from compression_model import ALL
from helpers import assert_same, bits, full, jit_save_load, script, snapshot
from saved_stores import rewritten
from torchkv.compression import FP8, Int4, TopK, TwoBit

GROUPS = [TwoBit(0.5), {"keys": ["v"], "type": FP8()}, {"keys": ["u"], "type": "none"}]


def trained(compression, dtype=torch.float32):
    kv = torchkv.create("device")
    kv.init(["w", "v", "u"], [torch.zeros(5, 7, dtype=dtype)] * 3)
    kv.set_optimizer("sgd", learning_rate=0.125, momentum=0.5)
    kv.set_gradient_compression(compression)
    go_on(kv, 1)
    return kv


def go_on(kv, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        values = [
            [torch.randn(5, 7, generator=generator) for _ in range(2)] for _ in range(3)
        ]
        kv.push(["w", "v", "u"], values)


def saved_and_loaded(kv, path):
    kv.save(path)
    return torchkv.load(path)


def by_state_dict(kv, path):
    other = torchkv.create("device")
    torch.save(kv.state_dict(), path)
    other.load_state_dict(torch.load(path, weights_only=True))
    return other


def by_torchscript(kv, path):
    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.kv = kv.script_object

        def forward(self):
            return len(self.kv)

    module = jit_save_load(script(Holder()))
    return torchkv.KVStore.from_script_object(module.kv)


WAYS = {
    "folder": saved_and_loaded,
    "state_dict": by_state_dict,
    "deepcopy": lambda kv, path: copy.deepcopy(kv),
    "pickle": lambda kv, path: pickle.loads(pickle.dumps(kv)),
    "TorchScript": by_torchscript,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("compression", [*ALL, GROUPS], ids=str)
def test_training_continues_with_the_same_bits(way, compression, tmp_path):
    kv = trained(compression)
    other = way(kv, tmp_path / "store")
    assert other.gradient_compression == kv.gradient_compression
    assert snapshot(other) == snapshot(kv)
    for store in (kv, other):
        go_on(store, 2)
    assert snapshot(other) == snapshot(kv)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str
)
def test_dtypes(dtype, tmp_path):
    kv = trained(TwoBit(), dtype)
    other = saved_and_loaded(kv, tmp_path / "store")
    for store in (kv, other):
        go_on(store, 2)
    assert snapshot(other) == snapshot(kv)


def test_a_copy_shares_no_residuals():
    kv = trained(TwoBit())
    before = kv.state_dict()["keys"]["w"]["residuals"]
    kept = [bits(residual) for residual in before]
    other = copy.deepcopy(kv)
    go_on(kv, 2)
    assert [bits(residual) for residual in before] == kept
    for actual, expected in zip(
        other.state_dict()["keys"]["w"]["residuals"], before, strict=True
    ):
        assert_same(actual, expected)


def test_loading_replaces_compression_and_residuals(tmp_path):
    kv, plain = trained(TwoBit()), trained(None)
    plain.save(tmp_path / "plain")
    kv.load(tmp_path / "plain")
    assert kv.gradient_compression is None
    for store in (kv, plain):
        go_on(store, 2)
    assert snapshot(kv) == snapshot(plain)


@pytest.mark.parametrize("places", ["", "cpu,cpu,cpu"])
def test_residuals_are_independent_of_places(places, monkeypatch, tmp_path):
    for codec in (TwoBit(), FP8(), Int4(), TopK(k=3)):
        kv = trained(codec)
        kv.save(tmp_path / codec.type)
        go_on(kv, 2)
        monkeypatch.setenv("TORCHKV_PLACES", places)
        other = torchkv.load(tmp_path / codec.type)
        go_on(other, 2)
        assert snapshot(other) == snapshot(kv)
        monkeypatch.delenv("TORCHKV_PLACES")


def test_a_store_of_type_local_loads_no_compressed_one(tmp_path):
    kv = trained(TwoBit())
    kv.save(tmp_path)
    with pytest.raises(ValueError, match="but got 'local'"):
        torchkv.load(tmp_path, type="local")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_torch_distributed_checkpoint(tmp_path):
    kv = trained(TwoBit())
    dcp.save({"kv": kv.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    other = trained(TwoBit(), torch.float32)
    state = {"kv": other.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(state["kv"])
    for store in (kv, other):
        go_on(store, 2)
    assert snapshot(other) == snapshot(kv)


def test_forms_without_compression(tmp_path):
    """A folder's is that of before; a state says that there is none."""
    kv = torchkv.create("device")
    kv.init("w", full(1))
    kv.save(tmp_path)

    manifest = json.loads((tmp_path / "manifest.json").read_text())
    state = kv.state_dict()
    assert "compression" not in manifest and "compressed" not in manifest
    assert state["compression"] is None
    assert "residuals" not in state["keys"]["w"]


# -- damaged


def changed(change):
    def damage(state):
        change(state)
        return state

    return damage


def set_item(state, name, value):
    state["keys"]["w"][name] = value


DAMAGES = {
    "no dict": lambda s: s.update(compression=3),
    "no groups": lambda s: s.update(compression={"groups": [], "keys": []}),
    "missing keys": lambda s: s["compression"].pop("keys"),
    "unknown codec": lambda s: s["compression"].update(groups=[{"type": "3bit"}]),
    "unknown option": lambda s: s["compression"].update(
        groups=[{"type": "2bit", "x": 1.0}]
    ),
    "no type": lambda s: s["compression"].update(groups=[{"threshold": 1.0}]),
    "a number as type": lambda s: s["compression"].update(groups=[{"type": 2.0}]),
    "wrong number": lambda s: s["compression"].update(
        groups=[{"type": "2bit", "threshold": -1.0}]
    ),
    "a group too many": lambda s: s["compression"].update(keys=[["w", 5]]),
    "a negative group": lambda s: s["compression"].update(keys=[["w", -1]]),
    "a key of the other kind": lambda s: s["compression"].update(keys=[[3, 0]]),
    "a repeated key": lambda s: s["compression"].update(keys=[["w", 0], ["w", 0]]),
    "another shape": lambda s: set_item(s, "residuals", [torch.zeros(3)]),
    "another dtype": lambda s: set_item(
        s, "residuals", [torch.zeros(5, 7, dtype=torch.float64)]
    ),
    "no tensor": lambda s: set_item(s, "residuals", [1]),
    "no list": lambda s: set_item(s, "residuals", torch.zeros(5, 7)),
    "a meta tensor": lambda s: set_item(s, "residuals", [torch.zeros(5, 7).to("meta")]),
    "a sparse tensor": lambda s: set_item(
        s, "residuals", [torch.zeros(5, 7).to_sparse(1)]
    ),
    "a negative count": lambda s: set_item(s, "num_compressed", -1),
    "no count": lambda s: set_item(s, "num_compressed", "1"),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_state_changes_nothing(damage):
    kv = trained(TwoBit())
    before = snapshot(kv)
    state = copy.deepcopy(kv.state_dict())
    damage(state)
    with pytest.raises((ValueError, TypeError, KeyError, NotImplementedError)):
        kv.load_state_dict(state)
    assert snapshot(kv) == before
    other = trained(TwoBit())
    for store in (kv, other):
        go_on(store, 2)
    assert snapshot(other) == snapshot(kv)


def test_a_folder_with_a_residual_too_many(tmp_path):
    kv = trained(TwoBit())
    kv.save(tmp_path)
    rewritten(tmp_path, lambda manifest: manifest.pop("compression") and None)
    with pytest.raises(ValueError, match="unexpected residuals"):
        torchkv.load(tmp_path)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_deleted_key_of_a_group(way, tmp_path):
    kv = trained(GROUPS)
    kv.delete("v")
    other = way(kv, tmp_path / "store")
    assert other.gradient_compression == kv.gradient_compression


def test_a_state_dict_without_compression_leaves_that_of_the_store():
    plain, kv = trained(None), trained(TwoBit())
    kv.load_state_dict(plain.state_dict())
    assert kv.gradient_compression == TwoBit()
    plain.set_gradient_compression(TwoBit())  # without residuals, as now kv
    for store in (kv, plain):
        go_on(store, 2)
    assert snapshot(kv) == snapshot(plain)


def test_some_keys_of_a_state_dict():
    kv, plain = trained(TwoBit()), trained(None)
    state = plain.state_dict()
    del state["keys"]["v"]
    residuals = kv.state_dict()["keys"]["v"]["residuals"]
    kv.load_state_dict(state, strict=False)
    kept = kv.state_dict()["keys"]["v"]["residuals"]
    assert [bits(x) for x in kept] == [bits(x) for x in residuals]
    assert kv.state_dict()["keys"]["w"]["residuals"] == []


def test_residuals_of_zeros_take_no_memory():
    kv = torchkv.create("device")
    kv.init("w", full(0))
    kv.set_gradient_compression(TwoBit())
    state = kv.state_dict()
    state["keys"]["w"]["residuals"] = [full(0)]
    kv.load_state_dict(state)
    assert kv.state_dict()["keys"]["w"]["residuals"] == []
