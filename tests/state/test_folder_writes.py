"""What a save leaves in the folder, even if it fails or is killed."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import torchkv
from helpers import (
    add_input,
    assert_same,
    full,
    run_threads,
)
from saved_stores import (
    data_files,
    everything,
    trained,
)


def test_a_save_replaces_the_previous_one_and_nothing_else(tmp_path):
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


def test_a_failed_save_leaves_the_previous_one(tmp_path, monkeypatch):
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
from torchkv.state import saving, tensor_files

path, moment = sys.argv[1], sys.argv[2]
saving._FILE_BYTES = 1 << 16
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
        assert len(list(folder.iterdir())) == 2  # what the killed save left is gone
        assert everything(torchkv.load(folder)) == everything(old)


SAVES_FOREVER = """
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
        with run_child(SAVES_FOREVER, tmp_path, stdout=subprocess.PIPE) as child:
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
