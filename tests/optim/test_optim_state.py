"""An optimizer's state: saved, loaded, copied with the store, rejected if damaged."""

import copy
import io
import os
import pickle
import stat

import pytest
import torch

import torchkv
from helpers import (
    ScriptHolder,
    assert_same,
    bits,
    full,
    jit_save_load,
    run_threads,
    script,
    snapshot,
    stored,
)
from torchkv import optim
from torchkv.files import write_whole

KINDS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {"accumulate": 2, "max_norm": 1.0},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Lion": {},
    "LAMB": {},
}

pytestmark = pytest.mark.parametrize("name", KINDS)


def trained(store, name, keys=(3, 5), steps=3, dtype=torch.float32):
    store.init(list(keys), [torch.randn(4, 3).to(dtype) for _ in keys])
    store.set_optimizer(getattr(optim, name)(**KINDS[name]))
    store.set_param_groups([{"keys": keys[1], "lr": 0.3}])
    store.set_wd_mult({keys[0]: 2.0})
    push(store, steps)


def push(store, steps=3, keys=None):
    keys = keys or store.keys()
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        store.push(keys, [torch.randn(4, 3, generator=generator) for _ in keys])


def assert_equal(actual, expected):
    """Bitwise equality of nested dicts of tensors."""
    if isinstance(expected, torch.Tensor):
        assert_same(actual, expected)
    elif isinstance(expected, dict):
        assert {*actual} == {*expected}
        for name, value in expected.items():
            assert_equal(actual[name], value)
    else:
        assert actual == expected


