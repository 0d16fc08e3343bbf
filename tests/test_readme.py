"""The README's program does what it says, and its commands exist.

tests/docs/test_pages.py runs it, too, and follows the links.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_program_prints_the_sum_and_keeps_replicas_equal(capsys):
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names = {}
    exec(compile(program, "README.md", "exec"), names)
    assert capsys.readouterr().out == "tensor([2., 2., 2.])\n"
    first, second = (dict(each.named_parameters()) for each in names["replicas"])
    assert all(first[name].equal(second[name]) for name in first)


def test_the_commands_are_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"(?:^|`)make (\w+)", README, re.MULTILINE)
    assert commands == ["demo", "test", "docs"]
    for command in commands:
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)
