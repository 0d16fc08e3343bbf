"""The complaints of tools/check_sass.py."""

import pytest

import check_sass
from check_sass import Kernel, Limits

GOOD = Kernel(
    "sm_90", "sum<float> 4096", registers=64, stack=0, loads=4, stores=2, narrow=8
)


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    limits = {r"sum<.*": Limits(registers=64, stack=0, loads=4, stores=2)}
    monkeypatch.setattr(check_sass, "LIMITS", limits)


def test_within_limits():
    assert check_sass.complaints([GOOD]) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"registers": 65}, "registers 65, at most 64"),
        ({"stack": 8}, "stack 8, at most 0"),
        ({"loads": 3}, "loads of 16 bytes 3, at least 4"),
        ({"stores": 0}, "stores of 16 bytes 0, at least 2"),
        ({"narrow": 4}, "loads of less 4, at least 8"),
        ({"wrapped": 2}, "constant offsets that wrapped around 2"),
    ],
)
def test_broken_limit(change, complaint):
    found = check_sass.complaints([GOOD, GOOD._replace(arch="sm_80", **change)])
    assert found == [f"sm_80 sum<float> 4096: {complaint}"]


@pytest.mark.parametrize(
    ("instruction", "is_wrapped"),
    [
        ("LDC.64 R30, c[0x0][R5+-0x7e28] ;", True),
        ("IMAD R0, R1, c[0x0][R5+-0x7e28], R2 ;", True),
        ("LDC.64 R30, c[0x0][R5+-0x58] ;", False),
        ("LDC.64 R30, c[0x0][R5+0x7e28] ;", False),
        ("LDG.E.128 R30, [R5.64+-0x7e28] ;", False),
    ],
)
def test_wrapped_constant_offset(instruction, is_wrapped):
    assert check_sass.is_wrapped(instruction) == is_wrapped


def test_kernel_without_limits():
    found = check_sass.complaints([GOOD, GOOD._replace(name="copy")])
    assert found == ["sm_90 copy: has no limits"]


def test_limits_without_kernel(monkeypatch):
    monkeypatch.setitem(check_sass.LIMITS, "copy.*", GOOD)
    assert check_sass.complaints([GOOD]) == ["sm_90: no kernel is copy.*"]


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        (
            "_ZN7torchkv7kernels4cuda10sum_kernelINS1_3SumI13__nv_bfloat16f"
            "LNS1_4RuleE3ELi0EEELm4096EEEvNS1_6ParamsIXT0_EEE",
            "sum<__nv_bfloat16, float, other, 0> 4096",
        ),
        (
            "_ZN7torchkv7kernels4cuda39_GLOBAL__N__07fbc5dd_7_copy_cu_a886c72e"
            "11copy_kernelILm31744EEEvNS1_6ParamsIXT_EEE",
            "copy_kernel<31744ul>",
        ),
    ],
)
def test_short_names(symbol, name):
    assert check_sass.short_names([symbol]) == {symbol: name}
