"""Values that both sides generate: small integers, so that every sum is exact.

A replica of a key repeats a short pattern. Eight replicas add up to at most 64, which
fp16 and bf16 hold exactly in any order of summation. Requires only Python: MXNet and
torch have separate environments.
"""

from __future__ import annotations

PERIOD = 17
# One of so many rows of a table, by each rank of a job.
ROWS_PUSHED = 50


def replica_pattern(key: int, replica: int) -> list[int]:
    """The values, from -8 to 8, that one replica of a key repeats."""
    return [(7 * i + 11 * replica + 5 * key) % PERIOD - 8 for i in range(PERIOD)]


def row_ids(rows: int, pushed: int, replica: int) -> list[int]:
    """Which rows a replica pushes: distinct, ascending, all over the table.

    The first replica's begin with row 0.
    """
    # Odd and no multiple of 5: of tables with a round number of rows, no row repeats.
    step = 79_190_001
    return sorted((i * step + replica * 13) % rows for i in range(pushed))


def sum_pattern(key: int, replicas: int) -> list[int]:
    """The values that the sum of a key's replicas repeats."""
    patterns = [replica_pattern(key, replica) for replica in range(replicas)]
    return [sum(column) for column in zip(*patterns)]  # noqa: B905 - Python 3.8


def sign_pattern(key: int, replicas: int) -> list[int]:
    """The sum of the signs of a key's replicas.

    2bit sends them times a threshold of at most 1, in every push: what is left of a
    number has its sign and grows, and a zero leaves nothing.
    """
    patterns = [replica_pattern(key, replica) for replica in range(replicas)]
    signs = [[(x > 0) - (x < 0) for x in pattern] for pattern in patterns]
    return [sum(column) for column in zip(*signs)]  # noqa: B905 - Python 3.8
