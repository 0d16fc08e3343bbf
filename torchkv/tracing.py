"""Detects calls from inside torch.fx.symbolic_trace."""

from __future__ import annotations

import sys

import torch.fx

_names = vars(sys.modules[torch.fx.Tracer.__module__])

# Where torch.fx stores whether any thread or, in newer versions, this one is tracing.
if "_is_fx_tracing_flag" in _names:
    FX_NAMES, FX_FLAG = _names, "_is_fx_tracing_flag"
else:
    FX_NAMES, FX_FLAG = _names["_is_fx_tracing_tls"], "flag"

_TRACE = torch.fx.Tracer.trace.__code__


def is_symbolic_trace() -> bool:
    """Whether this thread is tracing, and not inside an operator.

    A Python operator (``torch.library.custom_op``) is recorded as one node, so it may
    call a store while make_fx runs it.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is _TRACE:
            return True
        if frame.f_code.co_name == "__torch_dispatch__":
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return False
