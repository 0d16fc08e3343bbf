"""Store types: names, aliases, exact matching, and errors for the others."""

import pytest
import torch

import torchkv
from helpers import assert_same, full, stored

CANONICAL = {
    "local": "local",
    "local_update_cpu": "local",
    "local_allreduce_cpu": "local",
    "device": "device",
    "local_allreduce_device": "device",
}
DISTRIBUTED = ["dist", "dist_sync", "dist_async"]
SUGGESTIONS = {
    "LOCAL": "local",
    "Device": "device",
    "locl": "local",
    "devcie": "device",
    "local_update_cpus": "local_update_cpu",
    "dist-sync": "dist_sync",
    "NCCL": "nccl",
}


@pytest.mark.parametrize("name", CANONICAL)
def test_type_is_canonical(name):
    store = torchkv.create(name)
    assert store.type == CANONICAL[name]
    store.init(3, full(2))
    store.push(3, [full(1)] * 4)
    assert_same(stored(store, 3), full(4))


def test_default_type_is_local():
    assert torchkv.create().type == "local"
    assert torchkv.create(type="device").type == "device"
    assert isinstance(torchkv.create(), torchkv.KVStore)


@pytest.mark.parametrize("create", [torchkv.create, torch.classes.torchkv.KVStore])
def test_dist_device_sync_is_not_implemented(create):
    with pytest.raises(NotImplementedError, match="dist_device_sync"):
        create("dist_device_sync")


@pytest.mark.parametrize("create", [torchkv.create, torch.classes.torchkv.KVStore])
@pytest.mark.parametrize("name", DISTRIBUTED)
def test_distributed_types_need_a_launcher(name, create, monkeypatch):
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(RuntimeError, match="RANK, which torchrun sets"):
        create(name)


def test_options_are_for_stores_on_several_machines():
    for name in ("local", "device"):
        with pytest.raises(ValueError, match=f"unexpected options .* '{name}'"):
            torchkv.create(name, timeout=3)
    with pytest.raises(ValueError, match="unknown option 'heartbeats'.*did you mean"):
        torchkv.create("dist_sync", heartbeats=3)
    with pytest.raises(TypeError, match="expected an int as rank"):
        torchkv.create("dist_sync", rank="0")
    with pytest.raises(ValueError, match="positive number of seconds as timeout"):
        torchkv.create("dist_sync", timeout=0)
    with pytest.raises(ValueError, match="a rank from 0 to world_size - 1"):
        torchkv.create("dist_sync", rank=2, world_size=2)


@pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch has NCCL")
def test_nccl_needs_a_pytorch_with_nccl():
    for create in (torchkv.create, torch.classes.torchkv.KVStore):
        with pytest.raises(
            RuntimeError, match="^create: .* requires NCCL, .* not loaded"
        ):
            create("nccl")


@pytest.mark.skipif(torch.version.cuda is None, reason="PyTorch has no NCCL")
def test_nccl_takes_values_of_the_cpu_too():
    with torchkv.create("nccl") as store:
        assert store.type == "nccl"
        store.init(3, full(2))
        store.push(3, [full(1)] * 4)
        assert_same(stored(store, 3), full(4))


@pytest.mark.parametrize(
    "name",
    ["", "loca", "my_local", "local_", " local", "device2", "local\n", "localdevice"],
)
def test_matching_is_exact_and_the_error_lists_the_valid_types(name):
    with pytest.raises(ValueError) as error:
        torchkv.create(name)
    for valid in ["local", "device", "nccl", *DISTRIBUTED]:
        assert valid in str(error.value)
    assert "dist_device_sync" not in str(error.value), "it cannot be created yet"


@pytest.mark.parametrize("name", SUGGESTIONS)
def test_a_similar_type_is_suggested(name):
    with pytest.raises(ValueError, match=f"did you mean '{SUGGESTIONS[name]}'"):
        torchkv.create(name)
    with pytest.raises(ValueError, match=f"did you mean '{SUGGESTIONS[name]}'"):
        torch.classes.torchkv.KVStore(name)


@pytest.mark.parametrize("name", [None, 3, b"local", ["local"]])
def test_type_is_a_str(name):
    with pytest.raises(TypeError):
        torchkv.create(name)


def test_one_machine_is_one_worker(kv):
    assert kv.rank == 0
    assert kv.num_workers == 1
    assert kv.num_dead_node() == 0
    assert kv.barrier() is None
    assert kv._barrier() is None


def test_is_capable(kv):
    assert kv.is_capable("optimizer") is True
    with pytest.raises(ValueError, match="optimizer"):
        kv.is_capable("optimiser")
