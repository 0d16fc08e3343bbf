"""Row-sparse keys in every saved form; saved forms that do not fit."""

import copy
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import torchkv
from helpers import assert_same, bits, jit_save_load, script
from row_values import some_rows
from saved_stores import rewritten
from torchkv import optim
from torchkv.compression import TwoBit
from torchkv.initializers import Normal, Uniform, Zeros

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

SHAPE = (40, 3)


def trained(seed=1, type="local"):
    """Rows in another order than that of their ids, deleted ones, a dense key."""
    kv = torchkv.create(type)
    kv.init_rows("zeros", SHAPE[1:], torch.bfloat16, num_rows=SHAPE[0])
    kv.init_rows("normal", SHAPE[1:], init=Normal(std=0.5, seed=2**62))
    kv.init_rows("empty", (), torch.int64, num_rows=7)
    kv.init("dense", torch.ones(2, 3))
    kv.set_optimizer(optim.Adam(lr=0.1, max_norm=0.7))
    go_on(kv, seed)
    kv.delete("normal", row_ids=torch.arange(10, 20))
    return kv


def go_on(kv, seed):
    torch.manual_seed(seed)
    for count in (5, 9, 3):
        keys = ["zeros", "normal", "dense"]
        values = [some_rows(SHAPE, count, torch.bfloat16), some_rows(SHAPE, count),
                  torch.randn(2, 3)]  # fmt: skip
        kv.push(keys, values)


def saved_and_loaded(kv, path):
    kv.save(path)
    return torchkv.load(path)


def by_state_dict(kv, path):
    other = torchkv.create("device")
    torch.save(kv.state_dict(), path)
    other.load_state_dict(torch.load(path, weights_only=True))
    return other


def into_a_store_with_keys(kv, path):
    other = trained(seed=7)
    other.load_state_dict(kv.state_dict())
    return other


def by_torchscript(kv, path):
    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.kv = kv.script_object

        def forward(self):
            return len(self.kv)

    module = jit_save_load(script(Holder()))
    return torchkv.KVStore.from_script_object(module.kv)


FORMS = {
    "folder": saved_and_loaded,
    "state_dict": by_state_dict,
    "state_dict into keys": into_a_store_with_keys,
    "deepcopy": lambda kv, path: copy.deepcopy(kv),
    "pickle": lambda kv, path: pickle.loads(pickle.dumps(kv)),
    "TorchScript": by_torchscript,
}


def content(kv):
    """All bits of a store: rows with their ids, state, and rows that are not there."""
    keys = ["zeros", "normal", "empty", "dense"]
    values = [kv.pull(key) for key in keys]
    parts = [part for v in values for part in ((v.indices(), v.values())
             if v.is_sparse else (v,))]  # fmt: skip
    parts.append(kv.row_sparse_pull("normal", row_ids=torch.arange(50)))
    states = kv.optimizer.state
    parts += [x for key in keys[:2] for _, x in sorted(states[key].items())
              if isinstance(x, torch.Tensor)]  # fmt: skip
    return [bits(part) for part in parts], [(k, kv.version(k)) for k in kv.keys()]


@pytest.mark.parametrize("type", ["local", "device"])
@pytest.mark.parametrize("form", FORMS)
def test_saved_and_resumed_bit_by_bit(form, type, tmp_path):
    """Also with a norm, whose sum is in the order of the rows in memory."""
    kv = trained(type=type)
    other = FORMS[form](kv, tmp_path / "saved")
    assert content(other) == content(kv)
    assert [*other.shape("normal")] == [*kv.shape("normal")]
    for store in (kv, other):
        go_on(store, 3)
    assert content(other) == content(kv)
    assert other.optimizer.grad_norm == kv.optimizer.grad_norm


