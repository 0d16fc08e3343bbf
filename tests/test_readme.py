"""The README's programs run, and its links and commands exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_example_runs_and_prints_the_result(capsys):
    exec(compile(PROGRAMS[0], "README.md", "exec"), {})
    assert capsys.readouterr().out == (
        "tensor([[0.6000, 0.6000, 0.6000],\n        [0.6000, 0.6000, 0.6000]])\n"
    )


def test_a_step_of_the_trainer_updates_both_replicas_equally():
    names = {}
    exec(compile(PROGRAMS[1], "README.md", "exec"), names)
    first, second = (dict(each.named_parameters()) for each in names["replicas"])
    assert all(first[name].equal(second[name]) for name in first)
    assert len(PROGRAMS) == 2


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
