"""Folders from which no store is loaded: damaged, forged, foreign, missing."""

import json
import random
import zlib

import pytest
import safetensors.torch
import torch

import torchkv
from helpers import (
    full,
)
from saved_stores import (
    data_files,
    everything,
    rewritten,
    trained,
)


@pytest.fixture
def saved(tmp_path):
    """A folder with a store, and another store that is not to change."""
    folder = tmp_path / "store"
    with trained() as store:
        store.save(folder)
    with trained(optimizer="sgd") as other:
        yield folder, other


def refuses(folder, store, match):
    before = everything(store)
    with pytest.raises(ValueError, match=match) as caught:
        store.load(folder)
    assert everything(store) == before
    assert str(caught.value).startswith("load")
    with pytest.raises(ValueError):
        torchkv.load(folder)


def test_no_such_folder_and_no_store_in_it(saved, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        saved[1].load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    refuses(tmp_path / "empty", saved[1], "has no manifest.json")
    (tmp_path / "file").write_text("x")
    refuses(tmp_path / "file", saved[1], "expected a folder")


def test_every_shorter_file_is_refused(saved):
    folder, store = saved
    for path in [folder / "manifest.json", *data_files(folder)]:
        data = path.read_bytes()
        for size in [*range(0, min(len(data), 60)), len(data) // 2, len(data) - 1]:
            path.write_bytes(data[:size])
            refuses(folder, store, "load")
        path.write_bytes(data + b" ")
        refuses(folder, store, "load")
        path.write_bytes(data)
    store.load(folder)


def test_every_flipped_bit_is_found(saved):
    folder, store = saved
    chance = random.Random(0)
    for path in [folder / "manifest.json", *data_files(folder)]:
        data = path.read_bytes()
        places = {*range(20), *(chance.randrange(len(data)) for _ in range(200))}
        for place in places:
            damaged = bytearray(data)
            damaged[place] ^= 1 << chance.randrange(8)
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match="load"):
                torchkv.load(folder)
        refuses(folder, store, "load")
        path.write_bytes(data)
    store.load(folder)


def test_foreign_and_missing_files(saved):
    folder, store = saved
    (path,) = data_files(folder)
    data = path.read_bytes()
    path.write_bytes(b"\xff" * len(data))
    refuses(folder, store, "expected a safetensors file")
    safetensors.torch.save_file({"value/3": full(1)}, path)
    refuses(folder, store, "bytes in data-")
    path.unlink()
    refuses(folder, store, "is missing")
    path.mkdir()
    refuses(folder, store, "is missing")
    path.rmdir()
    path.write_bytes(data)
    (folder / "manifest.json").write_text('{"weights": []}')
    refuses(folder, store, "another file")


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ("[]", "not an object"),
        ("{", "invalid header"),
        ("{}", "missing value"),
        ('{"value/3": 3}', "invalid header"),
        ('{"value/3": {"dtype": "F99", "shape": [], "data_offsets": [0, 4]}}', "F99"),
        ('{"value/3": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "gap"),
        ('{"value/3": {"dtype": "F32", "shape": [], "data_offsets": [5, 9]}}', "gap"),
        ('{"value/3": {"dtype": "F32", "shape": [], "data_offsets": [2, 6]}}', "gap"),
        ('{"value/3": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "-1"),
        ('{"value/3": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
         '"value/4": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', "gap"),
        ('{"value/3": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
         '"value/4": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
         "unexpected tensor 'value/4'"),
        ('{"value/3": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}', "end"),
        ('{"value/3": {"dtype": "F32", "shape": [4294967296, 4294967296], '
         '"data_offsets": [0, 4]}}', "too large"),
        ('{"value/3": {"dtype": "F32", "shape": [9223372036854775807, 2, 0], '
         '"data_offsets": [0, 0]}}', "too large"),
        ('{"x/3": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', "missing"),
    ],
)  # fmt: skip
def test_forged_headers(tmp_path, header, match):
    with torchkv.create() as store:
        store.init(3, torch.ones(()))
        store.save(tmp_path)
        (path,) = data_files(tmp_path)
        data = len(header).to_bytes(8, "little") + header.encode() + bytes(8)
        path.write_bytes(data)
        known = {"size": len(data), "crc32": zlib.crc32(data)}
        rewritten(tmp_path, lambda manifest: manifest["files"][0].update(known))
        refuses(tmp_path, store, match)


def test_wrong_parts_of_the_manifest(saved):
    folder, store = saved
    whole = (folder / "manifest.json").read_bytes()

    def wrong(match, **fields):
        rewritten(folder, lambda manifest: manifest.update(fields))
        refuses(folder, store, match)
        (folder / "manifest.json").write_bytes(whole)

    wrong("format 99", format=99)
    wrong("'news'", news=1)
    wrong("step to be from 0", steps=[1, -1, 0])
    wrong("expected 3 versions", versions=[1])
    wrong("item of 'keys' as str, but got 3", key_kind="str")
    wrong("'int' or 'str'", key_kind="float")
    wrong("missing value", keys=[3, -5, 4])
    wrong("repeated key 3", keys=[3, -5, 3])
    wrong("unexpected tensor", keys=[3], versions=[1], steps=[1], accumulated=[0])
    wrong("without an optimizer", optimizer=None)
    wrong("a data file", files=[{"name": "../x", "size": 1, "crc32": 1}])
    wrong("strides .* do not fit", strides={"value/3": [0, 1]})
    wrong("strides .* do not fit", strides={"value/3": [1]})
    wrong("missing tensor", strides={"value/99": [1]})
    wrong("does not hold 'complex128'", dtypes={"value/3": "complex128"})
    optimizer = json.loads(whole)["optimizer"]
    wrong("'adan'", optimizer={**optimizer, "name": "adan"})
    wrong("unexpected hyperparameter", optimizer={**optimizer, "name": "sgd"})
    groups = [{"lr": 0.1}] * len(optimizer["groups"])
    wrong("exp_avg", optimizer={**optimizer, "name": "sgd", "groups": groups})
    wrong("'lr'", optimizer={**optimizer, "groups": [{"lr": "0.1"}]})
    wrong("at least one", optimizer={**optimizer, "groups": []})
    wrong("lr", optimizer={**optimizer, "groups": [{"lr": -1}]})
    wrong("group", optimizer={**optimizer, "options": [[3, 7, 1, 1]]})
    wrong("group", optimizer={**optimizer, "options": [[3, -1, 1, 1]]})
    wrong("list of 4", optimizer={**optimizer, "options": [[3]]})
    store.load(folder)


def test_fuzzed_manifests(saved):
    """Each field, at any depth, is replaced, removed or repeated."""
    folder, store = saved
    whole = (folder / "manifest.json").read_bytes()
    before = everything(store)
    wrong = [None, True, -1, 2**70, 1.5, "x", "", [], [[]], {}, {"x": 1}, 10**400]
    for seed in range(400):
        chance = random.Random(seed)

        def change(manifest, chance=chance):
            holder, place = manifest, chance.choice(list(manifest))
            while isinstance(holder[place], (dict, list)) and holder[place]:
                if chance.random() < 0.3:
                    break
                holder = holder[place]
                places = holder if isinstance(holder, dict) else range(len(holder))
                place = chance.choice(list(places))
            what = chance.randrange(3)
            if what == 0:
                del holder[place]
            elif what == 1 and isinstance(holder, list):
                holder.append(holder[place])
            else:
                holder[place] = chance.choice(wrong)

        rewritten(folder, change)
        try:
            torchkv.load(folder)
        except ValueError:
            with pytest.raises(ValueError):
                store.load(folder)
            assert everything(store) == before, seed
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        (folder / "manifest.json").write_bytes(whole)


def test_stores_that_cannot_be_used(saved):
    folder, store = saved
    store.close()
    for call in [lambda: store.save(folder), lambda: store.load(folder)]:
        with pytest.raises(RuntimeError, match="closed"):
            call()
    with torchkv.create() as kv:
        kv.init(3, full(1))
        for call in [lambda: kv.load(folder), lambda: kv.save(folder)]:
            kv.set_updater(lambda key, input, stored, call=call: call())
            with pytest.raises(RuntimeError, match="inside its own updater"):
                kv.push(3, full(1))
    assert torchkv.load(folder).keys() == [3, -5, 2**40]
