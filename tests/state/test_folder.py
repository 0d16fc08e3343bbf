"""save and load: what comes back."""

import json
import zlib

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
    script,
    scripted_add_twice,
    snapshot,
    stored,
)
from saved_stores import (
    NUMBERS,
    data_files,
    everything,
    rewritten,
    set_optimizer,
    trained,
)

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


@pytest.mark.parametrize("call", ["load", "torchkv.load", "load into another type"])
def test_everything_comes_back(store_type, tmp_path, call):
    with trained(store_type) as store:
        store.save(tmp_path / "deep" / "folder")
        before = everything(store)
        if call == "torchkv.load":
            other = torchkv.load(tmp_path / "deep" / "folder")
            assert other.type == store_type
        else:
            types = {"local": "device", "device": "local"}
            other = torchkv.create(store_type if call == "load" else types[store_type])
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


def test_a_store_of_nccl_is_loaded_without_nccl(tmp_path):
    with torchkv.create("device") as store:
        store.init(3, full(7))
        store.save(tmp_path)
        rewritten(tmp_path, lambda manifest: manifest.update(type="nccl"))
        with torchkv.create("local") as other:
            other.load(tmp_path)
            assert_same(stored(other, 3), full(7))
            assert other.type == "local"
        if torch.version.cuda is None:
            with pytest.raises(ValueError, match="requires NCCL"):
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


def test_small_and_large_values_keep_their_offsets(kv, tmp_path):
    """Small ones are concatenated before they are written, large ones are not."""
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
def test_optimizers_continue_as_if_never_saved(kv, tmp_path, optimizer, dtype):
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


def test_a_scheduler_continues_after_a_load(kv, tmp_path):
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


def test_a_load_of_another_optimizer_releases_the_previous(kv, tmp_path):
    with trained() as adam:
        adam.save(tmp_path)
        expected = adam.state_dict()["optimizer"]
    kv.set_optimizer("adamw")
    last = kv.optimizer
    kv.load(tmp_path)
    assert type(kv.optimizer) is torchkv.optim.Adam
    last.lr = 0.5  # no longer on a store
    assert kv.state_dict()["optimizer"] == expected
    with torchkv.create() as other:
        other.set_optimizer(last)
        assert other.optimizer is last


def test_what_a_scheduler_adds_to_the_groups(kv, tmp_path):
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
def test_a_script_updater_is_saved_with_its_state(tmp_path, kind):
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


def test_int_and_str_keys_of_the_same_text(tmp_path):
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


def test_a_store_of_the_first_release(tmp_path):
    """Format 1, which later releases load, written by the library and by hand."""
    path = tmp_path / f"data-{0:016x}-00001.safetensors"
    complex = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128)
    tensors = {
        "value/w": torch.full((3, 2), 3.0),
        "momentum_buffer/w": torch.ones(3, 2),
        "master/h": torch.ones(2),
        "value/h": torch.ones(2).half(),
        "momentum_buffer/h": torch.zeros(2),
        "value/c": torch.view_as_real(complex).contiguous(),
    }
    safetensors.torch.save_file(tensors, path)
    data = path.read_bytes()
    gradient = dict.fromkeys(["clip_value", "max_norm", "skip_nonfinite"], 0)
    manifest = {
        "format": 1,
        "torchkv": "0.1.0",
        "type": "local_allreduce_cpu",
        "key_kind": "str",
        "keys": ["w", "h", "c"],
        "versions": [2, 1, 0],
        "steps": [2, 1, 0],
        "accumulated": [0, 0, 0],
        "optimizer": {
            "name": "sgd",
            "groups": [{"lr": 1, "momentum": 0.5}],
            "gradient": {"accumulate": 1, "rescale_grad": 1.0, **gradient},
            "options": [["w", 0, 2.0, 1]],
            "extras": [[0, "initial_lr", 1.0]],
        },
        "strides": {"value/w": [1, 3]},
        "dtypes": {"value/c": "complex128"},
        "files": [{"name": path.name, "size": len(data), "crc32": zlib.crc32(data)}],
    }
    rest = json.dumps(manifest).encode()[1:]
    (tmp_path / "manifest.json").write_bytes(
        b'{"crc32": "%08x",\n' % zlib.crc32(rest) + rest
    )
    store = torchkv.load(tmp_path)
    assert (store.type, store.keys()) == ("local", ["w", "h", "c"])
    assert store.pull("w").stride() == (1, 3)
    assert_same(store.pull("c"), complex)
    assert store.optimizer.param_groups[0]["initial_lr"] == 1.0
    store.push(["w", "h"], [torch.ones(3, 2), torch.ones(2)])
    assert_same(store.pull("w"), torch.zeros(3, 2))  # 3 - 2 * (0.5 * 1 + 1)
    assert_same(store.pull("h"), torch.zeros(2).half())


# -- very many keys


@pytest.mark.parametrize(
    "count", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)]
)
def test_very_many_keys(tmp_path, count, monkeypatch):
    monkeypatch.setattr("torchkv.state.saving._HEADER_BYTES", 16 << 20)
    with torchkv.create() as store:
        values = torch.arange(count, dtype=torch.float32).unsqueeze(1).expand(-1, 10)
        store.init(list(range(count)), list(values))
        store.save(tmp_path)
        assert len(data_files(tmp_path)) > 1
        other = torchkv.load(tmp_path)
        assert other.keys() == list(range(count))
        assert torch.equal(torch.stack(other.pull(list(range(count)))), values)


def test_the_type_of_a_loaded_store(tmp_path):
    with torchkv.create("local") as kv:
        kv.init("w", torch.ones(2))
        kv.save(tmp_path)
    assert torchkv.load(tmp_path, type="device").type == "device"
    with pytest.raises(ValueError, match="^create: unknown store type 'devise'"):
        torchkv.load(tmp_path, type="devise")
    with pytest.raises(TypeError, match="^load: expected a str as type, but got int"):
        torchkv.load(tmp_path, type=3)