@pytest.mark.parametrize(
    "form", [form for form in FORMS if form != "state_dict into keys"]
)
def test_beside_residuals_of_compression(form, tmp_path):
    kv = trained(type="device")
    kv.set_gradient_compression(TwoBit(0.3))
    go_on(kv, 2)
    other = FORMS[form](kv, tmp_path / "saved")
    for seed in (3, 4):
        assert content(other) == content(kv)
        (actual,), (expected,) = (
            store.state_dict()["keys"]["dense"]["residuals"] for store in (other, kv)
        )
        assert expected.any() and torch.equal(actual, expected)
        for store in (kv, other):
            go_on(store, seed)


def test_checkpoint_of_torch_distributed(tmp_path):
    kv = trained()
    dcp.save({"kv": kv}, checkpoint_id=tmp_path)
    other = copy.deepcopy(kv)
    other.push(["zeros", "normal"], [kv.pull("zeros"), kv.pull("normal")])
    assert content(other) != content(kv)
    dcp.load({"kv": other}, checkpoint_id=tmp_path)
    assert content(other) == content(kv)


def test_checkpoint_into_a_store_with_another_initial_value(tmp_path):
    stores = []
    for init in (Normal(mean=3.0, std=5.0, seed=1), Zeros()):
        kv = torchkv.create()
        kv.init_rows(3, (2,), num_rows=9, init=init)
        kv.push(3, torch.eye(9)[:, :2].to_sparse(1))
        stores.append(kv)
    dcp.save({"kv": stores[0]}, checkpoint_id=tmp_path)
    dcp.load({"kv": stores[1]}, checkpoint_id=tmp_path)
    rows = [kv.row_sparse_pull(3, row_ids=torch.arange(9)) for kv in stores]
    assert_same(rows[1], rows[0])
    assert rows[0].unique().numel() > 9


def test_checkpoint_into_a_store_with_other_rows(tmp_path):
    kv = trained()
    dcp.save({"kv": kv}, checkpoint_id=tmp_path)
    other = torchkv.create()
    other.load_state_dict(kv.state_dict())
    other.delete("zeros", row_ids=other.pull("zeros").indices()[0][:1])
    before = content(other)
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load({"kv": other}, checkpoint_id=tmp_path)
    assert content(other) == before


def test_without_an_optimizer(tmp_path):
    kv = torchkv.create()
    kv.init_rows(3, (2,), torch.float64, num_rows=9, init=Uniform(-2, 5, seed=-1))
    kv.push(3, some_rows((9, 2), 3, torch.float64))
    other = saved_and_loaded(kv, tmp_path)
    ids = torch.arange(9)
    assert_same(
        other.row_sparse_pull(3, row_ids=ids), kv.row_sparse_pull(3, row_ids=ids)
    )
    assert other.num_rows(3) == kv.num_rows(3)


def test_rows_in_another_order_are_the_same_store():
    kv = trained()
    state = kv.state_dict()
    item = state["keys"]["normal"]
    order = torch.randperm(len(item["rows"]["ids"]))
    item["value"] = item["value"][order]
    item["rows"]["ids"] = item["rows"]["ids"][order]
    item["state"] = {name: x[order] for name, x in item["state"].items()}
    other = torchkv.create()
    other.load_state_dict(state)
    assert content(other) == content(kv)


def test_optimizer_states_are_in_the_order_of_ids(tmp_path):
    kv, file = trained(), tmp_path / "states"
    kv.save_optimizer_states(file)
    before = content(kv)
    # The same rows at other places in memory.
    ids = kv.pull("zeros").indices()[0]
    other = copy.deepcopy(kv)
    other.delete("zeros", row_ids=ids)
    other.push("zeros", kv.pull("zeros"))
    other.assign("zeros", kv.pull("zeros"))
    other.load_optimizer_states(file)
    assert content(other)[0] == before[0]


