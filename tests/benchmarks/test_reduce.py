"""The reduce benchmark runs, tiny; its cases and their memory."""

import itertools

import pytest
import torch

import reduce
from mxnet_peer import PYTHON
from smoke import assert_rounds, run_smoke

OURS = ["torch.add(a, b, out=c)", "torchkv push"]
PEERS = ["torch.add", "torch.stack().sum()", "torch._foreach_add_"]


def test_measures_every_dtype_number_and_size(tmp_path):
    output, written = run_smoke("reduce", tmp_path, "--no-mxnet")
    assert_rounds(written["push_seconds"], [OURS[0], "fp32", "bf16", "fp16"])
    assert_rounds(
        written["push_pull"]["seconds"],
        ["torchkv push, pull", "torchkv pushpull", "torch.add, copy_"],
    )
    cases = [(c["dtype"], c["replicas"], c["elements"]) for c in written["grid"]]
    assert cases == list(
        itertools.product(["fp32", "bf16", "fp16"], [1, 4], [1000, 10_000])
    )
    for case in written["grid"]:
        assert_rounds(case["seconds"], OURS + PEERS)
        itemsize = 4 if case["dtype"] == "fp32" else 2
        assert case["bytes"] == (case["replicas"] + 1) * case["elements"] * itemsize
        assert case["bound_bytes"] == 3 * case["elements"] * 4
    assert len(written["targets"]) == 4
    assert "A smoke run" in output


@pytest.mark.skipif(not PYTHON.exists(), reason="needs `make bench-peers`")
def test_mxnet_is_timed_where_it_can_add(tmp_path):
    output, written = run_smoke("reduce", tmp_path)
    for case in written["grid"]:
        can = case["dtype"] != "bf16" and case["replicas"] > 1
        assert ("MXNet" in case["seconds"]) == can
        assert bool(case["mxnet"]) == can
    assert "MXNet" in written["push_pull"]["seconds"]
    assert all(target["value"] for target in written["targets"])


def test_tables_in_markdown(tmp_path):
    output, _ = run_smoke("reduce", tmp_path, "--no-mxnet", "--markdown")
    assert "\n| target | measured | limit | reached |\n| --- | ---: |" in output


def test_without_mxnet_the_run_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    reduce.main(["--smoke", "--mxnet", str(tmp_path / "python")])
    assert capsys.readouterr().out.startswith("MXNet is not installed and is skipped; ")


def test_of_the_bound_compares_bytes_per_second():
    times = {reduce.BOUND: [3.0], "fp32": [5.0], "bf16": [5.0]}
    assert reduce.of_bound(times, "fp32") == pytest.approx(1.0)
    assert reduce.of_bound(times, "bf16") == pytest.approx(0.5)


def test_cases_that_do_not_fit_are_left_out(monkeypatch, capsys):
    needed = reduce.needed_bytes(4, 1000, torch.float32, shared=True)
    monkeypatch.setattr(reduce, "available_bytes", lambda: needed / 0.8)
    plan = reduce.Plan(3, 0.0, 0.0)
    sizes = reduce.Sizes([4], [1000, 10_000], 0, plan, plan)
    cases = reduce.measure_grid(sizes, None)
    fp32 = [case for case in cases if case["dtype"] == "fp32"]
    assert [case["elements"] for case in fp32] == [1000]
    assert fp32[0]["shared_arrays"]
    assert "not enough memory: 4 x 10,000 fp32" in capsys.readouterr().out


def test_the_full_grid_is_that_of_the_documentation():
    sizes = reduce.sizes_for(reduce.parser("reduce", 15).parse_args([]))
    assert sizes.replicas == [1, 2, 4, 8]
    assert sizes.elements == [10**k for k in range(3, 9)]
    assert sizes.large == 25_000_000
    assert list(reduce.DTYPES) == ["fp32", "bf16", "fp16"]
