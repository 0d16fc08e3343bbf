"""What several processes have written of a store is joined, or refused."""

import pytest
import torch

from torchkv.state.parts import Written, join_tensors, join_written

SHAPES = {"a": (2,), "b": (10, 10)}


def written(keys, begins, sizes):
    return Written(keys, begins, sizes, {"versions": [7] * len(keys)})


def join(keys, *parts):
    return join_written(keys, SHAPES.__getitem__, list(parts))


def test_the_parts_of_all_are_in_the_stores_order():
    manifest = join(
        ["b", "a"],
        written(["a", "b"], [-1, 50], [2, 50]),
        written(["b"], [0], [50]),
    )
    assert manifest["keys"] == ["b", "a"]
    assert manifest["versions"] == [7, 7]
    assert manifest["parts"] == {"b": {"shape": [10, 10], "begins": [0, 50]}}


def test_a_key_that_has_come_since_is_not_in_the_store():
    assert join(["a", "new"], written(["a"], [-1], [2]))["keys"] == ["a"]


@pytest.mark.parametrize(
    "keys, parts",
    [
        (["b"], [written(["b"], [50], [50])]),
        (["b"], [written(["b"], [0], [50])]),
        (["b"], [written(["b"], [0], [50]), written(["b"], [60], [40])]),
        ([], [written(["a"], [-1], [2])]),
    ],
    ids=["no begin", "no end", "a gap", "deleted"],
)
def test_keys_that_other_threads_change_are_refused(keys, parts):
    """Before anything replaces the store that was saved before."""
    with pytest.raises(RuntimeError, match=r"another thread.*\(key '[ab]'\)"):
        join(keys, *parts)


def of_rows(*shapes):
    """Parts of a row-sparse key's value, and a tensor of another key."""
    parts = {f"value@{i}/t": torch.full(s, float(i)) for i, s in enumerate(shapes)}
    return {"value/a": torch.ones(2), **parts}


def test_rows_of_all_processes_are_one_tensor():
    tensors = of_rows((2, 3), (0, 3), (1, 3))
    tensors["value@2/t"] = tensors.pop("value@2/t")  # files are read in any order
    tensors["value@0/t"] = tensors.pop("value@0/t")
    join_tensors(tensors, {}, {"t": 3})
    assert tensors.keys() == {"value/a", "value/t"}
    assert tensors["value/t"].tolist() == [[0.0] * 3, [0.0] * 3, [2.0] * 3]


@pytest.mark.parametrize(
    "tensors",
    [
        of_rows((2, 3)),
        of_rows((2, 3), (2, 3), (2, 3)),
        of_rows((2, 3), (2, 4)),
        of_rows((2, 3), (2, 3, 1)),
        of_rows((), ()),
        {**of_rows((2, 3)), "value@2/t": torch.ones(2, 3)},
        {**of_rows((2, 3)), "value@1/t": torch.ones(2, 3).double()},
    ],
    ids=["a lack", "one more", "columns", "dims", "no rows", "a number", "dtypes"],
)
def test_rows_that_do_not_fit_are_refused(tensors):
    with pytest.raises(
        ValueError,
        match=r"load: expected 2 parts of 'value' with rows of one shape.*\(key 't'\)",
    ):
        join_tensors(tensors, {}, {"t": 2})
