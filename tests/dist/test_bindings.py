"""TorchScript and Python hold one store of several processes."""

import torch

import ranks
import torchkv


@torch.jit.script
def push_and_pull(type: str, rank: int):
    kv = torch.classes.torchkv.KVStore(type)
    kv.init("w", torch.zeros(3))
    kv.push("w", torch.ones(3) * (rank + 1))
    out = torch.zeros(3)
    kv.pull("w", out)
    kv.barrier()
    return kv, out


def script(rank):
    kv, out = push_and_pull("dist_sync", rank)
    same = torchkv.KVStore.from_script_object(kv)
    same.push("w", torch.ones(3))
    value = same.pull("w")
    same.barrier()
    same.close()
    return out.tolist(), value.tolist(), same.type, same.rank, same.num_workers


def test_torchscript_creates_and_uses_a_store():
    assert ranks.run(script, 2) == [
        ([3.0] * 3, [2.0] * 3, "dist_sync", rank, 2) for rank in range(2)
    ]


class Model(torch.nn.Module):
    def __init__(self, kv):
        super().__init__()
        self.kv = kv

    def forward(self, x):
        self.kv.push("w", x)
        return self.kv.pull("w")


def module(rank):
    kv = torchkv.create("dist_sync")
    kv.init("w", torch.zeros(3))
    scripted = torch.jit.script(Model(kv))
    value = scripted(torch.full((3,), float(rank)))
    kv.barrier()
    kv.close()
    return value.tolist()


def test_a_scripted_module_holds_a_store():
    assert ranks.run(module, 3) == [[3.0] * 3] * 3


def process_group(rank):
    torch.distributed.init_process_group("gloo")
    kv = torchkv.create("dist_sync")
    kv.init("w", torch.zeros(3))
    kv.push("w", torch.ones(3))
    value = kv.pull("w")
    kv.barrier()
    kv.close()
    torch.distributed.destroy_process_group()
    return kv.rank, kv.num_workers, value.tolist()


def test_the_default_process_groups_store_is_the_rendezvous():
    assert ranks.run(process_group, 2) == [(rank, 2, [2.0] * 3) for rank in range(2)]


def process_group_in_two_bindings(rank, port):
    """Of another group than the environment's."""
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=1 - rank, world_size=2
    )
    if rank == 0:
        kv = torchkv.create("dist_sync", timeout=20)
        kv.init("w", torch.zeros(3))
        kv.push("w", torch.ones(3))
        value = kv.pull("w")
        kv.barrier()
    else:
        kv, value = push_and_pull("dist_sync", 0)
        kv = torchkv.KVStore.from_script_object(kv)
    result = kv.rank, value.tolist()
    kv.close()
    torch.distributed.destroy_process_group()
    return result


def test_all_bindings_find_the_default_process_group():
    host = torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    results = ranks.run(process_group_in_two_bindings, 2, host.port)
    assert results == [(1, [2.0] * 3), (0, [2.0] * 3)]


def own_store(rank, port):
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    kv = torchkv.create("dist_sync", rank=1 - rank, world_size=2, store=store)
    kv.init("w", torch.full((3,), float(rank)))
    value = kv.pull("w")
    kv.barrier()
    kv.close()
    return kv.rank, value.tolist()


def test_rank_world_size_and_store_are_given():
    host = torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    assert ranks.run(own_store, 2, host.port) == [(1, [1.0] * 3), (0, [1.0] * 3)]