def through_torch_save(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.cfloat], ids=str
)
@pytest.mark.parametrize("keys", [(3, 5), ("a", "b")], ids=str)
@pytest.mark.parametrize("steps", [0, 3])
def test_training_continues_from_a_saved_state(kv, name, dtype, keys, steps):
    trained(kv, name, keys, steps, dtype)
    state = through_torch_save(kv.optimizer.state_dict())
    with torchkv.create() as other:
        other.init(list(keys), kv.pull(list(keys)))
        other.set_optimizer(getattr(optim, name)())
        other.optimizer.load_state_dict(state)
        assert_equal(other.optimizer.state_dict(), state)
        push(kv)
        push(other)
        assert snapshot(kv) == snapshot(other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_step_begins_with_the_value_that_there_is(kv, name, dtype):
    """And not with the master of another value, which a loaded state has."""
    with torchkv.create() as source:
        trained(source, name, dtype=dtype)
        state = source.optimizer.state_dict()
    without_masters = copy.deepcopy(state)
    for of_key in without_masters["state"].values():
        del of_key["master"]
    values = [5 + torch.rand(4, 3).to(dtype) for _ in range(2)]
    with torchkv.create() as other:
        for store, loaded in ((kv, state), (other, without_masters)):
            store.init([3, 5], values)
            store.set_optimizer(getattr(optim, name)())
            store.optimizer.load_state_dict(loaded)
            push(store)
        assert snapshot(kv) == snapshot(other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_state_may_be_loaded_before_its_values(kv, name, dtype):
    with torchkv.create() as source:
        trained(source, name, dtype=dtype)
        kv.init([3, 5], [torch.full((4, 3), 5.0, dtype=dtype) for _ in range(2)])
        kv.set_optimizer(getattr(optim, name)())
        kv.optimizer.load_state_dict(source.optimizer.state_dict())
        kv.assign([3, 5], source.pull([3, 5]))
        push(source)
        push(kv)
        assert snapshot(source) == snapshot(kv)


@pytest.mark.parametrize("how", ["copy", "pickle", "folder", "state_dict"])
def test_a_store_may_be_copied_between_a_loaded_state_and_a_step(name, how, tmp_path):
    dtype = torch.bfloat16
    with torchkv.create() as source, torchkv.create() as store:
        trained(source, name, dtype=dtype)
        store.init([3, 5], [torch.full((4, 3), 5.0, dtype=dtype) for _ in range(2)])
        store.set_optimizer(getattr(optim, name)())
        store.optimizer.load_state_dict(source.optimizer.state_dict())
        if how == "copy":
            other = copy.deepcopy(store)
        elif how == "pickle":
            other = pickle.loads(pickle.dumps(store))
        elif how == "folder":
            store.save(tmp_path / "store")
            other = torchkv.load(tmp_path / "store")
        else:
            other = torchkv.create()
            other.load_state_dict(store.state_dict())
        push(store)
        push(other)
        assert snapshot(other) == snapshot(store)


def test_state_in_a_file(kv, name, tmp_path):
    trained(kv, name)
    values = kv.pull([3, 5])
    path = tmp_path / "states"
    kv.save_optimizer_states(path, dump_optimizer=True)
    kv.save_optimizer_states(str(path), dump_optimizer=True)
    assert [p.name for p in tmp_path.iterdir()] == ["states"]
    push(kv)
    after = snapshot(kv)
    with torchkv.create() as other:
        other.init([3, 5], values)
        other.set_optimizer(getattr(optim, name)())
        other.load_optimizer_states(path)
        push(other)
        assert snapshot(other) == after


def test_a_file_without_the_options_keeps_those_that_are_set(kv, name, tmp_path):
    """As MXNet's default, dump_optimizer=False."""
    trained(kv, name)
    state = kv.optimizer.state_dict()["state"]
    kv.save_optimizer_states(tmp_path / "states")
    push(kv)
    kv.optimizer.lr = 0.75
    options = {**kv.optimizer.state_dict(), "state": None}
    kv.load_optimizer_states(fname=tmp_path / "states")
    loaded = kv.optimizer.state_dict()
    assert_equal(loaded["state"], state)
    assert_equal({**loaded, "state": None}, options)
    with torchkv.create() as other:
        other.init([3, 5], kv.pull([3, 5]))
        other.set_optimizer("lamb" if name != "LAMB" else "adam")
        with pytest.raises(ValueError, match="expected the state of the optimizer"):
            other.load_optimizer_states(tmp_path / "states")


def flipped(content):
    """Flips one bit of a tensor."""
    state = torch.load(io.BytesIO(content))["state"][5]
    tensor = next(v for v in state.values() if isinstance(v, torch.Tensor))
    at = content.index(bits(tensor)[2]) + 5
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def hidden(content):
    """Turns a tensor's directory entry into a folder's, which torch reads as empty."""
    at = content.index(b"archive/data/0", content.index(b"PK\1\2")) - 8
    return content[:at] + b"\x10" + content[at + 1 :]


def saved(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: b"x" * 99,
        lambda content: saved([1, 2]),
        lambda content: saved({"state": {}}),
        flipped,
        hidden,
    ],
    ids=["empty", "last byte", "half", "text", "list", "dict", "bit", "folder"],
)
def test_a_damaged_file_changes_nothing(kv, name, damage, tmp_path):
    trained(kv, name)
    path = tmp_path / "states"
    kv.save_optimizer_states(path)
    path.write_bytes(damage(path.read_bytes()))
    push(kv)
    before = repr(kv.optimizer.state_dict())
    with pytest.raises(ValueError, match="expected"):
        kv.load_optimizer_states(path)
    assert repr(kv.optimizer.state_dict()) == before


def test_a_file_without_checksums_is_read(kv, name, tmp_path):
    trained(kv, name)
    before = repr(kv.optimizer.state_dict())
    torch.serialization.set_crc32_options(False)
    try:
        kv.save_optimizer_states(tmp_path / "states")
    finally:
        torch.serialization.set_crc32_options(True)
    push(kv)
    kv.load_optimizer_states(tmp_path / "states")
    assert repr(kv.optimizer.state_dict()) == before


def test_a_missing_file(kv, name, tmp_path):
    trained(kv, name)
    with pytest.raises(FileNotFoundError):
        kv.load_optimizer_states(tmp_path / "states")


def test_the_next_save_removes_what_a_killed_one_left(kv, name, tmp_path):
    trained(kv, name)
    (tmp_path / ".states.mine").touch()
    child = os.fork()
    if child == 0:
        write_whole("save", tmp_path / "states", lambda file: os._exit(0))
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 2
    kv.save_optimizer_states(tmp_path / "states")
    assert {p.name for p in tmp_path.iterdir()} == {"states", ".states.mine"}


def test_a_save_that_fails_leaves_the_old_file(kv, name, tmp_path):
    def fail(file):
        file.write(b"new")
        raise OSError("full")

    (tmp_path / "states").write_bytes(b"old")
    with pytest.raises(OSError, match="full"):
        write_whole("save", tmp_path / "states", fail)
    assert [p.name for p in tmp_path.iterdir()] == ["states"]
    assert (tmp_path / "states").read_bytes() == b"old"


def test_a_file_is_flushed_before_it_is_renamed(kv, name, tmp_path, monkeypatch):
    trained(kv, name)
    events = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(fd):
        fsync(fd)
        events.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")

    def note_replace(*paths):
        replace(*paths)
        events.append("rename")

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    kv.save_optimizer_states(tmp_path / "states")
    assert events == ["file", "rename", "folder"]


def test_a_link_is_kept(kv, name, tmp_path):
    trained(kv, name)
    link = tmp_path / "latest"
    (tmp_path / "run").mkdir()
    link.symlink_to("run/states")
    kv.save_optimizer_states(link)
    assert link.is_symlink()
    assert (tmp_path / "run" / "states").is_file()


def test_the_umask_applies_and_is_not_changed(kv, name, tmp_path, monkeypatch):
    trained(kv, name)
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patch:
            patch.delattr(os, "umask")  # it is the process's, not the thread's
            kv.save_optimizer_states(tmp_path / "states")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "states").stat().st_mode) == 0o640


