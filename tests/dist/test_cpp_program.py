"""A C++ program without Python is a rank of a job, also beside ranks in Python.

TORCHKV_JOB_RANK is the program torchkv_job_rank, which `make test` builds.
"""

import pytest
import torch

import programs
import ranks
import torchkv

STEPS = 3
SIZES = {"w": (2, 3), "sharded": (100_000,)}


@pytest.fixture(scope="module")
def program():
    return programs.path_of("TORCHKV_JOB_RANK")


def run_program(rank, program, *arguments):
    """As the rank that this process would be."""
    result = programs.run_as_rank(program, *arguments)
    return result.returncode, result.stdout, result.stderr


def only(value):
    (number,) = value.unique().tolist()
    return number


def run_python(rank, type):
    """What the program does."""
    kv = torchkv.create(type)
    keys, sizes = list(SIZES), SIZES.values()
    kv.init(keys, [torch.full(size, 100.0 * rank) for size in sizes])
    kv.set_optimizer(torchkv.optim.SGD(lr=1.0))
    kv.barrier()
    for step in range(STEPS):
        kv.push(keys, [torch.full(size, float(step + rank)) for size in sizes])
    kv.barrier()
    w, sharded = (only(value) for value in kv.pull(keys))
    return 0, said(kv.rank, kv.num_workers, w, sharded, kv.version("w")), ""


def said(rank, num_ranks, w, sharded, version):
    return (
        f"rank {rank} of {num_ranks}, 0 lost: w {w:g}, sharded {sharded:g}, "
        f"{version} updates\n"
    )


def run_either(rank, program, type, in_python):
    if rank in in_python:
        return run_python(rank, type)
    return run_program(rank, program, type)


@pytest.mark.parametrize("type", ["dist_sync", "dist_async"])
@pytest.mark.parametrize(
    "num_ranks, in_python", [(2, []), (2, [0]), (2, [1]), (3, [1])]
)
def test_a_program_without_python_is_a_rank(program, type, num_ranks, in_python):
    results = ranks.run(run_either, num_ranks, program, type, in_python)
    total = -sum(step + rank for step in range(STEPS) for rank in range(num_ranks))
    version = STEPS * (1 if type == "dist_sync" else num_ranks)
    assert results == [
        (0, said(rank, num_ranks, total, total, version), "")
        for rank in range(num_ranks)
    ]


class Program(torch.nn.Module):
    """What the program does, but for the errors' texts: a script makes the store."""

    def forward(self, type: str) -> str:
        kv = torch.classes.torchkv.KVStore(type)
        kv.init("w", torch.full((2, 3), 100.0 * kv.rank()))
        kv.init("sharded", torch.full((100_000,), 100.0 * kv.rank()))
        kv.set_optimizer("sgd", {"lr": 1.0})
        kv.barrier()
        w, sharded = torch.zeros(2, 3), torch.zeros(100_000)
        for step in range(3):
            gradient = float(step + kv.rank())
            kv.push("w", torch.full((2, 3), gradient))
            kv.push("sharded", torch.full((100_000,), gradient))
        kv.barrier()
        kv.pull("w", w)
        kv.pull("sharded", sharded)
        kv.barrier()
        values = f"w {int(w.sum()) // 6}, sharded {int(sharded.sum()) // 100_000}"
        return f"rank {kv.rank()} of {kv.num_workers()}: {values}"


@pytest.mark.parametrize("type", ["dist_sync", "dist_async"])
def test_torchscript_is_a_rank_without_python(program, tmp_path, type):
    module = str(tmp_path / "program.pt")
    torch.jit.script(Program()).save(module)
    results = ranks.run(run_program, 2, program, type, module)
    total = -sum(step + rank for step in range(STEPS) for rank in range(2))
    assert results == [
        (0, f"rank {rank} of 2: w {total}, sharded {total}\n", "") for rank in range(2)
    ]


def test_its_errors_are_those_of_python(program):
    ((status, _, text),) = ranks.run(
        run_program, 1, program, "dist_sync", environment={"RANK": ""}
    )
    assert status == 1
    assert "create: expected the environment variable RANK" in text
