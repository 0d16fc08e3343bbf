"""What the table "Launching" of from_mxnet.md says, row by row."""

import json
import os
import re
import signal
import time

import pytest
import torch

import ranks
import torchkv
from commands import environment_in, shell
from pages import ROOT, needs_sources
from tables import RowTests, code_in, rows_below

row = RowTests("Launching")
ROWS = rows_below("from_mxnet.md", "Launching")
SECRET = "0123456789abcdef0123456789abcdef"

# --- A job of one host ----------------------------------------------------------

NUM_RANKS = 4
PROGRAM = """
import json
import os
import torch
import torchkv

kv = torchkv.create("dist_sync")
updated = []
kv.set_updater(lambda key, input, stored: (updated.append(key), stored.add_(input)))
keys = [f"w{i}" for i in range(64)]
kv.init(keys, [torch.zeros(2)] * len(keys))
for key in keys:
    kv.push(key, torch.ones(2), priority=int(key[1:]))
sums = [value.tolist() for value in kv.pull(keys)]
kv.barrier()
launcher = os.getppid()
report = {
    "type": kv.type,
    "rank": kv.rank,
    "num_workers": kv.num_workers,
    "updated": updated,
    "sums": sums,
    "siblings": open(f"/proc/{launcher}/task/{launcher}/children").read().split(),
    "environment": dict(os.environ),
}
for name, size, whole in (
    ("below", 64 * 1024 // 4 - 1, False),
    ("large", 64 * 1024 // 4, False),
    ("whole", 64 * 1024 // 4, True),
):
    with torchkv.create("dist_sync") as other:
        other.init(name, torch.zeros(size), whole=whole)
        try:
            other.set_updater(lambda key, input, stored: None)
            report[name] = None
        except ValueError as error:
            report[name] = str(error)
kv.close()
json.dump(report, open(f"report{kv.rank}", "w"))
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What each rank of the command in the table says."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.py").write_text(PROGRAM)
    (command,) = code_in(ROWS[0]["torchkv"])
    assert command == f"torchrun --nproc-per-node {NUM_RANKS} train.py"
    environment = {**environment_in(folder), "PASSED_ON": "yes"}
    process = shell(command, folder, environment)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    paths = [folder / f"report{rank}" for rank in range(NUM_RANKS)]
    return [json.loads(path.read_text()) for path in paths]


@row(
    "`python tools/launch.py -n 4 --launcher local python train.py`",
    "`-s 2`, `DMLC_NUM_SERVER`",
    '`kv.create("dist_sync")` under `launch.py`',
)
def test_each_rank_is_a_server_and_there_are_no_other_processes(reports):
    for rank, report in enumerate(reports):
        assert report["type"] == "dist_sync"
        assert (report["rank"], report["num_workers"]) == (rank, NUM_RANKS)
        assert len(report["siblings"]) == NUM_RANKS
        assert report["updated"]  # the keys that this rank serves
    served = [key for report in reports for key in report["updated"]]
    assert sorted(served) == sorted(f"w{i}" for i in range(64))


@row(
    "`DMLC_PS_ROOT_URI`, `DMLC_PS_ROOT_PORT`",
    "`DMLC_NUM_WORKER`, `DMLC_ROLE`",
    "`--sync-dst-dir`, `--env`, `--env-server`, `--env-worker`",
)
def test_torchrun_sets_the_variables(reports):
    for rank, report in enumerate(reports):
        environment = report["environment"]
        assert environment["WORLD_SIZE"] == str(NUM_RANKS)
        assert environment["RANK"] == str(rank)
        assert environment["MASTER_ADDR"] and int(environment["MASTER_PORT"])
        assert environment["PASSED_ON"] == "yes"


@row("`--p3`, `DMLC_PS_VAN_TYPE`")
def test_priorities_do_not_change_results(reports):
    """That larger ones leave first is tested in tests/cpp/dist."""
    for report in reports:
        assert report["sums"] == [[NUM_RANKS] * 2] * 64


@row("`MXNET_KVSTORE_BIGARRAY_BOUND`, `MXNET_KVSTORE_SLICE_THRESHOLD`")
def test_large_values_are_divided_unless_they_are_whole(reports):
    for report in reports:
        assert report["below"] is report["whole"] is None
        assert "whole=True" in report["large"]


# --- Jobs of several hosts ------------------------------------------------------


def push_ones(rank):
    try:
        kv = torchkv.create("dist_sync", timeout=20)
    except Exception as error:
        return str(error)
    with kv:
        kv.init("w", torch.zeros(2))
        kv.push("w", torch.ones(2))
        return kv.pull("w").tolist()


@row("`python tools/launch.py -n 4 -H hosts --launcher ssh python train.py`")
@pytest.mark.parametrize("secret", [None, SECRET])
def test_hosts_need_a_secret(hosts, secret):
    environment = {"TORCHKV_JOB_SECRET": secret or ""}
    results = ranks.run(push_ones, 2, hosts=hosts, environment=environment)
    for result in results:
        if secret is None:
            assert "TORCHKV_JOB_SECRET" in result
        else:
            assert result == [2, 2]


@row("`DMLC_INTERFACE`")
@pytest.mark.parametrize("by", ["name", "address", "unknown"])
def test_interfaces(hosts, by):
    environments = {
        rank: {
            "TORCHKV_JOB_SECRET": SECRET,
            "TORCHKV_INTERFACE": {
                "name": "eth0",
                "address": hosts.address(rank),
                "unknown": "eth7",
            }[by],
        }
        for rank in range(2)
    }
    results = ranks.run(push_ones, 2, hosts=hosts, environments=environments)
    for result in results:
        if by == "unknown":
            assert "TORCHKV_INTERFACE" in result
        else:
            assert result == [2, 2]


# --- Other rows -----------------------------------------------------------------

HEARTBEAT_S = 0.25


def stop_or_watch(rank):
    """How long rank 0 takes to notice that rank 1 is silent."""
    kv = torchkv.create("dist_sync", heartbeat=HEARTBEAT_S, timeout=30)
    kv.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    start = time.monotonic()
    while kv.num_dead_node() == 0 and time.monotonic() < start + 20:
        time.sleep(0.01)
    return kv.num_dead_node(), time.monotonic() - start


@row("`PS_HEARTBEAT_INTERVAL`, `PS_HEARTBEAT_TIMEOUT`")
def test_a_rank_is_lost_after_four_heartbeats():
    with ranks.Ranks(stop_or_watch, 2) as job:
        job.collect(ranks=[0])
        succeeded, result = job.results[0]
    assert succeeded, result
    num_lost, elapsed = result
    assert num_lost == 1
    assert 2 * HEARTBEAT_S < elapsed < 10


@row("`MXNET_UPDATE_ON_KVSTORE`")
@pytest.mark.parametrize("on_store", [True, False])
def test_update_on_kvstore_is_an_argument(monkeypatch, on_store):
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", str(int(not on_store)))
    model = torch.nn.Linear(2, 1)
    trainer = torchkv.Trainer(model, "sgd", update_on_kvstore=on_store)
    assert (trainer.kvstore.optimizer is not None) == on_store


WITHOUT = next(r["MXNet"] for r in ROWS if r["differences"] == "no counterparts")


@row(WITHOUT)
@needs_sources
def test_the_sources_read_no_variables_of_mxnets():
    sources = [*ROOT.glob("csrc/**/*.[hc]*"), *ROOT.glob("torchkv/**/*.py")]
    assert len(sources) > 200
    names = re.compile(r"\b(PS_[A-Z_]+|DMLC_[A-Z_]+|MXNET_[A-Z0-9_]+)\b")
    assert len(code_in(WITHOUT)) > 5
    assert all(names.fullmatch(name) for name in code_in(WITHOUT))
    for path in sources:
        assert not names.search(path.read_text()), path


def test_every_row_has_a_test():
    row.check()
