"""Damaged and forged stores: what is refused, in what form, and how soon."""

import io
import json
import os
import pickle
import random
import zipfile
import zlib

import pytest
import torch

import torchkv
from helpers import ScriptHolder, jit_save_load, script, scripted_add_twice, snapshot
from saved_stores import everything, trained
from torchkv import _C

# --- Counts that would overflow


TOO_MANY = 2**53 + 1


def with_count(state, name, count):
    """A state_dict in which the first key has another count."""
    first = next(iter(state["keys"]))
    state["keys"][first][name] = count
    return state


@pytest.mark.parametrize("name", ["step", "version"])
@pytest.mark.parametrize("count", [TOO_MANY, 2**63 - 1, -1])
def test_a_count_that_would_overflow_is_refused(name, count):
    store = trained()
    state = with_count(store.state_dict(), name, count)
    before = everything(store)
    with pytest.raises(ValueError, match=rf"{name} to be from 0 to .*key 3"):
        store.load_state_dict(state)
    assert everything(store) == before


@pytest.mark.parametrize("count", [2**63, 2**64])
def test_a_count_of_more_than_64_bits_is_refused(count):
    store = trained()
    state = store.optimizer.state_dict()
    state["state"][3]["step"] = count
    before = everything(store)
    with pytest.raises(ValueError, match="expected step to fit in 64 bits"):
        store.optimizer.load_state_dict(state)
    assert everything(store) == before


def test_the_largest_count_is_accepted():
    store = trained()
    store.load_state_dict(with_count(store.state_dict(), "step", 2**53))
    store.push(3, torch.ones(2, 3))
    assert store.pull(3).isfinite().all()


# --- Manifests


def rewrite(folder, change):
    """Changes the text of a manifest, with a checksum that fits."""
    path = folder / "manifest.json"
    rest = change(path.read_bytes().partition(b"\n")[2])
    path.write_bytes(b'{"crc32": "%08x",\n' % zlib.crc32(rest) + rest)


@pytest.fixture
def saved(tmp_path):
    store = trained()
    folder = tmp_path / "saved"
    store.save(folder)
    return folder


def refused(folder, match):
    with pytest.raises(ValueError, match=match):
        torchkv.load(folder)


def test_a_repeated_key(saved):
    def repeat(rest):
        manifest = json.loads(b"{" + rest)
        for name in ("keys", "versions", "steps", "accumulated"):
            manifest[name].append(manifest[name][0])
        return json.dumps(manifest).encode()[1:]

    rewrite(saved, repeat)
    refused(saved, "load: repeated key 3")


@pytest.mark.parametrize("place", ["the manifest", "an optimizer", "strides"])
def test_a_repeated_name(saved, place):
    def repeat(rest):
        if place == "the manifest":
            return rest[:-1] + b', "keys": []}'
        if place == "an optimizer":
            return rest.replace(b'"optimizer": {', b'"optimizer": {"name": "sgd", ')
        return rest.replace(b'"strides": {}', b'"strides": {"x": [1], "x": [1]}')

    rewrite(saved, repeat)
    refused(saved, "is not JSON: repeated name")


def test_a_file_that_is_listed_many_times(saved, monkeypatch):
    """It is refused before anything is read."""

    def repeat(rest):
        manifest = json.loads(b"{" + rest)
        manifest["files"] *= 100_000
        return json.dumps(manifest).encode()[1:]

    rewrite(saved, repeat)
    monkeypatch.setattr(torchkv.state.tensor_files, "read", None)
    refused(saved, "repeated file 'data-")


def test_a_repeated_tensor_in_a_header(saved):
    (path,) = saved.glob("data-*.safetensors")
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + size], data[8 + size :]
    first = header.split(b"},", 1)[0][1:] + b"}"
    header = header.rstrip()[:-1] + b"," + first + b"}"
    data = len(header).to_bytes(8, "little") + header + rest
    path.write_bytes(data)

    def fit(rest):
        manifest = json.loads(b"{" + rest)
        manifest["files"][0].update(size=len(data), crc32=zlib.crc32(data))
        return json.dumps(manifest).encode()[1:]

    rewrite(saved, fit)
    refused(saved, "invalid header in .*repeated name")


# --- Pipes, devices and empty paths


@pytest.mark.parametrize("name", ["manifest.json", "data"])
def test_a_pipe_in_the_place_of_a_file(saved, name):
    path = next(saved.glob(f"{name}*"))
    path.unlink()
    os.mkfifo(path)
    refused(saved, "load: expected a regular file, but got a pipe")


def test_a_device_in_the_place_of_a_file(saved):
    path = saved / "manifest.json"
    path.unlink()
    path.symlink_to("/dev/zero")
    refused(saved, "load: expected a regular file, but got .* a device")


