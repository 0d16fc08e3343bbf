"""Calls that share=True, or a shared tensor, makes errors."""

import pytest
import torch

import torchkv
from helpers import assert_same, full
from test_share import is_shared


def wrong_tensors():
    return {
        "gaps": torch.zeros(2, 6)[:, ::2],
        "expanded": torch.zeros(1, 3).expand(2, 3),
        "conj": torch.zeros(2, 3, dtype=torch.complex64).conj(),
        "neg": torch.zeros(2, 3, dtype=torch.complex64).conj().imag,
    }


@pytest.mark.parametrize("op", ["init", "assign"])
@pytest.mark.parametrize("name", ["gaps", "expanded", "conj", "neg"])
def test_a_tensor_that_cannot_be_shared_is_refused(kv, op, name):
    wrong = wrong_tensors()[name]
    if op == "assign":
        kv.init("w", torch.zeros(2, 3, dtype=wrong.dtype))
    with pytest.raises(
        ValueError, match=rf"^{op}: expected a dense tensor to share.*\(key 'w'\)$"
    ):
        getattr(kv, op)(["w"], [wrong], share=True)
    assert kv.keys() == (["w"] if op == "assign" else [])


@pytest.mark.parametrize("span", [(3, 9), (11, 13), (5, 7), (0, 24), (4, 12)])
def test_two_keys_cannot_share_an_element(kv, span):
    flat = torch.arange(24.0)
    match = r"^init: expected a tensor to share with memory of its own.*\(key 'b'\)$"
    kv.init("a", flat[4:12], share=True)
    with pytest.raises(ValueError, match=match):
        kv.init("b", flat[slice(*span)], share=True)
    kv.init(["c", "d"], [flat[:4], flat[12:]], share=True)
    assert kv.keys() == ["a", "c", "d"]
    kv.delete("a")
    with pytest.raises(ValueError, match="memory of its own"):
        kv.init(["e", "f"], [flat[4:12], flat[11:12]], share=True)
    assert kv.keys() == ["c", "d"]


@pytest.mark.parametrize(
    ("op", "keys", "tensors"),
    [
        ("push", ["b"], lambda flat: [flat[10:14]]),  # its value, moved
        ("push", ["a", "b"], lambda flat: [flat[12:16], flat[4:8]]),  # exchanged
        ("push", ["a", "x"], lambda flat: [torch.ones(4), flat[6:10]]),
        ("push", ["a"], lambda flat: [flat[4:8].view(torch.int32)]),
        ("pull", ["a", "x"], lambda flat: [torch.ones(4), flat[6:10]]),
        ("pull", ["a"], lambda flat: [flat[3:7]]),
        ("pull", ["a"], lambda flat: [flat[0:8:2]]),
        ("pushpull", ["a"], lambda flat: [flat[5:9]]),
        ("assign", ["b"], lambda flat: [flat[11:15]]),
    ],
)
def test_a_tensor_that_overlaps_otherwise_is_refused(kv, op, keys, tensors):
    flat = torch.arange(24.0)
    before = flat.clone()
    kv.init(["a", "b"], [flat[4:8], flat[12:16]], share=True)
    kv.init("x", torch.zeros(4))
    with pytest.raises(
        ValueError,
        match=rf"^{op}: expected a tensor outside of the memory that key '[ab]' shares",
    ):
        getattr(kv, op)(keys, tensors(flat))
    assert_same(flat, before)
    assert [kv.version(key) for key in ("a", "b", "x")] == [0, 0, 0]
    kv.push("x", flat[4:8])  # a value like any other
    assert_same(kv.pull("x"), flat[4:8])


@pytest.mark.parametrize("part", [slice(None), slice(1, 3)], ids=str)
def test_rows_are_not_pulled_into_the_shared_value(kv, part):
    table = torch.arange(12.0).view(4, 3)
    before = table.clone()
    kv.init("w", table, share=True)
    out = table[part]
    with pytest.raises(
        ValueError,
        match="^row_sparse_pull: expected a tensor outside of the memory that key 'w'",
    ):
        kv.row_sparse_pull("w", out=out, row_ids=torch.arange(len(out)))
    assert_same(table, before)


@pytest.mark.parametrize(
    "call",
    [
        lambda kv: kv.push("w", full(1)),
        lambda kv: kv.pull("w"),
        lambda kv: kv.pull("w", full(0)),
        lambda kv: kv.assign("w", full(0)),
        lambda kv: kv.state_dict(),
        lambda kv: kv.script_object.pull("w"),
    ],
    ids=["push", "pull", "pull into", "assign", "state_dict", "script"],
)
def test_a_storage_that_was_shrunk_is_refused(kv, call):
    weight = full(1)
    kv.init("w", weight, share=True)
    weight.untyped_storage().resize_(8)
    with pytest.raises(
        (ValueError, RuntimeError),
        match=r": expected the shared tensor's storage to have at least 24 bytes, "
        r"but it was resized to 8 bytes \(key 'w'\)",
    ):
        call(kv)
    kv.delete("w")
    assert len(kv) == 0


def test_a_repeated_key_is_refused_and_keeps_its_value(kv):
    first = full(1)
    kv.init("w", first, share=True)
    with pytest.raises(ValueError, match="expected a new key"):
        kv.init("w", full(2), share=True)
    assert is_shared(kv, "w", first)


@pytest.mark.parametrize("share", [1, None, "yes"])
def test_share_must_be_a_bool(kv, share):
    with pytest.raises(TypeError, match="share"):
        kv.init("w", full(1), share=share)
    assert len(kv) == 0


@pytest.mark.cuda
def test_a_local_store_shares_cpu_memory_only():
    with (
        torchkv.create("local") as kv,
        pytest.raises(ValueError, match=r"expected a tensor in CPU memory"),
    ):
        kv.init("w", full(1, device="cuda"), share=True)
