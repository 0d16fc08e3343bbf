"""What stores on several machines need of Python: ZeroMQ, process groups, the exit."""

from __future__ import annotations

import atexit
from importlib.util import find_spec
from multiprocessing.util import Finalize, register_after_fork
from pathlib import Path
from typing import Any

import torch

from torchkv import _C


def _zeromq_library() -> str | None:
    """The libzmq of pyzmq's wheel, if that is installed."""
    spec = find_spec("zmq")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parents[1] / "pyzmq.libs"
    return next((str(path) for path in sorted(folder.glob("libzmq-*.so*"))), None)


def default_group() -> tuple[int, int, Any] | None:
    """Rank, number of ranks and store of the default process group, if there is one.

    Called by C++, for stores that get no ``store=``.
    """
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    store = distributed.distributed_c10d._get_default_store()
    return distributed.get_rank(), distributed.get_world_size(), store


def _close_at_exit(_: object) -> None:
    Finalize(None, _C.close_all, exitpriority=100)


if library := _zeromq_library():
    _C.set_zeromq_library(library)
# Other processes may need this one's keys until they have closed their stores, and
# threads must not call Python any more once it is finalized.
atexit.register(_C.close_all)
# multiprocessing ends its processes without atexit, and those that it forks forget the
# finalizers of their parent.
_close_at_exit(None)
register_after_fork(_close_at_exit, _close_at_exit)
