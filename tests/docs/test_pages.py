"""Every block of code on the pages of the documentation runs, and every link leads.

The Python blocks of a page run in order, in one namespace and a folder of their own. A
block ```` ```text ```` behind one is what it prints. A comment before a block says how
it runs otherwise; test_commands.py runs the blocks of commands::

    <!-- ranks: 2 -->            a program of its own, as torchrun starts it
    <!-- slow -->                only in `make test-all`
    <!-- needs CUDA -->          only where there is a GPU
    <!-- not run: <reason> -->   not at all
"""

import contextlib
import io
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

import ranks
import torchkv
from pages import PAGES, ROOT, blocks_of, name_of

PACKAGE = Path(torchkv.__file__).parent
KINDS = r"ranks: \d+|slow|needs CUDA|not run: .+"


def run_source(source, page, line, names):
    # Lines of tracebacks are those of the page.
    code = compile("\n" * line + source, page, "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


def run_as_rank(rank, source, page, line, folder):
    os.chdir(folder)
    torch.set_num_threads(1)
    return run_source(source, page, line, {"__name__": "__main__"})


def run(block, names):
    """Runs it, and compares what it prints."""
    check(block, run_source(block.source, str(block.page), block.line, names))


def run_in_ranks(block):
    count = int(block.how.removeprefix("ranks: "))
    printed = ranks.run(
        run_as_rank, count, block.source, str(block.page), block.line, os.getcwd()
    )
    check(block, printed[0])


def check(block, printed):
    if block.output is not None:
        assert printed == block.output


def with_blocks(*kinds):
    """The pages with Python blocks that have such a comment."""
    return [
        pytest.param(page, id=name_of(page))
        for page in PAGES
        if any(b.how.startswith(kinds) for b in blocks_of(page, "python"))
    ]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current folder; what a page does to the environment ends with it."""
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    yield tmp_path
    os.environ.clear()
    os.environ.update(before)


def run_page(page, kinds):
    names = {"__name__": "__main__"}
    for block in blocks_of(page, "python"):
        if block.how in kinds:
            run(block, names)


@pytest.mark.parametrize("page", with_blocks(""))
def test_python(page, folder, one_thread):
    run_page(page, {""})


@pytest.mark.slow
@pytest.mark.parametrize("page", with_blocks("slow"))
def test_slow_python(page, folder, one_thread):
    run_page(page, {"", "slow"})


@pytest.mark.cuda
@pytest.mark.parametrize("page", with_blocks("needs CUDA"))
def test_python_on_a_gpu(page, folder):
    run_page(page, {"", "needs CUDA"})


@pytest.mark.parametrize("page", with_blocks("ranks: "))
def test_python_in_several_processes(page, folder):
    for block in blocks_of(page, "python"):
        if block.how.startswith("ranks: "):
            run_in_ranks(block)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_comments_are_known_and_python_is_valid(page):
    text = page.read_text()
    for comment in re.findall(r"<!-- (.*?) -->\n```", text):
        assert re.fullmatch(KINDS, comment), comment
    assert text.count("```python") == len(blocks_of(page, "python"))
    for block in blocks_of(page, "python"):
        compile(block.source, name_of(page), "exec")


# --- Links ----------------------------------------------------------------------


def anchors(page):
    """Those that GitHub and the site give to the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page):
    text = re.sub(r"`[^`]*`", "", page.read_text())
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if ":" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


# --- C++ ------------------------------------------------------------------------

CPP_PAGE = ROOT / "docs" / "cpp.md"
CMAKE = """\
cmake_minimum_required(VERSION 3.18)
project(pages LANGUAGES CXX)
add_subdirectory(program0)
add_subdirectory(program1)
"""


@pytest.mark.slow
def test_cpp(tmp_path):
    """The programs of cpp.md build with its lines for CMake, and run."""
    (lines,) = blocks_of(CPP_PAGE, "cmake")
    programs = blocks_of(CPP_PAGE, "cpp")
    assert len(programs) == 2
    (tmp_path / "CMakeLists.txt").write_text(CMAKE)
    for i, program in enumerate(programs):
        folder = tmp_path / f"program{i}"
        folder.mkdir()
        # Of one project, so they may not have one name.
        named = lines.source.replace("my_program ", f"my_program{i} ")
        (folder / "CMakeLists.txt").write_text(named)
        (folder / "my_program.cpp").write_text(program.source)
    prefixes = f"{PACKAGE};{torch.utils.cmake_prefix_path}"
    for command in (
        [
            "cmake",
            "-S",
            ".",
            "-B",
            ".",
            "-G",
            "Ninja",
            f"-DCMAKE_PREFIX_PATH={prefixes}",
        ],
        ["cmake", "--build", "."],
    ):
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    for i, program in enumerate(programs):
        done = subprocess.run(
            [tmp_path / f"program{i}" / f"my_program{i}"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == program.output
