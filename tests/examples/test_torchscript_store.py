"""The TorchScript example prints the means it should, before and after a save."""

import importlib.util
from pathlib import Path

import torch

import torchkv
from helpers import assert_same, jit_save_load, run_program, script

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchscript_store.py"


def import_example():
    spec = importlib.util.spec_from_file_location("torchscript_store", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Means of small integers that divide evenly, so every printed digit is exact.
PRINTED = """\
label 3: [1.0, 2.0]
label 3: [2.0, 4.0]
label 5: [7.0, 7.0]
seen from Python: [[2.0, 4.0], [7.0, 7.0]]
label 3, loaded: [4.0, 6.0]
in the loaded store: [4.0, 6.0]
in the first store: [2.0, 4.0]
label 5, loaded: [6.0, 4.0]
label 3, first: [4.0, 6.0]
"""


def test_runs_as_it_is_and_prints_the_means():
    result = run_program(EXAMPLE)
    assert result.stderr == ""
    assert result.returncode == 0
    assert result.stdout == PRINTED


def test_module_goes_on_after_a_save_with_the_same_bits(store_type):
    store = torchkv.create(store_type)
    model = script(import_example().LabelMeans(store.script_object))
    model.prepare([1, 2], 33)
    vectors = torch.randn(8, 33)
    for i, vector in enumerate(vectors[:5]):
        model(1 + i % 2, vector)
    loaded = jit_save_load(model)
    loaded_store = torchkv.KVStore.from_script_object(loaded.store)
    assert loaded_store.type == store_type
    assert loaded_store.keys() == store.keys() == [1, 2]

    for i, vector in enumerate(vectors[5:], start=5):
        before = loaded_store.pull(1 + i % 2)
        expected = model(1 + i % 2, vector)
        assert_same(loaded_store.pull(1 + i % 2), before, "not the first one's store")
        assert not torch.equal(expected, before)
        assert_same(loaded(1 + i % 2, vector), expected)
    for label in (1, 2):
        assert_same(loaded_store.pull(label), store.pull(label))
        mean = vectors[label - 1 :: 2].double().mean(dim=0)
        torch.testing.assert_close(store.pull(label).double(), mean, rtol=0, atol=1e-5)
