"""What one rank refuses to load, no rank loads, and a joint second try succeeds."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ranks
import torchkv
from ranks import outcome
from three_keys import SIZES, equal, make, step

OPTIMIZERS = {
    "a built-in one": lambda lr: torchkv.optim.Adam(lr=lr),
    "a class": lambda lr: (torch.optim.NAdam, {"lr": lr}),
}


def set_optimizer(kv, optimizer, lr):
    made = OPTIMIZERS[optimizer](lr)
    if isinstance(made, tuple):
        kv.set_optimizer(made[0], **made[1])
    else:
        kv.set_optimizer(made)


def whole_state(kv):
    """Rank 0's, on every rank."""
    states = [None]
    if kv.rank == 0:
        states = [kv.state_dict()]
    else:
        kv.state_dict()
    torch.distributed.broadcast_object_list(states)
    return states[0]


def damaged(state):
    """With a state of another shape for one key."""
    state = copy.deepcopy(state)
    if "keys" not in state:  # of an optimizer
        moments = state["state"]["b"]
    elif state["torch_optimizer"]:
        moments = state["torch_optimizer"]["state"]["b"]
    else:
        moments = state["keys"]["b"]["state"]
    moments["exp_avg"] = moments["exp_avg"][1:]
    return state


def load_store_state(kv, state, folder):
    kv.load_state_dict(state)


def load_optimizer_state(kv, state, folder):
    kv.optimizer.load_state_dict(state)


def load_optimizer_file(kv, state, folder):
    torch.save(state, f"{folder}/{kv.rank}.pt")
    kv.load_optimizer_states(f"{folder}/{kv.rank}.pt")


def load_folder(kv, state, folder):
    kv.load(state)


def refused_by_one(rank, call, optimizer, folder):
    torch.distributed.init_process_group("gloo")
    kv = make(whole=True)
    set_optimizer(kv, optimizer, lr=0.1)
    step(kv, 0, rank)
    kv.barrier()
    if call is load_folder:
        kv.save(f"{folder}/store")
        good, bad = f"{folder}/store", f"{folder}/nothing"
    else:
        is_whole = call is load_store_state
        good = whole_state(kv) if is_whole else kv.optimizer.state_dict()
        bad = damaged(good)
    saved = kv.pull(list(SIZES))
    expected = step(kv, 1, rank)
    kv.barrier()
    set_optimizer(kv, optimizer, lr=0.5)
    before = step(kv, 2, rank)
    kv.barrier()
    refused = outcome(lambda: call(kv, bad if rank == 1 else good, folder))
    unchanged = equal(before, kv.pull(list(SIZES))) and kv.optimizer.lr == 0.5
    call(kv, good, folder)
    if call in (load_optimizer_state, load_optimizer_file):
        kv.assign(list(SIZES), saved)
    loaded = equal(step(kv, 1, rank), expected) and kv.optimizer.lr == 0.1
    kv.barrier()
    kv.close()
    torch.distributed.destroy_process_group()
    return refused, unchanged, loaded


CALLS = {
    "load_state_dict": load_store_state,
    "optimizer.load_state_dict": load_optimizer_state,
    "load_optimizer_states": load_optimizer_file,
    "load": load_folder,
}


@pytest.mark.parametrize(
    ("call", "optimizer"),
    [
        (call, optimizer)
        for call in CALLS
        for optimizer in OPTIMIZERS
        if call != "load" or optimizer != "a class"  # which no folder can hold
    ],
)
def test_what_one_rank_refuses_changes_nothing(call, optimizer, tmp_path):
    found = ranks.run(refused_by_one, 2, CALLS[call], optimizer, str(tmp_path))
    for rank, ((kind, text), unchanged, loaded) in enumerate(found):
        if rank == 0:
            # It has failed, or has begun the second call already.
            assert kind == "RemoteError" and ": rank 1 has " in text
        else:
            assert kind == ("FileNotFoundError" if call == "load" else "ValueError")
        assert unchanged and loaded


def wrong_options(optimizer, state):
    """States of options that are only found to be wrong together, or by the rule."""
    if optimizer == "a class":
        groups = [{**group, "lr": -1.0} for group in state["param_groups"]]
        twice = {**state["param_groups"][0], "keys": ["a", "a"]}
        return [
            {**state, "param_groups": groups},
            {**state, "param_groups": [*state["param_groups"], twice]},
        ]
    return [{**state, "gradient": {**state["gradient"], "accumulate": 0}}]


