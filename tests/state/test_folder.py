"""save and load: what comes back, what a crash leaves, what is refused."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.optim.lr_scheduler import StepLR

import torchkv
from helpers import (
    Momentum,
    MomentumStr,
    add_input,
    assert_same,
    full,
    run_threads,
    script,
    scripted_add_twice,
    snapshot,
    stored,
)
from saved_stores import NUMBERS, everything, set_optimizer, trained

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
every_optimizer = pytest.mark.parametrize("optimizer", NUMBERS)


def data_files(folder):
    return sorted(Path(folder).glob("data-*.safetensors"))


def rewritten(folder, change):
    """Changes the manifest and seals it again."""
    path = Path(folder, "manifest.json")
    manifest = json.loads(path.read_text())
    del manifest["crc32"]
    changed = change(manifest)
    rest = json.dumps(manifest if changed is None else changed).encode()[1:]
    path.write_bytes(b'{"crc32": "%08x",\n' % zlib.crc32(rest) + rest)


# -- round trips


@pytest.mark.parametrize("door", ["load", "torchkv.load", "load into another type"])
def test_everything_comes_back(store_type, tmp_path, door):
    with trained(store_type) as store:
        store.save(tmp_path / "deep" / "folder")
        before = everything(store)
        if door == "torchkv.load":
            other = torchkv.load(tmp_path / "deep" / "folder")
            assert other.type == store_type
        else:
            types = {"local": "device", "device": "local"}
            other = torchkv.create(store_type if door == "load" else types[store_type])
            other.init([1, 3], [full(9), torch.zeros(7)])
            other.set_updater(add_input)
            other.load(str(tmp_path / "deep" / "folder"))
            before[1]["type"] = other.type
        assert everything(other) == before
        assert other.keys() == [3, -5, 2**40]
        for each in store, other:
            each.push([3, 2**40], [full(1), full(4)])
        assert snapshot(other) == snapshot(store)
        other.init(77, full(1))
        with pytest.raises(TypeError):
            other.init("w", full(1))


def test_a_store_of_nccl_is_loaded_where_there_is_none(tmp_path):
    with torchkv.create("device") as store:
        store.init(3, full(7))
        store.save(tmp_path)
        rewritten(tmp_path, lambda manifest: manifest.update(type="nccl"))
        with torchkv.create("local") as other:
            other.load(tmp_path)
            assert_same(stored(other, 3), full(7))
            assert other.type == "local"
        if torch.version.cuda is None:
            with pytest.raises(ValueError, match="expected NCCL"):
                torchkv.load(tmp_path)


def test_the_files_are_safetensors_with_the_values_by_key(tmp_path):
    with torchkv.create() as store:
        store.init(["w", 'a/"b"\n', "größe 𝄞", ""], [full(i) for i in range(4)])
        store.save(tmp_path)
        (file,) = data_files(tmp_path)
        tensors = safetensors.torch.load_file(file)
        assert set(tensors) == {f"value/{key}" for key in store.keys()}
        for key in store.keys():
            assert_same(tensors[f"value/{key}"], store.pull(key))
        assert torchkv.load(tmp_path).keys() == store.keys()
        manifest = json.loads((tmp_path / "manifest.json").read_text())
        assert manifest["torchkv"] == torchkv.__version__
    assert b"pickle" not in file.read_bytes()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_layouts(kv, tmp_path, dtype):
    raw = torch.randint(0, 2, (2, 3, 4, 5 * dtype.itemsize), dtype=torch.uint8)
    values = raw.view(dtype)
    kv.init(
        list(range(6)),
        [
            values,
            values.contiguous(memory_format=torch.channels_last),
            values.permute(3, 1, 0, 2),
            values[0, 0, 0, 0],
            values[:0],
            values[:, :1].transpose(0, 1),
        ],
    )
    kv.save(tmp_path)
    other = torchkv.load(tmp_path)
    assert everything(other) == everything(kv)
    for file in data_files(tmp_path):
        assert safetensors.torch.load_file(file)


def test_small_and_large_values_keep_their_places(kv, tmp_path):
    """Small ones are gathered into pieces of the file; large ones are their own."""
    sizes = [3, 300_000, 5, 5_000_000, 0, 7, 300_000, *[250_000] * 20, 1]
    values = [torch.arange(float(size)) + i for i, size in enumerate(sizes)]
    values += [value[:9].half() for value in values]
    keys = list(range(len(values)))
    kv.init(keys, values)
    kv.save(tmp_path)
    (file,) = data_files(tmp_path)
    other, tensors = torchkv.load(tmp_path), safetensors.torch.load_file(file)
    for key, value in enumerate(values):
        assert torch.equal(other.pull(key), value), key
        assert torch.equal(tensors[f"value/{key}"], value), key


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_optimizers_go_on_as_if_never_saved(kv, tmp_path, optimizer, dtype):
    shape = (2, 3, 4, 5)
    value = torch.randn(shape, dtype=dtype).to(memory_format=torch.channels_last)
    kv.init([3, 5, 7], [value, torch.zeros(0, 2).to(dtype), value.clone()])
    set_optimizer(kv, optimizer, {5: (1, 1.0, 1.0)}, {"accumulate": 2.0})
    gradients = [torch.randn(shape, dtype=dtype) for _ in range(6)]
    empty = torch.zeros(0, 2).to(dtype)
    for gradient in gradients[:3]:  # an odd number: one is accumulated
        kv.push([3, 5], [gradient, empty])
    kv.save(tmp_path)
    other = torchkv.load(tmp_path)
    assert everything(other) == everything(kv)
    for store in kv, other:
        for gradient in gradients[3:]:
            store.push([3, 5, 7], [gradient, empty, gradient])
    assert snapshot(other) == snapshot(kv)


def test_a_scheduler_lives_through_a_load(kv, tmp_path):
    kv.init(3, full(8))
    kv.set_optimizer("sgd", learning_rate=1.0)
    mine = kv.optimizer
    schedule = StepLR(mine, 1, 0.5)
    kv.save(tmp_path)
    for load in (
        lambda: kv.load(tmp_path),
        lambda: kv.load_state_dict(kv.state_dict()),
    ):
        mine.lr = 4.0
        load()
        assert kv.optimizer is mine
    schedule.step()
    assert kv.optimizer.lr == 2.0
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(6))
    kv.load(tmp_path)
    assert mine.lr == 1.0


def test_a_load_of_another_optimizer_lets_go_of_the_last(kv, tmp_path):
    with trained() as adam:
        adam.save(tmp_path)
        expected = adam.state_dict()["optimizer"]
    kv.set_optimizer("adamw")
    last = kv.optimizer
    kv.load(tmp_path)
    assert type(kv.optimizer) is torchkv.optim.Adam
    last.lr = 0.5  # on no store any more
    assert kv.state_dict()["optimizer"] == expected
    with torchkv.create() as other:
        other.set_optimizer(last)
        assert other.optimizer is last


def test_what_a_scheduler_left_in_the_groups(kv, tmp_path):
    kv.init([3, 5], [full(8), full(8)])
    kv.set_optimizer("sgd", learning_rate=0.5)
    kv.set_param_groups([{"keys": [5], "lr": 0.25}])
    StepLR(kv.optimizer, 3)
    kv.optimizer.param_groups[1].update(note="not saved", limit=float("inf"))
    kv.save(tmp_path)
    others = [torchkv.load(tmp_path), torchkv.create(), torchkv.create()]
    others[1].load(tmp_path)
    others[2].load_state_dict(kv.state_dict())
    for other in others:
        StepLR(other.optimizer, 3, last_epoch=2)  # wants its initial_lr
        groups = other.optimizer.param_groups
        assert [group["initial_lr"] for group in groups] == [0.5, 0.25]
        assert not {"note", "limit"} & groups[1].keys()


@pytest.mark.parametrize("kind", [int, str])
def test_a_script_updater_comes_with_its_state(tmp_path, kind):
    key = 3 if kind is int else "w"
    with torchkv.create() as kv:
        kv.set_updater(script(Momentum() if kind is int else MomentumStr()))
        kv.init(key, full(100))
        kv.push(key, full(1))
        kv.save(tmp_path)
        other = torchkv.create()
        other.load(tmp_path)
        for store in kv, other:
            store.push(key, full(1))
        assert_same(stored(other, key), full(96))
        assert snapshot(other) == snapshot(kv)


def test_a_script_function_and_an_empty_store(kv, tmp_path):
    kv.save(tmp_path)
    assert torchkv.load(tmp_path).keys() == []
    kv.set_updater(scripted_add_twice())
    kv.save(tmp_path)
    other = torchkv.load(tmp_path)
    other.init(3, full(1))
    other.push(3, full(1))
    assert_same(stored(other, 3), full(3))


def test_int_and_str_keys_that_read_alike(tmp_path):
    for name, keys in [("a", [1, 2]), ("b", ["1", "2"])]:
        store = torchkv.create()
        store.init(keys, [full(1), full(2)])
        store.save(tmp_path / name)
        assert torchkv.load(tmp_path / name).keys() == keys
    with torchkv.create() as store:
        store.init(1, full(5))
        before = everything(store)
        with pytest.raises(TypeError, match="load: expected int keys"):
            store.load(tmp_path / "b")
        assert everything(store) == before
        store.load(tmp_path / "a")


def test_an_empty_checkpoint_with_a_script_updater_for_other_keys(tmp_path):
    with torchkv.create() as store:
        store.set_updater(script(MomentumStr()))
        store.save(tmp_path)
    with torchkv.create() as store:
        store.init(3, full(1))
        with pytest.raises(TypeError, match="updater"):
            store.load(tmp_path)
        store.push(3, full(4))
        assert_same(stored(store, 3), full(4))


# -- the folder


def test_a_save_replaces_the_last_one_and_nothing_else(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with trained() as store:
        for _ in range(3):
            store.push(3, full(1))
            store.save(tmp_path)
            assert len(data_files(tmp_path)) == 1
            assert everything(torchkv.load(tmp_path)) == everything(store)
    assert {p.name for p in tmp_path.iterdir()} == {
        "notes.txt",
        "manifest.json",
        data_files(tmp_path)[0].name,
    }


def test_a_python_updater_is_a_type_error_and_nothing_is_written(kv, tmp_path):
    kv.init(3, full(1))
    kv.set_updater(add_input)
    with pytest.raises(TypeError, match="Python callable"):
        kv.save(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_failed_save_leaves_the_last_one(tmp_path, monkeypatch):
    with trained() as store:
        store.save(tmp_path)
        before = sorted(p.name for p in tmp_path.iterdir())
        store.push(3, full(1))

        def fail(fd):
            raise OSError(28, "No space left on device")

        for name in ["fsync", "replace"]:
            with monkeypatch.context() as patch:
                patch.setattr(os, name, lambda *_: fail(0))
                with pytest.raises(OSError, match="No space left"):
                    store.save(tmp_path)
            assert sorted(p.name for p in tmp_path.iterdir()) == before
        torchkv.load(tmp_path)


def test_threads_save_and_load_one_folder(tmp_path):
    stores = [trained(), trained(optimizer="sgd")]
    stores[0].save(tmp_path)
    expected = [everything(store) for store in stores]

    def save(store):
        for _ in range(10):
            store.save(tmp_path)

    def load():
        for _ in range(10):
            assert everything(torchkv.load(tmp_path)) in expected

    run_threads([lambda: save(stores[0]), lambda: save(stores[1]), load])
    assert len(data_files(tmp_path)) == 1


KILLED = """
import os, signal, sys
import torch, torchkv
from torchkv.state import folder, tensor_files

