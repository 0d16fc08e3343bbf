"""A process controlled by JSON lines: the loop of a benchmark's ranks.

Each line of stdin is a command, each line of stdout its answer or ``{"error": ...}``.
Requires only Python, 3.8 or newer: MXNet and torch have separate environments.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any


def serve(commands: Any) -> None:
    """Calls the methods that the lines name, until the end of stdin.

    Args:
        commands: an object; ``{"do": "x", "y": 1}`` calls ``commands.x(y=1)``, which
            returns its answer, a dict or None.
    """
    # Only replies may be written to the pipe; libraries may print to stdout.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(commands, command.pop("do"))(**command) or {}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers)
