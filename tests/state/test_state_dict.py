"""state_dict and load_state_dict, and PyTorch's tools that call them."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful

import torchkv
from helpers import (
    Momentum,
    add_input,
    assert_same,
    full,
    script,
    snapshot,
    stored,
)
from saved_stores import NUMBERS, everything, set_optimizer, trained

every_optimizer = pytest.mark.parametrize("optimizer", NUMBERS)


def through_torch_save(store, folder):
    torch.save(store.state_dict(), folder / "state.pt")
    return torch.load(folder / "state.pt", weights_only=True)


def refuses(store, state, match, strict=True):
    before = everything(store)
    with pytest.raises(ValueError, match=match):
        store.load_state_dict(state, strict=strict)
    assert everything(store) == before


@every_optimizer
def test_an_empty_store_becomes_the_saved_one(store_type, tmp_path, optimizer):
    gradient = {"accumulate": 2.0}
    with trained(store_type, optimizer, gradient=gradient) as store:
        state = through_torch_save(store, tmp_path)
        other = torchkv.create(store_type)
        other.load_state_dict(state)
        assert everything(other) == everything(store)
        for each in store, other:
            each.push([3, 2**40], [full(1), full(4)])
            each.push([3, 2**40], [full(2), full(4)])
        assert snapshot(other) == snapshot(store)


def test_it_is_plain_and_shares_no_memory(kv):
    kv.init(["w", "3"], [full(1), full(2)])
    state = kv.state_dict()
    assert state["key_kind"] == "str" and list(state["keys"]) == ["w", "3"]
    state["keys"]["w"]["value"].fill_(9)
    assert_same(stored(kv, "w"), full(1))
    kv.load_state_dict(state)
    assert_same(stored(kv, "w"), full(9))
    state["keys"]["w"]["value"].fill_(7)
    assert_same(stored(kv, "w"), full(9))


def test_int_and_str_keys_are_distinguished():
    states = []
    for key in (3, "3"):
        with torchkv.create() as store:
            store.init(key, full(1))
            states.append(store.state_dict())
    for state, other, key in [(*states, "3"), (*states[::-1], 3)]:
        with torchkv.create() as store:
            store.load_state_dict(state)
            assert store.keys() == [3 if key == "3" else "3"]
            refuses(store, other, "keys, as the store has")


def test_a_script_updater_is_saved_with_its_state(tmp_path):
    with torchkv.create() as kv:
        kv.set_updater(script(Momentum()))
        kv.init(3, full(100))
        kv.push(3, full(1))
        state = through_torch_save(kv, tmp_path)
        others = [torchkv.create() for _ in range(2)]
        others[1].init(3, full(5))
        others[1].set_updater(script(Momentum()))
        for other in others:
            other.load_state_dict(state)
            other.push(3, full(1))
            assert_same(stored(other, 3), full(96))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@every_optimizer
def test_torch_distributed_checkpoint(tmp_path, optimizer):
    with trained(optimizer=optimizer) as store, torchkv.create() as other:
        assert isinstance(store, Stateful)
        dcp.save({"store": store}, checkpoint_id=tmp_path)
        keys = store.keys()[::-1]  # in another order, and no step yet
        other.init(keys, [torch.zeros(store.shape(key)) for key in keys])
        set_optimizer(other, optimizer)
        dcp.load({"store": other}, checkpoint_id=tmp_path)
        assert other.keys() == keys
        assert other.state_dict()["optimizer"] == store.state_dict()["optimizer"]
        assert everything(other)[1] == everything(store)[1]
        for each in store, other:
            each.push([3, 2**40], [full(1), full(4)])
        assert sorted(snapshot(other)) == sorted(snapshot(store))


def stepped(**options):
    store = torchkv.create()
    store.init([3, 5], [full(8), full(8)])
    store.set_optimizer("sgd", **options)
    store.push([3, 5], [full(1), full(2)])
    return store


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_torch_distributed_checkpoint_has_all_options(tmp_path):
    """Including options that the store lacks or has set to other values."""
    store = stepped(
        momentum=0.5,
        max_norm=1.0,
        lr_scheduler=torchkv.lr_scheduler.FactorScheduler(1, base_lr=0.5),
    )
    store.optimizer.set_param_groups([{"keys": [3], "weight_decay": 0.5}])
    store.optimizer.set_lr_mult({5: 0.25})
    store.optimizer.param_groups[0]["initial_lr"] = 0.125
    dcp.save({"store": store}, checkpoint_id=tmp_path)
    other = stepped(learning_rate=0.25, momentum=0.25, accumulate=1)
    other.optimizer.set_param_groups([{"keys": [3]}, {"keys": [5], "lr": 0.1}])
    dcp.load({"store": other}, checkpoint_id=tmp_path)
    assert other.state_dict()["optimizer"] == store.state_dict()["optimizer"]
    for each in store, other:
        each.push([3, 5], [full(1), full(3)])
    assert snapshot(other) == snapshot(store)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_torch_distributed_checkpoint_loses_no_state(tmp_path):
    """It only loads tensors that the store has: here, none of the momentum."""
    dcp.save({"store": stepped(momentum=0.5)}, checkpoint_id=tmp_path)
    other = stepped()
    before = everything(other)
    with pytest.raises(ValueError, match=r"missing state 'mom' \(key 3\)"):
        dcp.load({"store": other}, checkpoint_id=tmp_path)
    assert everything(other) == before


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(
    "change",
    [
        lambda store: store.set_optimizer(torch.optim.NAdam),
        lambda store: store.set_gradient_compression({"type": "2bit"}),
    ],
)
@pytest.mark.parametrize("has_keys", [True, False])
def test_torch_distributed_checkpoint_of_a_part_that_the_store_lacks(
    change, has_keys, tmp_path
):
    stores = [torchkv.create("device"), torchkv.create("device")]
    stores[0].init(3, full(2))
    if has_keys:
        stores[1].init(3, full(1))
    change(stores[0])
    stores[0].push(3, full(4))
    before = everything(stores[1])
    dcp.save({"store": stores[0]}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointException, match="Missing key"):
        dcp.load({"store": stores[1]}, checkpoint_id=tmp_path)
    assert everything(stores[1]) == before


def test_options_may_be_dicts(kv):
    """As earlier versions wrote them."""
    kv.init(3, full(1))
    kv.set_optimizer("sgd", learning_rate=0.5)
    state = kv.state_dict()
    optimizer = state["optimizer"]
    optimizer["groups"] = [dict(group) for group in optimizer["groups"]]
    optimizer["gradient"] = dict(optimizer["gradient"])
    with torchkv.create() as other:
        other.load_state_dict(state)
        assert other.state_dict()["optimizer"] == kv.state_dict()["optimizer"]
        optimizer["gradient"] = [["lazy", 1.0], ["lazy", 1.0]]
        refuses(other, state, "repeated name in 'gradient' in 'optimizer' 'lazy'")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_distributed_checkpoint_of_an_updater(tmp_path):
    with torchkv.create() as store, torchkv.create() as other:
        for each in store, other:
            each.set_updater(script(Momentum()))
            each.init(3, full(100))
        store.push(3, full(1))
        dcp.save({"store": store}, checkpoint_id=tmp_path)
        dcp.load({"store": other}, checkpoint_id=tmp_path)
        other.push(3, full(1))
        assert_same(stored(other, 3), full(96))


def late_momentum(store, momentum=0.5):
    store.init([3, 5], [full(8), full(8)])
    store.set_optimizer("sgd", learning_rate=1.0)
    store.push(3, full(1))
    store.optimizer.param_groups[0].update(momentum=momentum, dampening=momentum)


def test_a_momentum_that_began_after_the_first_step(kv, tmp_path):
    late_momentum(kv)
    with torchkv.create() as other:
        other.load_state_dict(through_torch_save(kv, tmp_path))
        for store in (kv, other):
            store.push([3, 5], [full(1), full(1)])
        assert snapshot(other) == snapshot(kv)
        assert_same(stored(kv, 3), full(6))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_torch_distributed_checkpoint_of_a_late_momentum(tmp_path):
    with torchkv.create() as store, torchkv.create() as other:
        late_momentum(store)
        dcp.save({"store": store}, checkpoint_id=tmp_path)
        other.init([3, 5], [full(0), full(0)])
        other.set_optimizer("sgd", momentum=0.5)
        mine = other.optimizer
        dcp.load({"store": other}, checkpoint_id=tmp_path)
        assert other.optimizer is mine
        for each in store, other:
            each.push([3, 5], [full(1), full(1)])
        assert snapshot(other) == snapshot(store)


# -- strict or not


def test_missing_and_unexpected_keys():
    with trained() as store:
        state = store.state_dict()
        store.push(3, full(1))
        less = copy.copy(state)
        less["keys"] = {k: v for k, v in state["keys"].items() if k != "-5"}
        refuses(store, less, r"1 missing \(key -5\)")
        more = copy.copy(state)
        more["keys"] = {**state["keys"], "77": state["keys"]["3"]}
        refuses(store, more, r"1 unexpected \(key 77\)")

        before, old = everything(store)[1]["keys"], store.keys()
        store.load_state_dict(less, strict=False)
        store.load_state_dict(
            {**more, "keys": {"77": more["keys"]["77"]}}, strict=False
        )
        after = everything(store)[1]["keys"]
        assert store.keys() == old
        assert after["-5"] == before["-5"] and after["3"] != before["3"]
        assert_same(store.pull(3), state["keys"]["3"]["value"])


def test_invalid_parts_are_refused():
    with trained() as store:
        state = store.state_dict()

        def wrong(match, key="3", **fields):
            keys = {**state["keys"], key: {**state["keys"][key], **fields}}
            refuses(store, {**state, "keys": keys}, match)

        wrong(r"shape \[2, 3\].*\[3, 2\].*\(key 3\)", value=torch.zeros(3, 2))
        wrong(r"torch.float32.*torch.float64.*\(key 3\)", value=full(1).double())
        wrong(r"'value' in key 3 as Tensor, but got 3", value=3)
        wrong(r"'exp_avg' in 'state' in key 3 as Tensor", state={"exp_avg": 3})
        wrong(r"missing state 'exp_avg' \(key 3\)", state={})
        wrong("'state' in key 3 as dict, but got", state=[])  # unlike options
        wrong(r"missing state 'accumulated' \(key 3\)", num_accumulated=1)
        for dtype in (torch.int64, torch.bool):
            states = dict(state["keys"]["3"]["state"], exp_avg=full(1).to(dtype))
            wrong(rf"'exp_avg'.*{dtype}.*\(key 3\)", state=states)
        wrong(
            r"shape.*\(key 3\)",
            state=dict.fromkeys(("exp_avg", "exp_avg_sq"), full(1)[0]),
        )
        wrong(r"'step' in key 3 as int, but got 1.5", step=1.5)
        wrong("step", step=-1)
        wrong(r"'version' in key 3 as int", version=None)
        wrong("unexpected 'news' in key 3", news=1)

        optimizer = state["optimizer"]
        for match, fields in [
            ("format 99", {"format": 99}),
            ("'int' or 'str'", {"key_kind": "float"}),
            ("expected str keys in 'options'", {"key_kind": "str"}),
            ("store type", {"type": "x"}),
            ("'optimizer'", {"optimizer": 3}),
            ("'adam'.*no optimizer", {"optimizer": None}),
            ("'adam'.*'sgd'", {"optimizer": {**optimizer, "name": "sgd"}}),
            ("'lr'", {"optimizer": {**optimizer, "groups": [{"lr": None}]}}),
            ("'adan'|lr", {"optimizer": {**optimizer, "groups": [{"lr": -1.0}]}}),
            ("group", {"optimizer": {**optimizer, "options": [[3, 9, 1.0, 1.0]]}}),
            ("group", {"optimizer": {**optimizer, "extras": [[9, "max_lr", 1.0]]}}),
            ("list of 3", {"optimizer": {**optimizer, "extras": [[0, "max_lr"]]}}),
            (
                "extras.*'x'",
                {"optimizer": {**optimizer, "extras": [[0, "max_lr", "x"]]}},
            ),
            ("list of 2", {"absent": [[3]]}),
            ("int keys in 'absent', but got '3'", {"absent": [["3", "exp_avg"]]}),
            ("base64", {"updater": "ä"}),
            ("missing 'value' in key 3", {"keys": {"3": {}}}),
            (
                "name in 'keys' as int, but got '03'",
                {"keys": {"03": state["keys"]["3"]}},
            ),
            ("64|int", {"keys": {str(2**70): state["keys"]["3"]}}),
        ]:
            refuses(store, {**state, **fields}, match)
        # Which earlier versions lack.
        for field in state.keys() - {"compression", "torch_optimizer"}:
            rest = {name: part for name, part in state.items() if name != field}
            refuses(store, rest, f"'{field}'")
        refuses(store, {}, "'format'")
        refuses(store, [], "dict")
        store.load_state_dict(state)


def test_another_optimizer_and_none():
    with trained() as adam, trained(optimizer="sgd") as sgd, torchkv.create() as plain:
        plain.init(adam.keys(), [adam.pull(key) for key in adam.keys()])
        refuses(adam, sgd.state_dict(), "'adam'.*'sgd'")
        refuses(plain, sgd.state_dict(), "no optimizer.*'sgd'")
        refuses(sgd, plain.state_dict(), "'sgd'.*no optimizer")
        refuses(sgd, plain.state_dict(), "'sgd'.*no optimizer", strict=False)


def test_adam_and_adamw_are_distinguished():
    with torchkv.create() as adam, torchkv.create() as adamw:
        for store, cls in [(adam, torchkv.optim.Adam), (adamw, torchkv.optim.AdamW)]:
            store.init(3, full(1))
            store.set_optimizer(cls())
        refuses(adamw, adam.state_dict(), "'adamw'.*'adam'")
        refuses(adam, adamw.state_dict(), "'adam'.*'adamw'")
        adamw.load_state_dict(adamw.state_dict())


def test_the_hyper_parameters_come_from_the_state():
    with trained() as store:
        state = store.state_dict()
        set_optimizer(store, "adam", gradient={"max_norm": 1.0})
        store.load_state_dict(state)
        assert store.state_dict()["optimizer"] == state["optimizer"]


def test_a_python_updater_is_kept(kv):
    kv.init(3, full(1))
    state = kv.state_dict()
    kv.set_updater(add_input)
    message = "expected an updater that can be copied .* Python callable of type func"
    with pytest.raises(TypeError, match=f"^load_state_dict: {message}"):
        kv.load_state_dict(state)
    with pytest.raises(TypeError, match=f"^state_dict: {message}"):
        kv.state_dict()
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(2))


def test_a_closed_store(kv):
    kv.init(3, full(1))
    state = kv.state_dict()
    kv.close()
    for call in [kv.state_dict, lambda: kv.load_state_dict(state)]:
        with pytest.raises(RuntimeError, match="closed"):
            call()
