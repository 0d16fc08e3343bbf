"""What the table "The store" of from_mxnet.md says, row by row."""

import pickle

import pytest
import torch

import torchkv
from helpers import assert_same, check_in_child
from tables import RowTests

row = RowTests("The store")


def ones(value=1.0):
    return torch.full((2, 3), value)


def sparse(rows, width=3, size=4):
    """With the value 1 in the rows."""
    values = torch.ones(len(rows), width)
    return torch.sparse_coo_tensor([rows], values, (size, width))


@pytest.fixture
def kv():
    with torchkv.create("local") as store:
        store.init(3, ones())
        yield store


# --- The store ------------------------------------------------------------------


@row("`mx.kv.create(name)`")
def test_names_match_exactly():
    assert torchkv.create("local").type == "local"
    for unknown in ("LOCAL", "locals", "xyz"):  # MXNet makes a local store of each
        with pytest.raises(ValueError, match="unknown store type"):
            torchkv.create(unknown)
    with pytest.raises(NotImplementedError, match="dist_device_sync"):
        torchkv.create("dist_device_sync")


@row("`kv.init(key, value)`")
def test_keys_have_64_bits_and_sparse_values_make_row_sparse_keys(kv):
    kv.init([2**63 - 1, 2**31], [ones(), ones(2.0)])  # MXNet's have 32 bits
    assert_same(kv.pull(2**31), ones(2.0))
    with pytest.raises(ValueError, match="64 bits"):
        kv.init(2**63, ones())
    kv.init(4, sparse([1]))
    kv.init_rows(5, (3,), num_rows=4)
    kv.push(5, sparse([1]))
    for key in (4, 5):
        assert kv.num_rows(key) == 1 and kv.shape(key) == (4, 3)
        assert kv.pull(key).is_sparse
    with pytest.raises(ValueError):  # as in MXNet
        kv.init(3, ones())


@row("`kv.push(key, value, priority)`")
def test_updates_run_in_the_order_of_keys(kv):
    updated = []
    kv.init([7, 1], [ones()] * 2)
    kv.set_updater(lambda key, input, stored: updated.append(key))
    kv.push([7, 1, 3], [ones()] * 3)
    assert updated == [7, 1, 3]  # in MXNet [1, 3, 7]


@row("`kv.push(key, value, priority)`")
def test_a_pushed_tensor_is_no_alias_and_may_be_sparse(kv):
    pushed = ones(2.0)
    kv.push(3, pushed, 5)
    pushed.fill_(9.0)  # after which MXNet's store has 9
    assert_same(kv.pull(3), ones(2.0))
    kv.push(3, sparse([1], size=2))
    assert kv.pull(3).tolist() == [[0] * 3, [1] * 3]
    work = kv.push(3, ones(4.0), async_op=True)
    assert isinstance(work, torchkv.Work)
    work.wait()
    assert_same(kv.pull(3), ones(4.0))


@row("`kv.pull(key, out, priority, ignore_sparse)`")
def test_a_pull_without_out_returns_new_tensors(kv):
    first, second = kv.pull(3), kv.pull(3)
    assert_same(first, ones())
    assert first.data_ptr() != second.data_ptr()
    assert_same(kv.pull([3])[0], ones())
    out = ones(0.0)
    kv.pull(3, out, 1, True, async_op=True).wait()
    assert_same(out, ones())
    kv.push(3, ones(2.0))
    assert_same(kv.pull(3, min_version=1), ones(2.0))
    with pytest.raises(ValueError):
        kv.pull(3, min_version=2)


@row("`kv.pull(key, out, priority, ignore_sparse)`")
def test_sparse_outs_are_skipped_unless_asked_for(kv):
    """As in MXNet, and dense outs of row-sparse keys are filled."""
    kv.init(4, sparse([1]))
    out = sparse([], size=4)
    kv.pull(4, out)
    assert out._nnz() == 0
    kv.pull(4, out, ignore_sparse=False)
    assert out.to_dense().equal(sparse([1]).to_dense())
    dense = torch.empty(4, 3)
    kv.pull(4, dense)
    assert dense.equal(sparse([1]).to_dense())


