"""How much heap memory a push and a pull allocate: the table in docs/architecture.md.

TORCHKV_ALLOCATIONS is the program torchkv_allocations, which `make test` builds.
"""

import pytest

import programs
import ranks

# Of a step: at most how many allocations for each key, and how many blocks of 64 KiB or
# more in all. No value is in one: in shared memory, these are lists with an item for
# each key of a call; over sockets, also the messages that come, of up to 1 MiB.
SHARED = {"small": (0.5, 4), "medium": (30, 16), "large": (130, 1)}
SOCKETS = {"small": (0.5, 8), "medium": (40, 16), "large": (300, 36)}


@pytest.fixture(scope="module")
def program():
    return programs.path_of("TORCHKV_ALLOCATIONS")


def counts(rank, program, environment):
    """By the values and the way to push and pull them."""
    result = programs.run_as_rank(program, OMP_NUM_THREADS="1", **environment)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    return {(size, way): (float(a), float(b)) for size, way, a, b in lines}


@pytest.mark.parametrize(
    ("environment", "limits"),
    [({}, SHARED), ({"TORCHKV_SHARED_MEMORY": "0"}, SOCKETS)],
    ids=["shared memory", "sockets"],
)
def test_calls_allocate_little(program, environment, limits):
    for measured in ranks.run(counts, 2, program, environment):
        assert len(measured) == 2 * len(limits)
        for (size, way), (per_key, large) in measured.items():
            most_per_key, most_large = limits[size]
            assert 0 < per_key <= most_per_key, (size, way)
            assert large <= most_large, (size, way)
