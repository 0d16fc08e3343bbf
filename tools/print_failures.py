"""A plugin of pytest: shows each failure as it happens, not at the end.

For a run that may be cut short: ``python -m pytest -p print_failures``.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the prefix is for who has no pytest, too
    import pytest

PREFIX = "! "  # of every line, for who looks for them in other output


def pytest_addoption(parser: pytest.Parser) -> None:
    """Knows the option of pytest-timeout where that is missing."""
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "ignored, for pytest-timeout is missing")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Prints a failure's place and what it says."""
    if report.failed:
        lines = [f"{report.when} of {report.nodeid}", *report.longreprtext.splitlines()]
        print("\n" + "\n".join(PREFIX + line for line in lines), flush=True)
