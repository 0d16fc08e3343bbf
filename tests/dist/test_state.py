"""assign, and what is saved and loaded by all ranks together."""

import functools

import pytest
import torch

import ranks
import torchkv
from ranks import outcome
from three_keys import SIZES, equal, make, step


def save(rank, folder):
    kv = make()
    kv.set_optimizer(torchkv.optim.Adam(lr=0.01))
    for number in range(3):
        step(kv, number, rank)
    kv.save(folder)
    state = kv.state_dict()
    last = [step(kv, number, rank) for number in range(3, 6)][-1]
    kv.barrier()
    kv.close()
    return last, len(state["keys"]), kv.rank


def load(rank, folder):
    kv = torchkv.load(folder)
    assert kv.type == "dist_sync" and kv.keys() == list(SIZES)
    assert kv.optimizer.lr == 0.01
    last = [step(kv, number, rank) for number in range(3, 6)][-1]
    kv.barrier()
    kv.close()
    return last


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("saved") / "store")
    (last, num_keys, _), (_, other_keys, _) = ranks.run(save, 2, folder)
    assert num_keys == 3 and other_keys == 0  # the state is rank 0's
    return folder, last


def test_a_saved_store_goes_on_with_the_same_bits(saved):
    folder, last = saved
    for values in ranks.run(load, 2, folder):
        assert equal(values, last)


def test_it_loads_on_one_machine(saved):
    folder, last = saved
    kv = torchkv.create("local")
    kv.load(folder)
    for number in range(3, 6):
        gradients = []
        for size in SIZES.values():
            gradients.append([])
            for rank in range(2):
                generator = torch.Generator().manual_seed(100 * number + rank)
                gradients[-1].append(torch.randn(size, generator=generator))
        kv.push(list(SIZES), gradients)
    assert equal([kv.pull(key) for key in SIZES], last)


def optimizer_states(rank, path):
    kv = make()
    kv.set_optimizer(torchkv.optim.Adam(lr=0.01))
    step(kv, 0, rank)
    kv.save_optimizer_states(f"{path}/{rank}")
    before = kv.optimizer.state_dict()["state"]["c"]["exp_avg"].clone()
    expected = step(kv, 1, rank)
    kv.assign(list(SIZES), [torch.zeros(size) for size in SIZES.values()])
    zero = [kv.pull(key).abs().max().item() for key in SIZES]
    kv.optimizer.state_dict()  # what was read once is not what is loaded later
    kv.barrier()
    kv.load_optimizer_states(f"{path}/{rank}")
    after = kv.optimizer.state_dict()["state"]["c"]["exp_avg"]
    kv.barrier()
    kv.close()
    return zero, torch.equal(before, after), expected


def test_optimizer_states_and_assign(tmp_path):
    for zero, same, _ in ranks.run(optimizer_states, 2, str(tmp_path)):
        assert zero == [0.0] * 3
        assert same


def assign(rank, type):
    kv = torchkv.create(type)
    kv.init(["w", "x"], [torch.zeros(3), torch.zeros(100_000)])
    kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
    kv.barrier()
    kv.push(["w", "x"], [torch.ones(3), torch.ones(100_000)])
    kv.barrier()
    # Rank 0's values count.
    kv.assign(
        ["w", "x"], [torch.full((3,), 5.0 - rank), torch.full((100_000,), 7.0 - rank)]
    )
    values = [kv.pull(key).unique().tolist() for key in ("w", "x")]
    kv.barrier()
    kv.push("w", torch.zeros(3))  # momentum is kept
    kv.barrier()
    momentum = kv.pull("w")[0].item()
    refused = outcome(lambda: kv.assign("w", torch.zeros(2)))
    kv.barrier()
    kv.close()
    return values, momentum, refused


@pytest.mark.parametrize("type", ["dist_sync", "dist_async"])
def test_assign_takes_rank_0s_values(type):
    for values, momentum, refused in ranks.run(assign, 2, type):
        assert values == [[5.0], [7.0]]
        assert momentum < 5.0
        assert refused[0] == "ValueError" and "(key 'w')" in refused[1]


