"""The bytes that calls of this process move."""

from __future__ import annotations

from collections.abc import Callable

import torchkv
from torchkv import _C


def counted(kv: torchkv.KVStore, call: Callable[[], object]) -> dict[str, int]:
    """By kind, what `call` has moved here, in a job whose ranks all make it."""
    kv.barrier()
    before = _C.byte_counts()
    kv.barrier()  # no rank begins before all have them
    call()
    kv.barrier()
    after = _C.byte_counts()
    kv.barrier()
    return {name: after[name] - before[name] for name in after}
