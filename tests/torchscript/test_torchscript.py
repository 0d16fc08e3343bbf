"""The TorchScript binding: every argument form, one shared store, updaters."""

from typing import Any

import pytest
import torch

import torchkv
from helpers import (
    Momentum,
    add_input,
    allocated_bytes,
    assert_same,
    full,
    script,
    scripted_add_twice,
    stored,
)

Store = torch.classes.torchkv.KVStore


@pytest.fixture
def scripted(kv):
    """The store as TorchScript sees it."""
    return kv.script_object


def one_key(kv: torch.classes.torchkv.KVStore, x: torch.Tensor) -> list[torch.Tensor]:
    a, b, c = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    kv.init(3, x)
    kv.push(3, x * 2)
    kv.pull(3, a)
    kv.push(3, [x, x, x, x])
    kv.pull(3, [b, c])
    return [a, b, c]


def many_keys(kv: torch.classes.torchkv.KVStore, x: torch.Tensor) -> list[torch.Tensor]:
    outs = [torch.zeros_like(x), torch.zeros_like(x)]
    nested = [[torch.zeros_like(x), torch.zeros_like(x)], [torch.zeros_like(x)]]
    keys = [5, 7]
    kv.init(keys, [x, x])
    kv.push(keys, [x, x * 2])
    kv.pull(keys, outs)
    kv.push(keys, [[x, x], [x, x, x]])
    kv.pull(keys, nested)
    kv.push([5, 5], [x, x * 4])
    return outs + nested[0] + nested[1]


def tuples(kv: torch.classes.torchkv.KVStore, x: torch.Tensor) -> list[torch.Tensor]:
    a, b = torch.zeros_like(x), torch.zeros_like(x)
    kv.init((5, 7), (x, x))
    kv.push((5, 7), ((x, x), (x, x, x)))
    kv.push(5, (x, x, x, x))
    kv.pull((5, 7), (a, b))
    return [a, b]


def mixed(kv: torch.classes.torchkv.KVStore, x: torch.Tensor) -> list[torch.Tensor]:
    a, b, c = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    kv.init((5, 7), (x, [x]))
    kv.push([5, 7], (x * 2, [x, x, x]))
    kv.pull([5, 7], (a, [b, c]))
    d, e, f = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    kv.pushpull([5, 7], ((x, x * 4), x * 6), ([d, e], f))
    return [a, b, c, d, e, f]


def workers(kv: torch.classes.torchkv.KVStore) -> tuple[int, int, int]:
    kv.barrier()
    return kv.rank(), kv.num_workers(), kv.num_dead_node()


def named(kv: torch.classes.torchkv.KVStore, x: torch.Tensor) -> list[torch.Tensor]:
    out, outs = torch.zeros_like(x), [torch.zeros_like(x), torch.zeros_like(x)]
    kv.init("w", x)
    kv.init(["a", "b"], [x, x])
    kv.push(key="w", value=x * 3, priority=-1)
    kv.pushpull(["a", "b"], [[x, x], [x]], outs)
    kv.pull(key="w", out=out, priority=2)
    kv.delete("a")
    return [out] + outs


def without_out(kv: torch.classes.torchkv.KVStore, key: int) -> torch.Tensor:
    x = kv.pull(key)
    assert isinstance(x, torch.Tensor)
    return x


def list_without_out(
    kv: torch.classes.torchkv.KVStore, keys: list[int]
) -> list[torch.Tensor]:
    x = kv.pull(keys)
    assert torch.jit.isinstance(x, list[torch.Tensor])
    return x


def the_rest(kv: torch.classes.torchkv.KVStore, x: torch.Tensor) -> list[torch.Tensor]:
    outs = [torch.zeros_like(x), torch.zeros_like(x)]
    value = x.clone()
    kv.broadcast(3, x, outs)
    kv.broadcast([5, 7], [x, x], [[outs[0]], [outs[1]]])
    kv.pushpull(3, [x, x], outs)
    kv.pushpull(5, value)
    kv.delete([5, 7])
    return outs + [value]


def keys_of(kv: torch.classes.torchkv.KVStore) -> Any:
    return kv.keys()


