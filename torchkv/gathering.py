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


def gather(
    impl: _C.KVStore, stage: int, data: bytes, to_all: bool = False
) -> list[bytes]:
    """What each rank gives, on rank 0 or on all; see C++'s Store::gather."""
    own = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)
    gathered = impl.gather(stage, own[: len(data)], to_all)
    return [tensor.numpy().tobytes() for tensor in gathered]
