"""What tools/check_headers.py complains of."""

import shutil

import pytest

import check_headers


@pytest.fixture(autouse=True)
def light_torch(monkeypatch):
    """A header that compiles at once instead of torch's."""
    monkeypatch.setattr(check_headers, "OF_TORCH", "string")


@pytest.fixture(params=["c++", "clang-tidy"])
def compiler(request, monkeypatch):
    if not shutil.which(request.param):
        pytest.skip(f"{request.param} is not installed")
    monkeypatch.setattr(check_headers, "compilers", lambda: [request.param])


GOOD = "#pragma once\n#include <string>\nstd::string name();\n"


@pytest.mark.parametrize(
    ("text", "standards"),
    [
        (GOOD, []),
        ("#pragma once\nstd::string name();\n", ["c++17", "c++20"]),
        ("#pragma once\ninline int f(int unused) { return 1; }\n", ["c++17", "c++20"]),
        ("#pragma once\n#include <span>\nstd::span<int> f();\n", ["c++17"]),
    ],
)
@pytest.mark.usefixtures("compiler")
def test_each_header_alone(tmp_path, capsys, text, standards):
    (tmp_path / "good.h").write_text(GOOD)
    (tmp_path / "other.h").write_text(text)
    assert check_headers.main(tmp_path) == bool(standards)
    found = [x for x in capsys.readouterr().out.splitlines() if ".h (" in x]
    assert len(found) == len(standards)
    for line, standard in zip(found, standards, strict=True):
        assert line.startswith("other.h (")
        assert f"-std={standard}" in line


@pytest.mark.usefixtures("compiler")
def test_standard_that_torch_does_not_support(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(check_headers, "OF_TORCH", "no_such_header")
    (tmp_path / "only_20.h").write_text("#include <span>\nstd::span<int> f();\n")
    assert check_headers.main(tmp_path) == 0
    assert "-std=c++17: not with this torch" in capsys.readouterr().out


def test_no_headers(tmp_path):
    assert check_headers.main(tmp_path) == 1