def load_over(rank, folder):
    """Into a store that has been used, and has a sharded key more; then once more."""
    kv = make()
    kv.init("other", torch.ones(200_000))
    kv.set_optimizer(torchkv.optim.Adam(lr=0.5))
    optimizer = kv.optimizer
    for number in range(2):
        step(kv, number, rank)
    results = []
    for _ in range(2):
        kv.load(folder)
        assert kv.keys() == list(SIZES) and "other" not in kv
        assert kv.optimizer is optimizer and optimizer.lr == 0.01
        results.append([step(kv, number, rank) for number in range(3, 6)][-1])
    kv.barrier()
    kv.close()
    return results


def test_load_replaces_what_a_store_has(saved):
    folder, last = saved
    for results in ranks.run(load_over, 2, folder):
        assert all(equal(result, last) for result in results)


def fail_to_load_over(rank, folder):
    """A damaged state, a state of other keys: nothing has changed."""
    kv = make()
    kv.set_optimizer(torchkv.optim.Adam(lr=0.5))
    before = step(kv, 0, rank)
    state = torchkv.create("local")
    state.load(folder)
    saved = state.state_dict()
    saved["keys"]["a"]["state"]["exp_avg"] = torch.zeros(7)
    results = [outcome(lambda: kv.load_state_dict(saved))]
    del saved["keys"]["a"]
    results.append(outcome(lambda: kv.load_state_dict(saved, strict=False)))
    after = [kv.pull(key) for key in SIZES]
    kv.barrier()
    kv.close()
    return results, equal(before, after)


def test_a_state_that_does_not_load_changes_nothing(saved):
    for results, is_same in ranks.run(fail_to_load_over, 2, saved[0]):
        (damaged, text), (missing, missing_text) = results
        assert damaged == missing == "ValueError" and "expected shape [3]" in text
        assert "expected a state with all keys" in missing_text
        assert is_same


def add_to_int_keys(key: int, input: torch.Tensor, stored: torch.Tensor) -> None:
    stored.add_(input)


def fail_to_load_keys_or_updater(rank, folder):
    kv = torchkv.create("dist_sync")
    kv.set_updater(torch.jit.script(subtract))
    kv.init(list(SIZES), [torch.ones(size) for size in SIZES.values()])
    before = step(kv, 0, rank)
    damaged = {**saved_on_one_machine()[0].state_dict(), **{"updater": "UEsDBA=="}}
    results = [outcome(lambda: kv.load_state_dict(damaged))]
    for i in (1, 2):
        path = f"{folder}/{i}"
        results.append(outcome(functools.partial(kv.load, path)))
    kv.push("a", torch.zeros(3))
    same = equal(before, [kv.pull(key) for key in SIZES])
    kv.barrier()
    kv.close()
    return results, same


def load_max_norm(rank, folder):
    kv = torchkv.create("dist_async")
    kv.init("a", torch.ones(3))
    result = outcome(lambda: kv.load(folder))
    value = kv.pull("a")
    kv.barrier()
    kv.close()
    return result, value[0].item()


def test_dist_async_refuses_to_load_max_norm_and_keeps_its_keys(tmp_path):
    kv = torchkv.create("local")
    kv.init("a", torch.zeros(3))
    kv.set_optimizer("sgd", max_norm=1.0)
    kv.save(tmp_path / "saved")
    for (kind, text), value in ranks.run(load_max_norm, 2, str(tmp_path / "saved")):
        assert kind == "NotImplementedError" and "max_norm" in text
        assert value == 1


def saved_on_one_machine():
    """Stores of str keys; of int keys; and of an updater of either, without keys."""
    stores = [torchkv.create("local") for _ in range(3)]
    stores[0].init(list(SIZES), [torch.zeros(size) for size in SIZES.values()])
    stores[0].set_updater(torch.jit.script(subtract))
    stores[1].init(7, torch.zeros(3))
    stores[2].set_updater(torch.jit.script(add_to_int_keys))
    return stores


