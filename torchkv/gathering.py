"""How the ranks of a store give each other bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from torchkv import _C
from torchkv.errors import RemoteError


@contextlib.contextmanager
def others_told(impl: _C.KVStore) -> Iterator[None]:
    """Lets the other ranks of a call fail, too, instead of waiting for this one."""
    try:
        yield
    except RemoteError:
        raise
    except BaseException as error:
        impl.fail_gather(f"{type(error).__name__}: {error}")
        raise


@contextlib.contextmanager
def checked_together(impl: _C.KVStore, op: str) -> Iterator[None]:
    """The checks of a call of all ranks: if they fail on one, the call fails on all.

    Only afterwards may it change anything. The pushes of all ranks are applied before.
    On all ranks, the block makes the same calls of gather(), at stages below 9.

    Raises:
        RemoteError: they have failed on another rank.
    """
    if impl.num_workers() == 1:
        impl.barrier()  # a store that cannot be used is an error before anything else
        yield
        return
    with others_told(impl):
        impl.begin_gather(op)
        yield
        gather(impl, op, 9, b"")


def gather(
    impl: _C.KVStore, op: str, stage: int, data: bytes, to_all: bool = False
) -> list[bytes]:
    """What each rank gives, on rank 0 or on all; see C++'s Store::gather."""
    own = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)
    gathered = impl.gather(op, stage, own[: len(data)], to_all)
    return [tensor.numpy().tobytes() for tensor in gathered]
