"""What several processes have written of a store is joined, or refused."""

import pytest

from torchkv.state.parts import Written, join_written

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