def test_threads_save_to_one_file(kv, name, tmp_path):
    trained(kv, name)

    def save():
        for _ in range(10):
            kv.save_optimizer_states(tmp_path / "states")

    run_threads([save] * 4)
    kv.load_optimizer_states(tmp_path / "states")
    assert [p.name for p in tmp_path.iterdir()] == ["states"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_a_distributed_checkpoint(kv, name, tmp_path):
    import torch.distributed.checkpoint as dcp

    trained(kv, name)
    values = kv.pull([3, 5])
    expected = kv.optimizer.state_dict()
    dcp.save({"optimizer": kv.optimizer}, checkpoint_id=tmp_path, no_dist=True)
    with torchkv.create() as other:
        other.init([3, 5], values)
        other.set_optimizer(getattr(optim, name)(**KINDS[name]))
        dcp.load({"optimizer": other.optimizer}, checkpoint_id=tmp_path, no_dist=True)
        assert_equal(other.optimizer.state_dict(), expected)
        push(kv)
        push(other)
        assert snapshot(kv) == snapshot(other)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda kv: pickle.loads(pickle.dumps(kv)),
    "jit.save": lambda kv: torchkv.KVStore.from_script_object(
        jit_save_load(script(ScriptHolder(kv))).kv
    ),
}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("keys", [(3, 5), ("a", "b")], ids=str)
def test_it_is_copied_with_the_store(kv, name, make, keys):
    trained(kv, name, keys)
    other = make(kv)
    assert_equal(other.optimizer.state_dict(), kv.optimizer.state_dict())
    push(kv)
    push(other)
    assert snapshot(kv) == snapshot(other)
    other.optimizer.lr = 0.77
    assert kv.optimizer.lr != 0.77


def test_an_optimizer_alone_is_copied_without_its_store(kv, name):
    trained(kv, name)
    for other in (
        copy.deepcopy(kv.optimizer),
        pickle.loads(pickle.dumps(kv.optimizer)),
    ):
        assert repr(other) == repr(kv.optimizer)
        assert other.param_groups == kv.optimizer.param_groups
        assert other.state_dict()["state"] == {}
        with pytest.raises(RuntimeError, match="set on a store"):
            other.load_state_dict(kv.optimizer.state_dict())


