"""How ranks find each other: torchrun's TCPStore, or one that rank 0 hosts."""

import os

import torch

import ranks
import torchkv
from helpers import free_port


def train(rank):
    kv = torchkv.create("dist_sync", timeout=20)
    kv.init("w", torch.zeros(3))
    kv.push("w", torch.ones(3))
    value = kv.pull("w").tolist()
    kv.barrier()
    kv.close()
    return value


def end_without_closing(rank, folder):
    """As when torchrun ends a job to restart it."""
    kv = torchkv.create("dist_sync", timeout=20)
    kv.init("w", torch.full((3,), 7.0))
    kv.push("w", torch.ones(3))
    ranks.meet(folder, "end", rank, 2)
    os._exit(1)


def test_a_restarted_job_reads_nothing_of_the_first_start(tmp_path):
    """Both starts have one TCPStore, which keeps what the first has written."""
    with ranks.Ranks(end_without_closing, 2, str(tmp_path)) as first:
        first.collect()
        port = {"MASTER_PORT": str(first.store.port)}
        assert ranks.run(train, 2, environment=port, restart=1) == [[2.0] * 3] * 2
        assert ranks.run(train, 2, environment=port, restart=2) == [[2.0] * 3] * 2


def test_rank_0_hosts_the_store_where_no_agent_does():
    environment = {
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_USE_AGENT_STORE": "",
        "TORCHELASTIC_RUN_ID": "",
        "TORCHELASTIC_RESTART_COUNT": "",
    }
    assert ranks.run(train, 3, environment=environment) == [[3.0] * 3] * 3


def train_beside_a_process_group(rank):
    value = train(rank)
    # Of the environment too: both host a store, on one port.
    torch.distributed.init_process_group("gloo")
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    torch.distributed.destroy_process_group()
    return value, total.item()


def test_the_hosted_store_serves_a_later_process_group():
    environment = {
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_USE_AGENT_STORE": "",
    }
    expected = [([2.0] * 3, 2.0)] * 2
    assert ranks.run(train_beside_a_process_group, 2, environment=environment) == (
        expected
    )