def test_keys_and_updaters_that_do_not_load_change_nothing(tmp_path):
    for number, store in enumerate(saved_on_one_machine()):
        store.save(tmp_path / str(number))
    for results, is_same in ranks.run(fail_to_load_keys_or_updater, 2, str(tmp_path)):
        assert is_same
        (damaged, text), (keys, of_keys), (updater, of_updater) = results
        assert damaged == "ValueError"
        assert "load: expected an updater that TorchScript can read" in text
        assert keys == updater == "TypeError"
        assert "load: expected str keys, the kind of this store, but got" in of_keys
        assert "expected an updater of signature forward(key: str" in of_updater


def without_updater(rank, folder):
    kv = torchkv.create("dist_sync")
    kv.init("w", torch.full((100_000,), 2.0), whole=True)
    kv.save(folder)
    kv.set_optimizer("sgd", learning_rate=1.0)
    kv.push("w", torch.ones(100_000))
    kv.load(folder)
    optimizer = kv.optimizer
    kv.set_updater(subtract)  # which needs whole values, as it still is
    kv.push("w", torch.ones(100_000))
    value = kv.pull("w")
    kv.barrier()
    kv.close()
    return optimizer, value[0].item()


def test_load_removes_the_updater_and_keeps_whole_values(tmp_path):
    for optimizer, value in ranks.run(without_updater, 2, str(tmp_path / "store")):
        assert optimizer is None and value == 0


def python_updater(rank, folder):
    kv = torchkv.create("dist_sync")
    kv.set_updater(lambda key, input, stored: stored.add_(input))
    result = outcome(lambda: kv.save(folder))
    kv.barrier()
    kv.close()
    return result


def test_a_python_updater_is_not_saved(tmp_path):
    for kind, text in ranks.run(python_updater, 2, str(tmp_path / "store")):
        assert kind == "TypeError" and "but got a Python callable" in text