def options_refused_by_one(rank, optimizer):
    kv = make(whole=True, timeout=20)
    set_optimizer(kv, optimizer, lr=0.1)
    good = kv.optimizer.state_dict()
    set_optimizer(kv, optimizer, lr=0.5)
    refused = []
    for bad in wrong_options(optimizer, good):
        state = bad if rank == 1 else good
        refused.append(outcome(lambda s=state: kv.optimizer.load_state_dict(s))[0])
        refused.append(kv.optimizer.lr)
    kv.optimizer.load_state_dict(good)
    refused.append(kv.optimizer.lr)
    kv.barrier()
    kv.close()
    return refused


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_options_that_one_rank_refuses_change_nothing(optimizer):
    num_wrong = 2 if optimizer == "a class" else 1
    assert ranks.run(options_refused_by_one, 2, optimizer) == [
        [kind, 0.5] * num_wrong + [0.1] for kind in ("RemoteError", "ValueError")
    ]


def load_states_without_keys(rank):
    """All ranks make the same calls, whatever states there are for them."""
    kv = make(timeout=20)
    kv.set_optimizer(torchkv.optim.Adam(lr=0.1))
    step(kv, 0, rank)
    kv.barrier()
    state = kv.optimizer.state_dict()
    if rank == 1:
        state["state"] = {}
    kv.optimizer.lr = 0.5
    kv.optimizer.load_state_dict(state, strict=False)
    lr = kv.optimizer.lr
    kv.barrier()
    kv.close()
    return lr


def test_a_rank_without_states_makes_the_same_calls():
    assert ranks.run(load_states_without_keys, 2) == [0.1, 0.1]


def train(trainer, model, number):
    model(torch.full((2, 30), float(number))).sum().backward()
    trainer.step(2)
    return [p.detach().clone() for p in model.parameters()]


def trainer_of(optimizer):
    model = torch.nn.Linear(30, 7)
    return model, torchkv.Trainer(model, optimizer, {"lr": 0.1}, kvstore="dist_sync")


def load_states_of_one(rank, folder):
    model, trainer = trainer_of("adamw")
    train(trainer, model, 1 + rank)
    trainer.save_states(f"{folder}/{rank}")
    expected = train(trainer, model, 2 + rank)
    path = f"{folder}/nothing" if rank else f"{folder}/0"
    refused = outcome(lambda: trainer.load_states(path))
    unchanged = equal(expected, [p.detach() for p in model.parameters()])
    trainer.load_states(f"{folder}/{rank}")
    trainer.kvstore.barrier()
    return refused, unchanged


def test_a_trainers_states_that_one_rank_cannot_read(tmp_path):
    (first, _), (second, _) = found = ranks.run(load_states_of_one, 2, str(tmp_path))
    assert first[0] == "RemoteError" and ": rank 1 has " in first[1]
    assert second[0] == "FileNotFoundError"
    assert all(unchanged for _, unchanged in found)


def resume_from_a_distributed_checkpoint(rank, optimizer, folder):
    """The state of ranks other than 0 has no keys: they get rank 0's."""
    torch.distributed.init_process_group("gloo")
    model, trainer = trainer_of(optimizer)
    train(trainer, model, 1 + rank)
    dcp.save({"trainer": trainer}, checkpoint_id=folder)
    expected = train(trainer, model, 2 + rank)
    torch.manual_seed(rank)
    other_model, other = trainer_of(optimizer)
    if optimizer is torch.optim.NAdam:
        train(other, other_model, 5 + rank)  # so that it has a state to load
    dcp.load({"trainer": other}, checkpoint_id=folder)
    again = train(other, other_model, 2 + rank)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return equal(expected, again)


@pytest.mark.parametrize("optimizer", ["adamw", torch.optim.NAdam], ids=str)
def test_a_distributed_checkpoint_of_several_ranks(optimizer, tmp_path):
    folder = str(tmp_path / "checkpoint")
    resumed = ranks.run(resume_from_a_distributed_checkpoint, 2, optimizer, folder)
    assert resumed == [True, True]


def load_frozen(rank):
    model, trainer = trainer_of("adamw")
    train(trainer, model, 1)
    state = trainer.state_dict()
    again = torch.nn.Linear(30, 7)
    again.bias.requires_grad_(False)
    other = torchkv.Trainer(again, "adamw", {"lr": 0.1}, kvstore="dist_sync")
    wrong = outcome(lambda: other.load_state_dict({} if rank == 1 else state))
    other.load_state_dict(state)  # on rank 0 alone, it has keys
    return wrong, torch.equal(again.bias, model.bias), other.kvstore.keys()


def test_a_trainers_parameter_that_was_frozen_since():
    keys = ["bias", "weight"]
    (first, *others), (second, *equals) = ranks.run(load_frozen, 2)
    assert first[0] == "RemoteError"
    assert second[0] == "ValueError"
    assert others[0] and equals[0]
    assert sorted(others[1]) == sorted(equals[1]) == keys