def ignore_sparse(kv: torch.classes.torchkv.KVStore, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    kv.init(3, x)
    kv.pull(3, out, ignore_sparse=False)
    return out


def check(tensors, values):
    for tensor, value in zip(tensors, values, strict=True):
        assert_same(tensor, full(value))


def test_one_key(scripted, kv):
    check(script(one_key)(scripted, full(1)), [2, 4, 4])
    assert kv.keys() == [3]


def test_many_keys(scripted, kv):
    check(script(many_keys)(scripted, full(1)), [1, 2, 2, 2, 3])
    assert_same(stored(kv, 5), full(5))


def test_tuples(scripted):
    check(script(tuples)(scripted, full(1)), [4, 3])


def test_tensors_and_lists_mixed(scripted):
    check(script(mixed)(scripted, full(1)), [2, 3, 3, 5, 5, 6])


def test_one_machine_is_one_worker(scripted):
    assert script(workers)(scripted) == (0, 1, 0)
    assert (scripted.rank(), scripted.num_workers()) == (0, 1)
    assert scripted.num_dead_node() == 0
    assert scripted.barrier() is None


def test_str_keys_and_keyword_arguments(scripted, kv):
    check(script(named)(scripted, full(1)), [3, 2, 1])
    assert kv.keys() == ["w", "b"] == script(keys_of)(scripted)


def test_pull_without_out(scripted, kv):
    kv.init([3, 5], [full(3), full(5)])
    assert_same(script(without_out)(scripted, 3), full(3))
    script(without_out)(scripted, 3).fill_(9)
    assert_same(script(list_without_out)(scripted, [5, 3])[1], full(3))


def test_broadcast_pushpull_delete_keys(scripted, kv):
    assert script(keys_of)(scripted) == []
    check(script(the_rest)(scripted, full(1)), [2, 2, 1])
    assert script(keys_of)(scripted) == [3] == kv.keys()


def test_ignore_sparse(scripted):
    assert_same(script(ignore_sparse)(scripted, full(1)), full(1))


class Worker(torch.nn.Module):
    """A module that creates its own store."""

    def __init__(self, store_type):
        super().__init__()
        self.kv = Store(store_type)
        self.opt = Momentum()

    def forward(self, x):
        self.kv.init(3, x)
        self.kv.push(3, [x, x])
        out = torch.zeros_like(x)
        self.kv.pull(3, out)
        return out

    @torch.jit.export
    def use_updater(self):
        self.kv.set_updater(self.opt)

    @torch.jit.export
    def use_assign(self):
        self.kv.set_updater(None)


def test_scripted_module_holds_a_store(store_type):
    worker = script(Worker(store_type))
    assert_same(worker(full(1)), full(2))
    kv = torchkv.KVStore.from_script_object(worker.kv)
    assert kv.type == store_type and kv.keys() == [3]
    kv.push(3, full(7))
    assert_same(script(without_out)(worker.kv, 3), full(7))


def test_set_updater_inside_torchscript_shares_the_submodule(store_type):
    worker = script(Worker(store_type))
    worker(full(5))
    worker.use_updater()
    kv = torchkv.KVStore.from_script_object(worker.kv)
    kv.push(3, full(1))
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(6))
    assert_same(worker.opt.momentum[3], full(3), "the submodule's own state")
    worker.use_assign()
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(1))


def test_an_updater_set_in_python_is_used_from_torchscript(scripted, kv):
    kv.set_updater(scripted_add_twice())
    assert_same(script(one_key)(scripted, full(1))[2], full(13))
    kv.delete(3)
    kv.set_updater(add_input)
    assert_same(script(one_key)(scripted, full(1))[2], full(7))


def test_python_and_torchscript_share_the_store(kv):
    scripted = kv.script_object
    assert isinstance(scripted, torch.ScriptObject)
    again = torchkv.KVStore.from_script_object(scripted)
    assert isinstance(again, torchkv.KVStore) and again.type == kv.type
    scripted.init(3, full(1))
    kv.push(3, full(2))
    assert_same(stored(again, 3), full(2))
    again.set_updater(add_input)
    kv.script_object.push(3, full(5))
    assert_same(stored(kv, 3), full(7))
    assert scripted.keys() == [3]
    del kv, scripted
    assert_same(stored(again, 3), full(7))


def test_converting_to_a_script_object_copies_nothing(kv):
    kv.init(3, torch.zeros(1 << 20))

    def cross():
        torchkv.KVStore.from_script_object(kv.script_object).script_object.keys()

    assert allocated_bytes(cross) < 1 << 12


def test_close_is_visible_in_python_and_torchscript(kv):
    scripted = kv.script_object
    kv.close()
    with pytest.raises(RuntimeError, match="clos"):
        scripted.keys()
    with pytest.raises(RuntimeError, match="clos"):
        script(keys_of)(scripted)


@pytest.mark.parametrize("thing", [3, None, "local", full(1)])
def test_from_script_object_takes_only_a_store(thing):
    with pytest.raises(TypeError):
        torchkv.KVStore.from_script_object(thing)


def test_script_object_called_from_python(scripted):
    scripted.init([3, 5], [full(1), full(2)])
    scripted.push(3, [full(1)] * 4)
    scripted.push([3, 5], [[full(1)] * 2, [full(4)]])
    out = full(0)
    scripted.pull(5, out)
    assert_same(out, full(4))
    assert_same(scripted.pull(3), full(2))
    assert_same(scripted.pull([5, 3])[1], full(2))
    scripted.delete((3, 5))
    assert scripted.keys() == []