class Momentum(torch.nn.Module):
    """Keeps a velocity for each key, on the server that has the key."""

    velocities: dict[str, torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.velocities = {}

    def forward(self, key: str, input: torch.Tensor, stored: torch.Tensor) -> None:
        if key not in self.velocities:
            self.velocities[key] = torch.zeros_like(input)
        self.velocities[key].mul_(0.9).add_(input)
        stored.sub_(0.1 * self.velocities[key])


def subtract(key: str, input: torch.Tensor, stored: torch.Tensor) -> None:
    stored.sub_(input)


def save_script(rank, folder, stateful):
    kv = torchkv.create("dist_sync")
    kv.set_updater(torch.jit.script(Momentum() if stateful else subtract))
    kv.save(f"{folder}-new")  # no server has run it
    kv.init(list(SIZES), [torch.zeros(size) for size in SIZES.values()])
    for number in range(3):
        step(kv, number, rank)
    kv.save(folder)
    last = [step(kv, number, rank) for number in range(3, 6)][-1]
    kv.barrier()
    kv.close()
    return last


def load_script(rank, folder, new):
    kv = torchkv.load(f"{folder}-new" if new else folder)
    numbers = range(3, 6)
    if new:
        kv.init(list(SIZES), [torch.zeros(size) for size in SIZES.values()])
        numbers = range(6)
    kv.save(f"{folder}-again")
    state = kv.state_dict()
    last = [step(kv, number, rank) for number in numbers][-1]
    if not new and rank == 0:
        torch.save(state, f"{folder}-state")
    kv.barrier()
    kv.load_state_dict(torch.load(f"{folder}-state"))
    assert equal([step(kv, number, rank) for number in range(3, 6)][-1], last)
    kv.barrier()
    kv.close()
    return last


@pytest.mark.parametrize("stateful", [True, False], ids=["with_state", "without"])
def test_a_torchscript_updater_goes_on_with_its_state(tmp_path, stateful):
    folder = str(tmp_path / "store")
    last, _ = ranks.run(save_script, 2, folder, stateful)
    for name, new in ((folder, False), (f"{folder}-again", False), (folder, True)):
        for values in ranks.run(load_script, 2, name, new):
            assert equal(values, last)


def fail_to_load(rank, folder):
    return outcome(lambda: torchkv.load(folder))


def test_where_a_torchscript_updater_with_state_loads(tmp_path):
    """On as many ranks; one without state on any number, and on one machine."""
    folders = [str(tmp_path / name) for name in ("with_state", "without")]
    for folder, stateful in zip(folders, (True, False), strict=True):
        last, _ = ranks.run(save_script, 2, folder, stateful)
    for kind, text in ranks.run(fail_to_load, 3, folders[0]):
        assert kind == "ValueError"
        assert "expected as many ranks as have saved the store, 2, but got 3" in text
    kv = torchkv.create("local")
    with pytest.raises(ValueError, match="a store of several processes, as many as"):
        kv.load(folders[0])
    kv.load(folders[1])
    for number in range(3, 6):
        step(kv, number, 0)
        values = step(kv, number, 1)
    assert all(
        torch.allclose(a, b, atol=1e-4) for a, b in zip(values, last, strict=True)
    )


def train_with_trainer(rank):
    torch.manual_seed(rank)  # rank 0's weights count
    model = torch.nn.Linear(8, 4)
    trainer = torchkv.Trainer(
        model, "adamw", {"learning_rate": 0.1}, kvstore="dist_sync"
    )
    first = [p.detach().clone() for p in model.parameters()]
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        model(torch.randn(5, 8, generator=generator)).square().sum().backward()
        trainer.step(10)
    with torch.no_grad():
        model.weight.zero_()
    model(torch.randn(5, 8, generator=generator)).square().sum().backward()
    trainer.step(10)
    trainer.kvstore.barrier()
    return first, [p.detach() for p in model.parameters()]


def resume_with_trainer(rank, file):
    def start():
        model = torch.nn.Linear(300, 200)  # the weight is sharded
        return model, torchkv.Trainer(
            model, "adamw", {"learning_rate": 0.1}, kvstore="dist_sync"
        )

    def train(model, trainer, steps):
        for number in steps:
            generator = torch.Generator().manual_seed(10 * number + rank)
            inputs = torch.randn(5, 300, generator=generator)
            model(inputs).square().sum().backward()
            trainer.step(10)

    model, trainer = start()
    train(model, trainer, range(3))
    state = trainer.state_dict()
    if rank == 0:
        torch.save(state, file)
    train(model, trainer, range(3, 6))  # a step ends after rank 0 has written
    other, resumed = start()
    train(other, resumed, range(1))
    resumed.load_state_dict(torch.load(file))
    train(other, resumed, range(3, 6))
    return equal(model.parameters(), other.parameters())


def test_a_trainer_continues_from_its_state(tmp_path):
    assert ranks.run(resume_with_trainer, 2, str(tmp_path / "state.pt")) == [True, True]


def test_a_trainer_works_on_several_machines():
    (first, last), (other_first, other_last) = ranks.run(train_with_trainer, 2)
    assert equal(first, other_first) and equal(last, other_last)
    assert last[0].abs().max() < 0.2  # one step after the zeros


class Holder(torch.nn.Module):
    def __init__(self, store):
        super().__init__()
        self.store = store

    def forward(self, value: torch.Tensor) -> None:
        self.store.push("a", value)


def save_with_torch(rank, path):
    kv = make()
    module = torch.jit.script(Holder(kv.script_object))
    refused = outcome(lambda: torch.jit.save(module, path))
    kv.barrier()
    return refused


def test_torchscript_refuses_to_save_a_store_of_several_machines(tmp_path):
    for kind, text in ranks.run(save_with_torch, 2, str(tmp_path / "module.pt")):
        assert kind == "NotImplementedError" and "save(path)" in text