path, moment = sys.argv[1], sys.argv[2]
folder._FILE_BYTES = 1 << 16
store = torchkv.create()
store.init([1, 2, 3, 4], [torch.full((20000,), 2.0)] * 4)
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
real_write, real_replace, count = tensor_files.write_all, os.replace, 0

def write(fd, data):
    global count
    count += 1
    if moment == "first write" or (moment == "third write" and count == 3):
        real_write(fd, memoryview(data)[: len(data) // 2])
        die()
    real_write(fd, data)

tensor_files.write_all = write
if moment == "fsync":
    os.fsync = die
if moment == "before replace":
    os.replace = die
if moment == "after replace":
    os.replace = lambda *names: (real_replace(*names), die())
store.save(path)
"""
MOMENTS = ["first write", "third write", "fsync", "before replace", "after replace"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_save_leaves_a_whole_store(tmp_path, moment):
    folder = tmp_path / "store"
    with torchkv.create() as old:
        old.init([1, 2], [full(1), full(2)])
        old.save(folder)
        child = run_child(KILLED, folder, moment)
        assert child.wait(60) == -signal.SIGKILL
        assert len(data_files(folder)) > 1  # it had begun
        loaded = torchkv.load(folder)
        if moment == "after replace":
            assert loaded.keys() == [1, 2, 3, 4]
            assert_same(loaded.pull(4), torch.full((20000,), 2.0))
        else:
            assert everything(loaded) == everything(old)
        old.save(folder)
        assert len(list(folder.iterdir())) == 2  # what was left is gone
        assert everything(torchkv.load(folder)) == everything(old)


SAVES_FOR_EVER = """
import sys, torch, torchkv
store = torchkv.create()
store.init(list(range(100)), [torch.zeros(10000)] * 100)
count = 0
while True:
    count += 1
    store.push(list(range(100)), [torch.full((10000,), float(count))] * 100)
    store.save(sys.argv[1])
    print(count, flush=True)
"""


def test_kills_at_any_moment(tmp_path):
    chance = random.Random(0)
    for _ in range(4):
        with run_child(SAVES_FOR_EVER, tmp_path, stdout=subprocess.PIPE) as child:
            child.stdout.readline()
            time.sleep(chance.uniform(0, 0.1))
            child.kill()
            finished = [int(line) for line in child.stdout.read().split()]
        store = torchkv.load(tmp_path)
        (count,) = {value for key in store.keys() for value in set_of(store.pull(key))}
        assert count >= max(finished, default=1)


def set_of(tensor):
    return set(tensor.unique().tolist())


def run_child(program, *arguments, **options):
    root = str(Path(torchkv.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": root},
        **options,
    )


# -- what is refused


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
    refuses(folder, store, "is not there")
    path.mkdir()
    refuses(folder, store, "is not there")
    path.rmdir()
    path.write_bytes(data)
    (folder / "manifest.json").write_text('{"weights": []}')
    refuses(folder, store, "another file")


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ("[]", "no object"),
        ("{", "wrong header"),
        ("{}", "expected a value"),
        ('{"value/3": 3}', "wrong header"),
        ('{"value/3": {"dtype": "F99", "shape": [], "data_offsets": [0, 4]}}', "F99"),
        ('{"value/3": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "room"),
        ('{"value/3": {"dtype": "F32", "shape": [], "data_offsets": [5, 9]}}', "room"),
        ('{"value/3": {"dtype": "F32", "shape": [], "data_offsets": [2, 6]}}', "room"),
        ('{"value/3": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "-1"),
        ('{"value/3": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
         '"value/4": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', "no t"),
        ('{"x/3": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', "a value"),
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
    wrong("negative steps", steps=[1, -1, 0])
    wrong("expected 3 versions", versions=[1])
    wrong("kind 'str'", key_kind="str")
    wrong("'int' or 'str'", key_kind="float")
    wrong("expected a value", keys=[3, -5, 4])
    wrong("distinct keys", keys=[3, -5, 3])
    wrong("no tensor", keys=[3], versions=[1], steps=[1], accumulated=[0])
    wrong("without an optimizer", optimizer=None)
    wrong("a data file", files=[{"name": "../x", "size": 1, "crc32": 1}])
    wrong("other strides", strides={"value/3": [0, 1]})
    wrong("other strides", strides={"value/3": [1]})
    wrong("none", strides={"value/99": [1]})
    wrong("another dtype", dtypes={"value/3": "complex128"})
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
    wrong("four", optimizer={**optimizer, "options": [[3]]})
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


# -- very many keys


@pytest.mark.parametrize(
    "count", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)]
)
def test_very_many_keys(tmp_path, count, monkeypatch):
    monkeypatch.setattr("torchkv.state.folder._HEADER_BYTES", 16 << 20)
    with torchkv.create() as store:
        values = torch.arange(count, dtype=torch.float32).unsqueeze(1).expand(-1, 10)
        store.init(list(range(count)), list(values))
        store.save(tmp_path)
        assert len(data_files(tmp_path)) > 1
        other = torchkv.load(tmp_path)
        assert other.keys() == list(range(count))
        assert torch.equal(torch.stack(other.pull(list(range(count)))), values)