@row("`kv.pushpull(key, value, out, priority)`")
def test_pushpull(kv):
    out, value = ones(0.0), ones(5.0)
    kv.pushpull(3, [ones(2.0), ones(3.0)], out, 1)
    assert_same(out, ones(5.0))
    kv.set_updater(lambda key, input, stored: stored.add_(input))
    kv.pushpull(3, value)  # without out, into the value
    assert_same(value, ones(10.0))


@row("`kv.broadcast(key, value, out, priority)`")
def test_broadcast(kv):
    outs = [ones(0.0), ones(0.0)]
    kv.broadcast(4, ones(2.0), outs, 1)
    for tensor in (*outs, kv.pull(4)):
        assert_same(tensor, ones(2.0))
    with pytest.raises(ValueError):  # as in MXNet
        kv.broadcast(4, ones(2.0), outs)


@row("`kv.row_sparse_pull(key, out, priority, row_ids)`")
def test_rows_of_dense_keys_in_the_order_asked(kv):
    value = torch.arange(12.0).reshape(4, 3)
    kv.init([4, 5], [value, value.to_sparse(1)])
    ids = torch.tensor([2, 0, 2])
    for key in (4, 5):
        out = torch.empty(3, 3)
        kv.row_sparse_pull(key, out, 0, ids)
        assert out.equal(value[ids])
        assert kv.row_sparse_pull(key, row_ids=ids).equal(value[ids])
        out = sparse([], size=4)
        kv.row_sparse_pull(key, out, row_ids=ids)
        assert out.coalesce().indices().tolist() == [[0, 2]]


@row("`kv.set_gradient_compression(compression_params)`")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_gradient_compression(dtype):
    dtype = getattr(torch, dtype)
    params = {"type": "2bit", "threshold": 0.5}
    with torchkv.create("device") as store:
        store.set_gradient_compression(params)
        store.init(3, torch.zeros(2, dtype=dtype))
        store.push(3, [torch.tensor([0.75, 0.25], dtype=dtype)] * 2)
        assert_same(store.pull(3), torch.tensor([1.0, 0.0], dtype=dtype))
    with torchkv.create("local") as store, pytest.raises(ValueError, match="local"):
        store.set_gradient_compression(params)


@row("`kv.set_optimizer(optimizer)`")
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("sgd", {"learning_rate": 0.5}),
        (torchkv.optim.SGD(lr=0.5), {}),
        (torch.optim.SGD, {"lr": 0.5}),
    ],
    ids=["name", "object", "class"],
)
def test_optimizers(kv, optimizer, options):
    kv.set_optimizer(optimizer, **options)
    kv.push(3, ones())
    assert_same(kv.pull(3), ones(0.5))


@row("`kv._set_updater(updater)`")
def test_an_exception_reaches_the_caller(kv):
    def fails(key, input, stored):
        raise LookupError("from the updater")

    kv._set_updater(fails)
    with pytest.raises(LookupError, match="from the updater"):
        kv.push(3, ones())
    assert torchkv.KVStore._set_updater is torchkv.KVStore.set_updater


@row("`kv._set_updater(updater)`")
@pytest.mark.parametrize("takes_rows", [False, True])
def test_updaters_of_row_sparse_arrays(kv, takes_rows):
    inputs = []
    kv.init(4, torch.zeros(4, 3))
    kv.set_updater(
        lambda key, input, stored: inputs.append(input.layout), sparse=takes_rows
    )
    kv.push(4, sparse([1]))
    assert inputs == [torch.sparse_coo if takes_rows else torch.strided]


@row("`kv._barrier()`")
def test_barrier(kv):
    assert kv._barrier() is None and kv.barrier() is None


