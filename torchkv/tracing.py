"""Whether the calling thread is inside of torch.fx.symbolic_trace."""

from __future__ import annotations

import sys

import torch.fx

# Where torch.fx notes that some thread traces.
FX_NAMES = vars(sys.modules[torch.fx.Tracer.__module__])

_TRACE = torch.fx.Tracer.trace.__code__


def is_symbolic_trace() -> bool:
    """Whether this thread traces, and not into the inside of an operator.

    An operator in Python (``torch.library.custom_op``) is recorded as one node, so
    what it does while make_fx runs it may be a store's call.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is _TRACE:
            return True
        if frame.f_code.co_name == "__torch_dispatch__":
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return False
