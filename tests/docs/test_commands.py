"""The commands on the pages run as they are written, and what they name exists.

A block ```` ```sh ```` runs in a folder that has the examples and a `train.py`: the
page's program of several ranks. With `--nnodes 2` it runs on two hosts. The comments
before a block are those of test_pages.py; `not run` is for what builds or installs.
"""

import re
import tomllib

import pytest

from commands import environment_in, shell
from pages import PAGES, ROOT, blocks_of, name_of

EXAMPLES = sorted(ROOT.glob("examples/**/*.md"))
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PORT = 29500  # of the page's rendezvous

BLOCKS = [block for page in [*PAGES, *EXAMPLES] for block in blocks_of(page, "sh")]
(SECRET,) = blocks_of(ROOT / "docs" / "security.md", "sh")
# Appended to train.py: what the commands started. HOME is the folder.
REPORT = """
import os
name = "~/rank" + os.environ["RANK"]
open(os.path.expanduser(name), "w").write(os.environ["WORLD_SIZE"])
"""


def is_slow(block):
    """tests/examples runs the examples, too."""
    return block.how == "slow" or block.page in EXAMPLES


def name_of_block(block):
    return f"{name_of(block.page)}:{block.line}"


RUN = [
    pytest.param(b, id=name_of_block(b), marks=[pytest.mark.slow] * is_slow(b))
    for b in BLOCKS
    if not b.how.startswith("not run: ")
]


def prepare(block, folder):
    """Makes the files that its commands name."""
    (folder / "examples").symlink_to(ROOT / "examples")
    if "train.py" in block.source:
        programs = blocks_of(block.page, "python")
        program = next(p for p in programs if p.how.startswith("ranks: "))
        (folder / "train.py").write_text(program.source + REPORT)
    if "job_secret" in block.source and block is not SECRET:
        shell(SECRET.source, folder, environment_in(folder)).communicate()


def start_on(hosts, host, block, folder):
    """Runs it where host0 is the name of the first host."""
    source = block.source.replace(f"host0:{PORT}", f"{hosts.address(0)}:{PORT}")
    assert source != block.source
    # These hosts have no names by which torchrun could find out which it is on.
    more = {
        "PET_LOCAL_ADDR": hosts.address(host),
        "PET_RDZV_CONF": f"is_host={host == 0}",
    }
    environment = {**environment_in(folder), **more}
    return hosts.call(host, lambda: shell(source, folder, environment, alone=True))


def option(name, source):
    found = re.search(rf"--{name} (\d+)", source)
    return int(found[1]) if found else 1


@pytest.mark.parametrize("block", RUN)
def test_the_commands_run(block, tmp_path, request):
    prepare(block, tmp_path)
    num_hosts = option("nnodes", block.source)
    if num_hosts == 1:
        shells = [shell(block.source, tmp_path, environment_in(tmp_path))]
    else:
        assert num_hosts == 2
        hosts = request.getfixturevalue("hosts")
        shells = [start_on(hosts, host, block, tmp_path) for host in range(2)]
    outputs = [each.communicate()[0] for each in shells]
    for each, output in zip(shells, outputs, strict=True):
        assert each.returncode == 0, output
    if "train.py" in block.source:
        count = num_hosts * option("nproc-per-node", block.source)
        reports = {path.name: path.read_text() for path in tmp_path.glob("rank*")}
        assert reports == {f"rank{i}": str(count) for i in range(count)}


def test_the_secret_is_one_that_stores_take(tmp_path):
    """A file of at least 16 bytes, whose name is exported, for its owner only."""
    told = SECRET.source + 'stat --format=%a "$TORCHKV_JOB_SECRET_FILE"; env'
    output = shell(told, tmp_path, environment_in(tmp_path)).communicate()[0]
    path = tmp_path / "job_secret"
    assert output.startswith("600\n")
    assert f"\nTORCHKV_JOB_SECRET_FILE={path}\n" in output
    assert re.fullmatch(r"[0-9a-f]{64}\n", path.read_text())


# --- What is named --------------------------------------------------------------

NAMING = [*PAGES, *EXAMPLES, CONTRIBUTING]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROGRAM = (
    r"(?:python |torchrun .* )?((?:benchmarks|examples|tests|tools)/\S*\w\.py)\b(.*)"
)


def commands_on(page):
    """The lines of blocks of commands, those in text, too."""
    text = page.read_text()
    fence = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    blocks = [code for name, code in fence.findall(text) if name in ("", "sh")]
    rest = fence.sub("", text)
    inline = [code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", rest)]
    lines = [line for block in blocks for line in re.split(r"(?<!\\)\n", block)]
    return [re.sub(r"\s+#.*", "", line).strip() for line in [*lines, *inline]]


def options_of(program):
    """Also those that modules beside the program add."""
    text = "".join(f.read_text() for f in (ROOT / program).parent.glob("*.py"))
    return {*re.findall(r'"(--[a-z-]+)"', text)}


@pytest.mark.parametrize("page", NAMING, ids=name_of)
def test_what_commands_name_exists(page):
    makefile = (ROOT / "Makefile").read_text()
    extras = PROJECT["project"]["optional-dependencies"]
    for line in commands_on(page):
        command = re.sub(r"^(\w+=\S+\s+)+", "", line)
        if "tools/launch.py" in command:  # MXNet's
            continue
        if found := re.match(r"make ([a-z][a-z-]*)(?: ([A-Z_]+)=)?", command):
            target, variable = found.groups()
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), line
            assert variable is None or f"$({variable})" in makefile, line
        elif found := re.match(PROGRAM, command):
            program, arguments = found.groups()
            assert (ROOT / program).exists(), line
            given = re.findall(r"--[a-z-]+", arguments)
            assert {*given} <= options_of(program), line
        elif found := re.match(r"python -m pytest (\S+)|(tools/\w+)", command):
            assert (ROOT / (found[1] or found[2])).exists(), line
        elif command.startswith("pip install "):
            assert "--no-build-isolation" in command, line
            for extra in re.findall(r"\w+(?=[,\]])", command):
                assert extra in extras, line


def test_all_kinds_of_commands_are_found():
    """Else nothing above would be looked at."""
    found = "\n".join(line for page in NAMING for line in commands_on(page))
    for command in (
        "make demo",
        "make bench-peers",
        "make test PYTEST_ARGS=",
        "TORCH=torch==2.15.0 make test",
        "python tools/gpu_check.py folder --only",
        "python examples/from_mxnet/",
        "torchrun --nproc-per-node 2 examples/",
        "python -m pytest tests/docs",
        "tools/check_install",
        "pip install --no-build-isolation -e '.[test,examples,lint]'",
        "pip install --no-build-isolation .",
    ):
        assert f"\n{command}" in found, command


def test_every_block_is_of_a_known_kind():
    """None is left out for its language, or for a comment that is not known."""
    languages = "sh|python|text|cpp|cmake|mermaid"
    directives = r"\{(?:toctree|include|figure)\}.*"  # of Sphinx, without code
    for page in [*PAGES, *EXAMPLES]:
        fences = re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)
        assert not any(fences[1::2]), page
        for fence in fences[::2]:
            assert re.fullmatch(f"{languages}|{directives}", fence), (page, fence)
        assert fences[::2].count("sh") == len(blocks_of(page, "sh")), page
    for block in BLOCKS:
        assert re.fullmatch("|slow|not run: .+", block.how), block