@pytest.mark.parametrize("what", ["fewer", "others"])
def test_states_of_other_rows(what, tmp_path):
    kv, file = trained(), tmp_path / "states"
    kv.save_optimizer_states(file)
    first = kv.pull("zeros").indices()[0][:1]
    kv.delete("zeros", row_ids=first)
    if what == "others":
        kept = {*kv.pull("zeros").indices()[0].tolist(), int(first)}
        new = next(row for row in range(SHAPE[0]) if row not in kept)
        rows = torch.ones(1, 3, dtype=torch.bfloat16)
        kv.push("zeros", torch.sparse_coo_tensor([[new]], rows, SHAPE))
    before = content(kv)
    with pytest.raises(ValueError, match=r"state of the \d+ rows .*\(key 'zeros'\)"):
        kv.load_optimizer_states(file)
    assert content(kv) == before


def test_an_unlimited_key_of_empty_rows_loads_its_own_state():
    kv = torchkv.create()
    kv.init_rows(3, (0, 4))
    kv.push(3, torch.sparse_coo_tensor([[7]], torch.ones(1, 0, 4), (8, 0, 4)))
    kv.load_state_dict(kv.state_dict())
    assert kv.pull(3).indices().tolist() == [[7]]


def test_a_store_without_such_keys_has_the_form_of_before(tmp_path):
    kv = torchkv.create()
    kv.init(3, torch.ones(2))
    kv.save(tmp_path)
    assert "row_sparse" not in (tmp_path / "manifest.json").read_text()
    assert "rows" not in kv.state_dict()["keys"]["3"]


# -- what does not fit

DAMAGES = {
    "a repeated id": (lambda rows: rows["ids"].fill_(3), "distinct ids"),
    "an id out of range": (lambda rows: rows["ids"].fill_(99), "row ids from 0 to 39"),
    "too few ids": (lambda rows: rows.update(ids=rows["ids"][1:]), "ids of its rows"),
    "float ids": (lambda rows: rows.update(ids=rows["ids"].float()), "int64"),
    "ids of two dimensions": (
        lambda rows: rows.update(ids=rows["ids"][None]), "ids of its rows"),
    "negative rows": (lambda rows: rows.update(num_rows=-2), r"\[-2, 3\]"),
    "an unknown initial value": (lambda rows: rows.update(init="ones"), "ones"),
    "a missing number": (lambda rows: rows.pop("seed"), "missing 'seed'"),
    "an unknown number": (
        lambda rows: rows.update(numbers={"mean": 0.0}), "unexpected number"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_states_change_nothing(damage):
    kv = trained()
    state = kv.state_dict()
    change, message = DAMAGES[damage]
    change(state["keys"]["zeros"]["rows"])
    other = trained(seed=7)
    before = content(other)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)
    assert content(other) == before


@pytest.mark.parametrize("dense_first", [True, False])
def test_a_dense_state_of_a_row_sparse_key(dense_first):
    kinds = torchkv.create(), torchkv.create()
    kinds[0].init(3, torch.ones(2, 3))
    kinds[1].init_rows(3, (3,), num_rows=2)
    kinds[1].push(3, torch.ones(2, 3))
    store, other = kinds if dense_first else kinds[::-1]
    with pytest.raises(ValueError, match=r"expected a (dense|row-sparse) value.*key 3"):
        store.load_state_dict(other.state_dict())


def test_another_number_of_rows_may_be():
    store, other = torchkv.create(), torchkv.create()
    store.init_rows(3, (3,), num_rows=2)
    other.init_rows(3, (3,))
    with pytest.raises(ValueError, match=r"expected a value of .*\(key 3\)"):
        store.load_state_dict(other.state_dict())


@pytest.mark.parametrize("what", ["ids", "key"])
def test_a_folder_without_the_ids(what, tmp_path):
    trained().save(tmp_path)

    def change(manifest):
        entry = manifest["row_sparse"][0]
        if what == "ids":
            manifest["row_sparse"].append(["dense", *entry[1:]])
        else:
            entry[0] = "other"

    rewritten(tmp_path, change)
    with pytest.raises(ValueError, match="missing ids of rows"):
        torchkv.load(tmp_path)