def test_a_pipe_in_the_place_of_an_optimizers_state(tmp_path):
    store = trained()
    path = tmp_path / "states"
    os.mkfifo(path)
    with pytest.raises(ValueError, match="load_optimizer_states: .* regular file"):
        store.load_optimizer_states(path)


def test_an_empty_path_is_not_the_current_folder(tmp_path, monkeypatch):
    store = trained()
    monkeypatch.chdir(tmp_path)
    trainer = torchkv.Trainer(torch.nn.Linear(2, 2), "sgd")
    for op, call in [
        ("save", lambda: store.save("")),
        ("load", lambda: store.load("")),
        ("load", lambda: torchkv.load("")),
        ("save_optimizer_states", lambda: store.save_optimizer_states("")),
        ("load_optimizer_states", lambda: store.load_optimizer_states("")),
        ("save_optimizer_states", lambda: trainer.save_states("")),
        ("load_states", lambda: trainer.load_states("")),
    ]:
        with pytest.raises(ValueError, match=f"{op}: expected a path, but got"):
            call()
    assert list(tmp_path.iterdir()) == []


# --- Pickles and archives


def flips(data, begin, end, count, seed):
    """The data with one bit flipped between two places, in several ways."""
    random.seed(seed)
    for _ in range(count):
        flipped = bytearray(data)
        flipped[random.randrange(begin, end)] ^= 1 << random.randrange(8)
        yield bytes(flipped)


@pytest.mark.parametrize("store_type", ["local", "device"])
def test_a_flipped_bit_in_a_pickle_is_an_error(store_type):
    store = trained(store_type)
    data = pickle.dumps(store)
    assert everything(pickle.loads(data)) == everything(store)
    state = store.__reduce__()[1][0]
    begin = data.index(state)
    for flipped in flips(data, begin, begin + len(state), 300, 1):
        with pytest.raises(ValueError, match="pickle is damaged: its checksum"):
            pickle.loads(flipped)


def archive_of(store):
    holder = script(ScriptHolder(store))
    buffer = io.BytesIO()
    torch.jit.save(holder, buffer)
    return buffer.getvalue()


def load_archive(data):
    return torch.jit.load(io.BytesIO(data)).kv


@pytest.mark.filterwarnings("ignore:`torch.jit.load`")
def test_a_flipped_bit_of_a_value_in_an_archive_is_an_error():
    store = trained()
    data = archive_of(store)
    again = torchkv.KVStore.from_script_object(load_archive(data))
    assert snapshot(again) == snapshot(store)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        items = [x for x in archive.infolist() if "/constants/" in x.filename]
        tensors = [x for x in archive.infolist() if "/data/" in x.filename] + items
        tensors = [x for x in tensors if x.file_size and not x.filename.endswith("pkl")]
        assert tensors
        for item in tensors:
            stored = archive.read(item)
            begin = data.index(stored, item.header_offset)
            for flipped in flips(data, begin, begin + len(stored), 20, 2):
                with pytest.raises(Exception, match="its checksum differs"):
                    load_archive(flipped)


def test_an_archive_of_a_store_with_everything_comes_back():
    for gradient in (None, {"accumulate": 2.0, "max_norm": 1.0}):
        store = trained("device", "adam", gradient=gradient)
        holder = jit_save_load(script(ScriptHolder(store)))
        again = torchkv.KVStore.from_script_object(holder.kv)
        assert everything(again) == everything(store)


# --- Optimizers and updaters


def test_repeated_options_of_a_key(saved):
    def repeat(rest):
        manifest = json.loads(b"{" + rest)
        options = manifest["optimizer"]["options"]
        options.append(options[0])
        return json.dumps(manifest).encode()[1:]

    rewrite(saved, repeat)
    refused(saved, "repeated options of the key 3")


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda x: x.float(), ValueError),
        (lambda x: x.reshape(1, -1), ValueError),
        (lambda x: x.to_sparse(), ValueError),
        (lambda x: (x.untyped_storage().resize_(1), x)[1], ValueError),
        (lambda x: x[:0].clone(), RuntimeError),  # TorchScript's own
        (lambda x: x[: len(x) // 2].clone(), RuntimeError),
    ],
    ids=["dtype", "shape", "layout", "storage", "empty", "half"],
)
def test_a_damaged_updater(damage, error):
    store = torchkv.create()
    store.init(3, torch.ones(2, 3))
    store.set_updater(scripted_add_twice())
    state = list(store._impl.state())
    (place,) = (
        i
        for i, part in enumerate(state)
        if isinstance(part, list)
        and part
        and getattr(part[0], "dtype", 0) == torch.uint8
    )
    state[place] = [damage(state[place][0])]
    with pytest.raises(error):
        _C.KVStore.from_state(tuple(state))
