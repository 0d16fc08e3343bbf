"""Each rank writes what its server holds; a save succeeds on all ranks or on none."""

import os
import shutil
import signal
import threading
import time

import pytest
import safetensors
import torch

import ranks
import torchkv
from ranks import outcome
from torchkv.state import tensor_files

KEYS = {"big": (300, 301), "small": (7,), **{f"k{i}": (3, 2) for i in range(20)}}


def make(rank):
    kv = torchkv.create("dist_sync", timeout=20)
    values = [torch.arange(300 * 301).view(300, 301).float()]
    values += [torch.full(size, 2.0) for size in list(KEYS.values())[1:]]
    kv.init(list(KEYS), values)
    kv.set_optimizer(torchkv.optim.SGD(lr=0.5, momentum=0.5))
    kv.push(list(KEYS), [torch.full(size, rank + 1.0) for size in KEYS.values()])
    return kv


def save(rank, folder):
    make(rank).save(folder)


def names_in(path):
    with safetensors.safe_open(path, "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "store"
    ranks.run(save, 2, str(path))
    return path


def test_each_rank_writes_what_it_holds(folder):
    files = sorted(name for name in os.listdir(folder) if name.startswith("data"))
    first, second = (names_in(folder / name) for name in files)
    assert "-1-00001" in files[0] + files[1]
    assert first.keys() & second.keys() == set()
    numel = 300 * 301
    for role in ("value", "momentum_buffer"):
        shapes = {
            int(name.partition("@")[2].partition("/")[0]): shape
            for name, shape in {**first, **second}.items()
            if name.startswith(f"{role}@") and name.endswith("/big")
        }
        assert [*shapes] and sum(size for (size,) in shapes.values()) == numel
        assert 0 in shapes and shapes[0][0] in shapes  # one begins where one ends
    whole = [n for n in {**first, **second} if n.startswith("value/")]
    assert {name.partition("/")[2] for name in whole} == KEYS.keys() - {"big"}


def test_one_machine_loads_the_parts(folder):
    kv = torchkv.create("local")
    kv.load(folder)
    assert kv.keys() == list(KEYS)
    before = torch.arange(300 * 301).view(300, 301).float()
    assert torch.equal(kv.pull("big"), before - 1.5)
    state = kv.optimizer.state_dict()["state"]
    assert torch.equal(state["big"]["momentum_buffer"], torch.full((300, 301), 3.0))
    kv.save(f"{folder}-whole")  # the form of one machine
    again = torchkv.load(f"{folder}-whole")
    assert torch.equal(again.pull("big"), before - 1.5)


def load_and_step(rank, folder):
    kv = torchkv.load(folder)
    kv.push(list(KEYS), [torch.zeros(size) for size in KEYS.values()])
    return kv.pull("big")[0, 0].item(), kv.pull("small")[0].item()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_any_number_of_ranks_loads_them(folder, num_ranks):
    # Of momentum 3, half is left.
    for values in ranks.run(load_and_step, num_ranks, str(folder)):
        assert values == (-1.5 - 0.75, 2 - 1.5 - 0.75)


def damaged(folder, tmp_path, damage):
    """The error of loading a copy whose tensors are changed as they are read."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    real = tensor_files.read

    def read(*arguments):
        tensors = real(*arguments)
        damage(tensors)
        return tensors

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_files, "read", read)
        return outcome(lambda: torchkv.create("local").load(copy))


def lose_a_part(tensors):
    tensors.pop("value@0/big", None)


def shorten_a_part(tensors):
    if "value@0/big" in tensors:
        tensors["value@0/big"] = tensors["value@0/big"][:-1]


def convert_a_part(tensors):
    if "value@0/big" in tensors:
        tensors["value@0/big"] = tensors["value@0/big"].double()


@pytest.mark.parametrize("damage", [lose_a_part, shorten_a_part, convert_a_part])
def test_parts_that_do_not_fit_are_an_error(folder, tmp_path, damage):
    kind, text = damaged(folder, tmp_path, damage)
    assert kind == "ValueError"
    assert "expected parts of 'value' that make a tensor of shape (300, 301)" in text
    assert "key 'big'" in text


def save_with_a_full_disk(rank, folder, full, who):
    kv = make(rank)
    kv.save(folder)
    kv.push("small", torch.ones(7))
    real_write, real_replace = tensor_files.write_all, os.replace

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    if rank == who:
        tensor_files.write_all = fail if full == "data" else real_write
        os.replace = fail if full == "manifest" else real_replace
    began = time.monotonic()
    error = outcome(lambda: kv.save(folder))
    took = time.monotonic() - began
    tensor_files.write_all, os.replace = real_write, real_replace
    ranks.meet(folder, "failed", rank, 2)
    files = sorted(os.listdir(folder))
    ranks.meet(folder, "listed", rank, 2)
    kv.barrier()
    kv.save(folder)
    return error, took, files


@pytest.mark.parametrize(("full", "who"), [("data", 0), ("data", 1), ("manifest", 0)])
def test_a_save_that_fails_on_one_rank_fails_on_all(tmp_path, full, who):
    folder = str(tmp_path / "store")
    results = ranks.run(save_with_a_full_disk, 2, folder, full, who)
    for rank, ((kind, text), took, files) in enumerate(results):
        assert took < 10
        assert "No space left on device" in text
        if rank == who:
            assert kind == "OSError"
        else:
            assert kind == "RemoteError"
            assert f"save: rank {who} has failed: OSError" in text
        if full == "manifest":
            assert len([name for name in files if name.startswith("data")]) == 2
    assert torchkv.create("local").load(folder) is None
    assert len([name for name in os.listdir(folder) if name.startswith("data")]) == 2


def save_to_another_folder(rank, folder):
    kv = make(rank)
    own = f"{folder}/{rank}"
    os.makedirs(own)
    return outcome(lambda: kv.save(own))


def test_the_ranks_must_share_the_folder(tmp_path):
    (kind, text), (other_kind, other_text) = ranks.run(
        save_to_another_folder, 2, str(tmp_path)
    )
    assert kind == "OSError" and "expected a folder that all ranks share" in text
    assert other_kind == "RemoteError" and "rank 0 has failed: OSError" in other_text
    assert not [n for n in os.listdir(tmp_path / "0") if n.startswith("manifest")]


class InterruptedSave(Exception):
    pass


def interrupt(number, frame):
    raise InterruptedSave


def save_until_it_works(rank, folder):
    """Rank 1 is interrupted at several moments of a save, and rank 0 waits for it."""
    kv = torchkv.create("dist_sync", timeout=2)
    kv.init("w", torch.arange(4e6))
    errors = []
    for number, delay in enumerate((0.005, 0.01, 0.02, 0.03, 0.06, None)):
        ranks.meet(folder, number, rank, 2)
        if rank == 1 and delay:
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, delay)
        try:
            kv.save(f"{folder}/store")
            errors.append(None)
        except (InterruptedSave, torchkv.RemoteError) as error:
            errors.append(type(error))
        signal.setitimer(signal.ITIMER_REAL, 0)
    return errors


def test_a_save_that_was_interrupted_may_be_repeated(tmp_path):
    for errors in ranks.run(save_until_it_works, 2, str(tmp_path)):
        assert errors[-1] is None
    kv = torchkv.create("local")
    kv.load(f"{tmp_path}/store")
    assert torch.equal(kv.pull("w"), torch.arange(4e6))


def save_and_push(rank, type, folder):
    kv = torchkv.create(type, timeout=30)
    keys, sizes = ["a", "b"], [3, 40_000]
    kv.init(keys, [torch.zeros(size) for size in sizes])
    kv.set_optimizer(torchkv.optim.SGD(lr=1.0))
    stop = threading.Event()

    def push():
        # In dist_sync all ranks push equally often.
        for _ in (
            range(60) if type == "dist_sync" else iter(lambda: stop.is_set(), True)
        ):
            kv.push(keys, [torch.ones(size) for size in sizes])
            kv.pull("a")

    thread = threading.Thread(target=push)
    thread.start()
    states = []
    for _ in range(15):
        states.append(kv.state_dict())
        kv.save(folder)
    stop.set()
    thread.join()
    kv.barrier()
    kv.close()
    # On rank 0; each part of a value is of one moment.
    return (
        [x.unique().numel() for y in states for x in [y["keys"]["a"]["value"]]]
        if rank == 0
        else []
    )


@pytest.mark.parametrize("type", ["dist_sync", "dist_async"])
def test_saving_while_other_threads_push_large_values(tmp_path, type):
    assert set(ranks.run(save_and_push, 2, type, tmp_path / "store")[0]) == {1}


def loaded_and_deleted(rank, folder):
    results = []
    for load in (False, True):
        kv = torchkv.create("dist_sync", timeout=20)
        kv.set_optimizer("adam", learning_rate=0.1)
        for size in (3, 40_000):
            kv.init(size, torch.zeros(size))
            kv.push(size, torch.ones(size))
        if load:
            kv.save(folder)
            kv.load(folder)
        for size in (3, 40_000):
            kv.delete(size)
            kv.init(size, torch.zeros(size + 1))
            kv.push(size, torch.ones(size + 1))
            kv.push(size, torch.full((size + 1,), -0.1))
            results.append(kv.pull(size))
        kv.barrier()
        kv.close()
    return results


def test_a_deleted_key_does_not_keep_the_state_that_was_loaded(tmp_path):
    for results in ranks.run(loaded_and_deleted, 2, tmp_path / "store"):
        for loaded, new in zip(results[2:], results[:2], strict=True):
            assert torch.equal(loaded, new)
