"""What tools/check_layout.py complains of."""

import pytest

import check_layout


@pytest.fixture
def complaints(tmp_path, capsys):
    """What is printed for a tree of these files."""

    def check(**files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        status = check_layout.main(tmp_path)
        printed = capsys.readouterr().out.splitlines()
        assert status == (1 if printed else 0)
        return printed

    return check


def test_own_folder_and_lower_layers(complaints):
    assert not complaints(
        **{
            "csrc/kvstore.h": '#include "store/check.h"\n#include "core/key.h"\n',
            "csrc/kvstore.cpp": '#include "kvstore.h"\n',
            "csrc/kvstore_state.cpp": '#include "kvstore.h"\n',
            "csrc/store/check.h": '#include "../core/key.h"\n#include <string>\n',
            "csrc/store/check.cpp": '#include "check.h"\n',
            "csrc/core/key.h": "",
        }
    )


@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        *zip(check_layout.LAYERS[1:], check_layout.LAYERS, strict=False),
        ("core", "bindings"),
    ],
)
def test_higher_layer(complaints, lower, upper):
    def file(layer):
        return "kvstore.h" if layer == "kvstore" else f"{layer}/x.h"

    include = file(upper) if lower == "kvstore" else f"../{file(upper)}"
    found = complaints(
        **{
            f"csrc/{file(upper)}": "",
            f"csrc/{file(lower)}": f'#pragma once\n#include "{include}"\n',
        }
    )
    where = f"csrc/{file(lower)}:2"
    assert found == [f"{where}: {lower} includes {upper}: {include}"]


def test_unknown_folder(complaints):
    (found,) = complaints(**{"csrc/misc/x.h": ""})
    assert found.startswith("csrc/misc/x.h: expected one of the folders bindings, ")


def test_device_code_and_torch(complaints):
    half = """\
#ifdef __CUDACC__
#include <cuda_fp16.h>
#else
#include <c10/util/Half.h>
#endif
#ifndef __CUDACC__
#include <c10/util/BFloat16.h>
#endif
"""
    folder = "csrc/kernels/cuda"
    files = {
        f"{folder}/sum.cu": '#include "half.h"\n#include "../../core/rule.h"\n',
        f"{folder}/half.h": half,
        f"{folder}/library.cpp": "#include <ATen/core/Tensor.h>\n",
        "csrc/core/rule.h": "",
    }
    assert not complaints(**files)
    files["csrc/core/rule.h"] = "#include <c10/util/Exception.h>\n"
    assert complaints(**files) == [
        "csrc/core/rule.h:1: device code includes torch: c10/util/Exception.h"
    ]


@pytest.mark.parametrize(
    ("name", "limit"),
    [("csrc/core/x.cpp", 400), ("torchkv/x.py", 400), ("tests/cpp/x.h", 500)],
)
def test_sizes(complaints, name, limit):
    comment = "#" if name.endswith(".py") else "//"
    lines = [f"{comment} a comment"] * limit
    assert not complaints(**{name: "\n".join(lines)})
    lines.append("")
    lines.append(f"{comment} the last")
    assert complaints(**{name: "\n".join(lines)}) == [
        f"{name}: {limit + 2} lines, limit {limit}"
    ]
    lines[3] = f"{comment} size: one table, which a test compares as a whole"
    assert not complaints(**{name: "\n".join(lines)})
    lines[3] = f"{comment} size:"
    assert complaints(**{name: "\n".join(lines)})