def damaged(state, path, value):
    state = copy.deepcopy(state)
    at = state
    for step in path[:-1]:
        at = at[step]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return state


DAMAGES = [
    (["optimizer"], "NAdam", "NAdam"),
    (["optimizer"], None, "optimizer"),
    (["state"], None, "state"),
    (["state", 5], None, r"missing \(key 5\)"),
    (["state", 7], {"step": 1, "num_accumulated": 0}, r"unexpected \(key 7\)"),
    (["state", 5], 7, "key 5"),
    (["state", 5, "step"], None, "step.*key 5"),
    (["state", 5, "step"], -1, "key 5"),
    (["state", 5, "odd"], torch.ones(4, 3), "'odd'.*key 5"),
    (["state", 5, "odd"], 7, "'odd'.*key 5"),
    (["state", 5, "odd"], torch.ones(4, 3, dtype=torch.int64), "int64.*key 5"),
    (["state", 5, "odd"], torch.ones(4, 3, dtype=torch.bool), "bool.*key 5"),
    (["state", 1.5], {}, "key"),
    (["param_groups"], [], "group"),
    (["param_groups", 0, "lr"], -1.0, "a lr "),
    (["param_groups", 1, "lr"], None, "'lr'"),
    (["param_groups", 0, "keys"], [3], "keys"),
    (["param_groups"], (5,), r"param_groups\[0\]"),
    (["param_groups", 0, "lr"], "x", "lr"),
    (["param_groups", 1, "keys"], [1.5], "key"),
    (["param_groups", 1, "keys"], ["w"], "int"),
    (["lr_mult"], [(3, -1.0)], "multiplier"),
    (["lr_mult"], [(3, "x")], "multiplier"),
    (["lr_mult"], [3], "lr_mult"),
    (["lr_mult"], 5, "lr_mult"),
    (["wd_mult"], [(3, 4, 5)], "wd_mult"),
    (["gradient"], 5, "'gradient'"),
    (["gradient", "max_norm"], -1.0, "max_norm"),
    (["gradient", "max_nrom"], 1.0, "max_nrom"),
]


@pytest.mark.parametrize(("path", "value", "text"), DAMAGES)
def test_a_damaged_state_changes_nothing(kv, name, path, value, text):
    trained(kv, name, steps=4)
    before = repr(kv.optimizer.state_dict())
    good = kv.optimizer.state_dict()
    with pytest.raises(ValueError, match=text):
        kv.optimizer.load_state_dict(damaged(good, path, value))
    assert repr(kv.optimizer.state_dict()) == before


def test_a_state_of_the_wrong_shape_or_with_a_missing_tensor(kv, name):
    trained(kv, name, steps=4)
    good = kv.optimizer.state_dict()
    before = repr(good)
    kv.optimizer.lr = 0.9
    after = repr(kv.optimizer.state_dict())
    tensor = next(n for n, v in good["state"][5].items() if isinstance(v, torch.Tensor))
    for value in (torch.ones(4, 2), None):
        if value is None and name == "SGD":
            continue  # a momentum that has just begun
        with pytest.raises(ValueError, match="key 5"):
            kv.optimizer.load_state_dict(damaged(good, ["state", 5, tensor], value))
    assert repr(kv.optimizer.state_dict()) == after
    kv.optimizer.load_state_dict(good)
    assert repr(kv.optimizer.state_dict()) == before


def test_not_strict_loads_common_keys(kv, name):
    trained(kv, name)
    state = kv.optimizer.state_dict()
    kv.init(9, full(1).new_ones(4, 3))
    kv.delete(3)
    with pytest.raises(ValueError, match="missing"):
        kv.optimizer.load_state_dict(state)
    push(kv, keys=[5, 9])
    kv.optimizer.load_state_dict(state, strict=False)
    loaded = kv.optimizer.state_dict()["state"]
    assert repr(loaded[5]) == repr(state["state"][5])
    assert loaded[9]["step"] > 0
    assert_same(stored(kv, 5), stored(kv, 5))
