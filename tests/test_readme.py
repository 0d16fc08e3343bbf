"""The README keeps its word: its program runs, its files exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_fifteen_lines_run_and_print_the_result(capsys):
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(program, "README.md", "exec"), {})
    assert capsys.readouterr().out == (
        "tensor([[0.6000, 0.6000, 0.6000],\n        [0.6000, 0.6000, 0.6000]])\n"
    )


@pytest.mark.parametrize(
    "target", [link for link in re.findall(r"\]\(([^)]+)\)", README) if ":" not in link]
)
def test_linked_files_exist(target):
    assert (ROOT / target).is_file()


def test_the_commands_are_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"^make (\w+)", README, re.MULTILINE)
    assert commands == ["demo", "test"]
    for command in commands:
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)
