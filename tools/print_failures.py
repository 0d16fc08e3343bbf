"""A pytest plugin that prints each failure immediately, not at the end.

For a run that may be interrupted: ``python -m pytest -p print_failures``.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # PREFIX is usable without pytest
    import pytest

PREFIX = "! "  # of every line, to find them in other output


def pytest_addoption(parser: pytest.Parser) -> None:
    """Accepts the option of pytest-timeout if that is not installed."""
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "ignored, for pytest-timeout is missing")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Prints a failure's location and message."""
    if report.failed:
        lines = [f"{report.when} of {report.nodeid}", *report.longreprtext.splitlines()]
        print("\n" + "\n".join(PREFIX + line for line in lines), flush=True)
