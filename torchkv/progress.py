"""Progress bars of long saves and loads, by tqdm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


def check_tqdm(op: str, show: bool) -> None:
    """ImportError where a bar is asked for and tqdm is missing."""
    if show:
        try:
            import tqdm  # noqa: F401
        except ImportError as error:
            raise ImportError(
                f"{op}: expected tqdm for progress=True, but it is not installed; run "
                "pip install tqdm"
            ) from error


@contextlib.contextmanager
def bar(op: str, num_bytes: int, show: bool) -> Iterator[Callable[[int], object]]:
    """Shows a bar on stderr, if it should; gives what adds bytes to it."""
    if not show:
        yield lambda count: None
        return
    import tqdm

    with tqdm.tqdm(
        total=num_bytes, desc=op, unit="B", unit_scale=True, unit_divisor=1024
    ) as shown:
        yield shown.update
