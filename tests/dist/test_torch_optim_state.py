"""The state of a class of torch.optim, of which each process has a part."""

import functools

import pytest
import torch

import ranks
import torchkv
from ranks import outcome
from three_keys import SIZES, equal, make, step


def class_of_torch_optim(rank, type, folder):
    kv = make(type, whole=True)
    kv.set_optimizer(torch.optim.NAdam, lr=0.1)
    kv.set_param_groups([{"keys": ["b"], "lr": 0.05}])
    values = step(kv, 0, rank)
    kv.barrier()
    state = kv.state_dict()
    if rank == 0:
        torch.save(state, f"{folder}/store.pt")
    kv.save_optimizer_states(f"{folder}/optimizer-{rank}.pt", dump_optimizer=True)
    names = {key: sorted(x) for key, x in kv.optimizer.state.items()}
    refused = outcome(lambda: kv.save(f"{folder}/store"))
    kv.barrier()
    last = step(kv, 1, rank)
    kv.barrier()
    kv.load_state_dict(torch.load(f"{folder}/store.pt"))
    again = step(kv, 1, rank)
    kv.barrier()
    kv.close()
    return values, last, again, names, len(state["keys"]), refused


def continue_class_of_torch_optim(rank, type, folder, values, whole_state):
    kv = make(type, whole=True)
    kv.set_optimizer(torch.optim.NAdam)
    if whole_state:
        kv.load_state_dict(torch.load(f"{folder}/store.pt"))
    else:
        kv.assign(list(SIZES), values)
        kv.load_optimizer_states(f"{folder}/optimizer-{rank}.pt")
    last = step(kv, 1, rank)
    kept = sorted(kv.optimizer._of_key)
    lr = kv.optimizer.lr
    kv.barrier()
    kv.close()
    return last, kept, lr


def load_in_dist_async(rank, folder):
    """Values and states when they were saved, after a step, and loaded."""
    kv = make("dist_async", whole=True)
    kv.set_optimizer(torch.optim.NAdam, lr=0.1)
    seen = []

    def see():
        kv.barrier()
        states = [kv.optimizer.state[key]["exp_avg"] for key in SIZES]
        seen.append(kv.pull(list(SIZES)) + states)
        kv.barrier()

    step(kv, 0, rank)
    see()
    state = kv.state_dict()
    if rank == 0:
        torch.save(state, f"{folder}/store.pt")
    kv.barrier()
    step(kv, 1, rank)
    see()
    kv.load_state_dict(torch.load(f"{folder}/store.pt"))
    see()
    kv.close()
    return seen


def test_the_state_in_dist_async(tmp_path):
    for saved, stepped, loaded in ranks.run(load_in_dist_async, 2, str(tmp_path)):
        assert not any(map(torch.equal, saved, stepped))
        assert equal(loaded, saved)


@pytest.mark.parametrize("whole_state", [True, False])
def test_the_state_of_a_class_of_torch_optim(whole_state, tmp_path):
    saved = ranks.run(class_of_torch_optim, 2, "dist_sync", str(tmp_path))
    values, last, *_ = saved[0]
    for rank, (_, own, again, names, num_keys, refused) in enumerate(saved):
        assert equal(own, last) and equal(again, last)
        # Of all keys, wherever they are.
        expected = ["exp_avg", "exp_avg_sq", "mu_product", "step"]
        assert names == dict.fromkeys(SIZES, expected)
        assert num_keys == (0 if rank else 3)
        assert refused[0] == "TypeError"
    loaded = ranks.run(
        continue_class_of_torch_optim,
        2,
        "dist_sync",
        str(tmp_path),
        values,
        whole_state,
    )
    for own, _, lr in loaded:
        assert equal(own, last) and lr == 0.1
    # Each rank keeps the state of the keys that it has.
    assert sorted(kept for _, keys, _ in loaded for kept in keys) == list(SIZES)