@row("`kv.save_optimizer_states(fname, dump_optimizer)`")
@row("`kv.load_optimizer_states(fname)`")
def test_files_of_optimizer_states(kv, tmp_path):
    kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
    kv.push(3, ones())
    kv.save_optimizer_states(tmp_path / "plain")
    kv.save_optimizer_states(tmp_path / "all", True)
    plain, all = (torch.load(tmp_path / name) for name in ("plain", "all"))
    assert "param_groups" in all and "param_groups" not in plain
    assert_same(all["state"][3]["mom"], ones(-1.0))
    with torchkv.create() as other:
        other.init(3, kv.pull(3))
        other.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        other.load_optimizer_states(tmp_path / "plain")
        kv.push(3, ones())
        other.push(3, ones())
        assert_same(other.pull(3), kv.pull(3))
    (tmp_path / "mxnet").write_bytes(pickle.dumps({}))
    with pytest.raises(ValueError, match="of another kind"):
        kv.load_optimizer_states(tmp_path / "mxnet")


@row("`kv.is_capable(capability)`")
def test_capabilities(kv):
    assert kv.is_capable("optimizer")
    for unknown in ("OPTIMIZER", "sparse"):  # of which MXNet takes the first
        with pytest.raises(ValueError, match="unknown capability"):
            kv.is_capable(unknown)


@row("`kv.type`, `kv.rank`, `kv.num_workers`")
def test_what_a_store_is():
    kv = torchkv.create("local_allreduce_device")
    assert (kv.type, kv.rank, kv.num_workers) == ("device", 0, 1)
    assert torchkv.create("local_update_cpu").type == "local"


@row("`kv._send_command_to_servers(head, body)`")
def test_options_reach_the_store_without_commands(kv):
    assert not hasattr(kv, "_send_command_to_servers")
    kv.set_optimizer("sgd", learning_rate=1.0)
    kv.optimizer.lr = 0.5
    kv.push(3, ones())
    assert_same(kv.pull(3), ones(0.5))


@row("`mx.kv.KVStore`")
def test_the_class_makes_a_store():
    assert torchkv.KVStore("device").type == "device"
    assert isinstance(torchkv.create(), torchkv.KVStore)


def register_a_type():
    @torchkv.KVStoreBase.register
    class Own(torchkv.KVStoreBase):
        broadcast = pushpull = None

    assert type(torchkv.create("own")) is Own
    torchkv.register("named")(Own)
    assert type(torchkv.create("named")) is Own
    for taken in ("own", "named", "local", "dist"):  # which MXNet would replace
        with pytest.raises(ValueError, match=taken):
            torchkv.register(taken)(Own)
    with pytest.raises(ValueError, match="'local'.*'dist_sync'.*'named'.*'own'"):
        torchkv.create("unknown")


@row("`mx.kv.KVStoreBase.register(klass)`", "`mx.kv.KVStoreBase.kv_registry`")
def test_registered_types():
    check_in_child(register_a_type)  # a type stays for the rest of the process


@row("`mx.kv.KVStoreBase`, `mx.kv.KVStoreBase.OPTIMIZER`")
def test_a_type_of_your_own(kv):
    base = torchkv.KVStoreBase
    assert base.OPTIMIZER == "optimizer" and kv.is_capable(base.OPTIMIZER)
    assert base.__abstractmethods__ == {"broadcast", "pushpull"}
    for of_optimizers in ("set_optimizer", "save_optimizer_states"):
        assert not hasattr(base, of_optimizers) and hasattr(kv, of_optimizers)
    own = type("Own", (base,), {"broadcast": None, "pushpull": None})()
    assert not own.is_capable(base.OPTIMIZER)


@row("`mx.kv.KVStoreServer`")
def test_there_is_no_class_of_servers():
    """That each rank is a server is tested in test_from_mxnet_launch.py."""
    assert not hasattr(torchkv, "KVStoreServer")


def test_every_row_has_a_test():
    row.check()
