"""What rows of a row-sparse key are until they are first pushed.

::

    kv.init_rows("table", (64,), init=torchkv.initializers.Normal(std=0.01, seed=1))

A row's initial value is a function of the seed, the row's number and the column: the
same on every machine, in every process and at any time. It takes no memory.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from torchkv import _C
from torchkv.arguments import as_number

__all__ = ["Initializer", "Normal", "Uniform", "Zeros"]

_OP = "init_rows"


@dataclass(frozen=True)
class Initializer:
    """An initial value of rows: the base of all."""

    type: ClassVar[str] = ""
    """The name in TorchScript and C++."""

    def __post_init__(self) -> None:
        """ValueError or TypeError for a parameter that is not valid."""
        _C.KVStore.check_row_init(*self._described())

    def _described(self) -> tuple[str, dict[str, float], int]:
        names = [field.name for field in fields(self) if field.name != "seed"]
        numbers = {name: as_number(_OP, name, getattr(self, name)) for name in names}
        seed = getattr(self, "seed", 0)
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError(
                f"{_OP}: expected an int as seed, but got {type(seed).__name__}"
            )
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"{_OP}: expected a seed of 64 bits, but got {seed}")
        return self.type, numbers, seed


@dataclass(frozen=True)
class Zeros(Initializer):
    """Zeros, in any dtype."""

    type = "zeros"


@dataclass(frozen=True)
class Normal(Initializer):
    """A normal distribution; floating-point rows of at least 16 bits."""

    type = "normal"
    mean: float = 0.0
    std: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Uniform(Initializer):
    """A uniform distribution in [low, high); as :class:`Normal`."""

    type = "uniform"
    low: float = 0.0
    high: float = 1.0
    seed: int = 0