def test_the_state_of_a_class_of_torch_optim_moves_between_machines(tmp_path):
    """From two processes to one, and back."""
    values, last, *_ = ranks.run(class_of_torch_optim, 2, "dist_sync", str(tmp_path))[0]
    kv = make("local", whole=False)
    kv.set_optimizer(torch.optim.NAdam)
    kv.load_state_dict(torch.load(tmp_path / "store.pt"))
    assert equal(kv.pull(list(SIZES)), values)
    assert kv.optimizer.param_groups[1]["lr"] == 0.05
    torch.save(kv.state_dict(), tmp_path / "store.pt")
    for own, *_ in ranks.run(
        continue_class_of_torch_optim, 2, "dist_sync", str(tmp_path), None, True
    ):
        assert equal(own, last)


class Odd(torch.optim.SGD):
    """Keeps an object that other ranks would not unpickle."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["odd"] = functools.partial(print)


def no_keys(rank):
    kv = torchkv.create("dist_sync")
    kv.set_optimizer(torch.optim.NAdam, lr=0.1)
    state = kv.state_dict()
    kv.optimizer.lr = 0.2
    kv.barrier()
    kv.load_state_dict(state)
    lr = kv.optimizer.lr
    kv.barrier()
    kv.close()
    return lr


def test_a_store_without_keys():
    assert ranks.run(no_keys, 2) == [0.1, 0.1]


def refused_states(rank, folder):
    kv = make(whole=True)
    kv.set_optimizer(Odd, lr=0.1)
    step(kv, 0, rank)
    odd = outcome(kv.state_dict)
    before = kv.pull(list(SIZES))
    kv.set_optimizer(torch.optim.NAdam, lr=0.2)
    state = torch.load(f"{folder}/store.pt")
    moments = state["torch_optimizer"]["state"]["b"]
    moments["exp_avg"] = moments["exp_avg"][1:]
    shape = outcome(lambda: kv.load_state_dict(state))
    state = torch.load(f"{folder}/store.pt")
    del state["keys"]["b"]
    key = outcome(lambda: kv.load_state_dict(state, strict=False))
    state = torch.load(f"{folder}/store.pt")
    state["compression"] = {"groups": [[["type", "fp16"]]], "keys": []}
    for item in state["keys"].values():
        residual = torch.zeros_like(item["value"])
        item |= {"residuals": [residual.float()] * 3, "num_compressed": 1}
    compressed = outcome(lambda: kv.load_state_dict(state))
    unchanged = equal(kv.pull(list(SIZES)), before) and kv.optimizer.lr == 0.2
    kv.barrier()
    kv.close()
    return odd, shape, key, compressed, unchanged


def test_what_does_not_fit_a_class_of_torch_optim(tmp_path):
    ranks.run(class_of_torch_optim, 2, "dist_sync", str(tmp_path))
    for found in ranks.run(refused_states, 2, str(tmp_path)):
        odd, shape, key, compressed, unchanged = found
        assert odd[0] == "TypeError" and "a state of Odd of tensors" in odd[1]
        assert shape[0] == "ValueError" and "'exp_avg' of shape" in shape[1]
        assert key[0] == "ValueError" and "one without 1" in key[1]
        assert compressed[0] in ("ValueError", "RemoteError")
        assert "residuals of compression, 3, but got 2" in compressed[1]
        assert unchanged


def train_with_a_class_of_torch_optim(rank, folder):
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 7)
    trainer = torchkv.Trainer(
        model, torch.optim.NAdam, {"lr": 0.1}, kvstore="dist_sync"
    )

    def train(number):
        model(torch.full((2, 30), float(number + rank))).sum().backward()
        trainer.step(2)
        return [p.detach().clone() for p in model.parameters()]

    train(1)
    state = trainer.state_dict()
    if rank == 0:
        torch.save(state, f"{folder}/trainer.pt")
    expected = train(2)
    trainer.load_state_dict(torch.load(f"{folder}/trainer.pt"))
    return equal(train(2), expected)


def test_a_trainer_with_a_class_of_torch_optim(tmp_path):
    assert ranks.run(train_with_a_class_of_torch_optim, 2, str(tmp_path)) == [True] * 2
