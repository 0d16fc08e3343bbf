"""Random calls on one thread, in every argument form, against KVModel."""

import random

import pytest
import torch

import torchkv
from helpers import add_input, assert_same, bits, script
from kv_model import KVModel

SHAPES = [(), (0,), (1,), (5,), (2, 3), (4, 1, 3)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32]
OPS = ["init", "push", "push", "push", "pull", "pull", "pushpull", "broadcast"]
RARE = ["delete", "assign", "set_updater", "unknown key"]


def subtract(key, input, stored):
    stored.mul_(-1).add_(input)


def scripted_subtract(kind):
    if kind is int:

        def update(key: int, input: torch.Tensor, stored: torch.Tensor):
            stored.mul_(-1).add_(input)

    else:

        def update(key: str, input: torch.Tensor, stored: torch.Tensor):
            stored.mul_(-1).add_(input)

    return script(update)


class Player:
    """Makes the same random calls on a store and on the model."""

    def __init__(self, seed, store_type, device="cpu"):
        self.random = random.Random(seed)
        self.device = device
        self.kind = self.random.choice([int, str])
        self.store = torchkv.create(store_type)
        self.model = KVModel()
        self.scripted = scripted_subtract(self.kind)
        names = [f"w{i}" for i in range(6)]
        self.names = names if self.kind is str else [-3, 0, 2, 2**32 + 2, 7, -(2**63)]
        self.log = []

    def tensor(self, shape, dtype):
        """Small integers, now and then in another dtype or layout."""
        if dtype.is_floating_point and self.random.random() < 0.2:
            dtype = self.random.choice(DTYPES)
        values = [self.random.randint(-3, 3) for _ in range(torch.Size(shape).numel())]
        tensor = torch.tensor(values, dtype=dtype, device=self.device).reshape(shape)
        if tensor.dim() > 1 and self.random.random() < 0.3:
            tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
        if tensor.numel() and self.random.random() < 0.2:
            tensor = torch.stack([tensor, tensor], -1)[..., 1]
        return tensor

    def form(self, members):
        return self.random.choice([list, tuple])(members)

    def keys(self, pool, repeats=True):
        """One key or several, as (key argument, list of keys)."""
        if self.random.random() < 0.5:
            key = self.random.choice(pool)
            return key, [key]
        count = self.random.randint(1, min(4, len(pool)))
        take = self.random.choices if repeats else self.random.sample
        keys = take(pool, k=count)
        return self.form(keys), keys

    def values(self, key, keys, make, replicas=True):
        """One value per key: tensors, lists of tensors, or both mixed."""
        nested = self.random.choice([0.0, 0.5, 1.0])

        def one(k):
            if self.random.random() < nested:
                count = self.random.randint(1, 4) if replicas else 1
                return self.form(make(k) for _ in range(count))
            return make(k)

        if key is keys[0]:
            return one(key)
        return self.form([one(k) for k in keys])

    def like_stored(self, k):
        return self.tensor(self.model.stored[k].shape, self.model.stored[k].dtype)

    def out_for(self, k):
        dtype = self.model.stored[k].dtype
        return torch.full(self.model.stored[k].shape, 77, device=self.device).to(dtype)

    def both(self, op, *args):
        """Calls store and model with equal arguments; what they write must agree."""
        self.log.append((op, args))
        theirs = on_cpu(args)
        actual = getattr(self.store, op)(*args)
        expected = getattr(self.model, op)(*theirs)
        pairs = zip(flat((args, actual)), flat((theirs, expected)), strict=True)
        for mine, other in pairs:
            assert_same(mine, other)

    def step(self):
        used = list(self.model.stored)
        free = [name for name in self.names if name not in used]
        op = self.random.choice(OPS if self.random.random() < 0.85 else RARE)
        if op in ("init", "broadcast") or not used:
            if free:
                self.first_init(op, free)
        elif op == "set_updater":
            which = self.random.choice(["assign", "python", "script"])
            theirs = {"assign": None, "python": subtract, "script": self.scripted}
            self.log.append((op, which))
            self.store.set_updater(theirs[which])
            self.model.updater = None if which == "assign" else subtract
        elif op == "unknown key":
            values = [self.like_stored(k) for k in used]
            for name in free[:1]:
                with pytest.raises(KeyError):
                    self.store.push([*used, name], [*values, torch.ones(1)])
        elif op == "delete":
            key, _ = self.keys(used, repeats=False)
            self.both("delete", key)
        elif op == "assign":
            key, keys = self.keys(used, repeats=False)
            values = self.values(key, keys, self.like_stored, replicas=False)
            self.both("assign", key, values)
        else:
            key, keys = self.keys(used)
            value = self.values(key, keys, self.like_stored)
            out = self.values(key, keys, self.out_for)
            if op == "push":
                self.both("push", key, value)
            elif op == "pull":
                self.both("pull", key, *self.random.choice([[], [out]]))
            elif self.random.random() < 0.5:
                self.both("pushpull", key, value, out)
            else:
                self.both("pushpull", key, self.values(key, keys, self.out_for))

    def first_init(self, op, free):
        shape, dtype = self.random.choice(SHAPES), self.random.choice(DTYPES)
        made = {}

        def make(k):
            made[k] = self.tensor(shape, dtype)
            return made[k]

        def out_for(k):
            return torch.zeros(shape, dtype=made[k].dtype, device=self.device)

        key, keys = self.keys(free, repeats=False)
        value = self.values(key, keys, make, replicas=False)
        if op == "broadcast":
            self.both("broadcast", key, value, self.values(key, keys, out_for))
        else:
            self.both("init", key, value)

    def check(self):
        assert self.store.keys() == list(self.model.stored)
        assert len(self.store) == len(self.model.stored)
        for key, value in self.model.stored.items():
            assert_same(self.store.pull(key), value)
            assert self.store.shape(key) == value.shape
            assert self.store.dtype(key) is value.dtype


def on_cpu(thing):
    """A copy, with the tensors in CPU memory."""
    if isinstance(thing, torch.Tensor):
        return thing.to("cpu", copy=True)
    if isinstance(thing, (list, tuple)):
        return type(thing)(on_cpu(member) for member in thing)
    return thing


def flat(thing):
    """The tensors in a nest of lists and tuples."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    if isinstance(thing, (list, tuple)):
        return [tensor for member in thing for tensor in flat(member)]
    return []


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)
@pytest.mark.parametrize("seed", range(40))
def test_random_calls_agree_with_the_model(seed, store_type, device):
    player = Player(seed, store_type, device)
    try:
        for _ in range(80):
            player.step()
            player.check()
    except Exception as error:
        recent = "\n".join(map(str, player.log[-3:]))
        note = f"seed {seed}, {store_type}, {device}; last calls:\n{recent}"
        raise AssertionError(note) from error


def test_the_comparison_sees_a_difference():
    player = Player(0, "local")
    player.both("init", player.names[0], torch.ones(3))
    player.check()
    player.store.set_updater(add_input)
    with pytest.raises(AssertionError):
        player.both("pushpull", player.names[0], torch.ones(3), torch.zeros(3))
    assert bits(torch.tensor(0.0)) != bits(torch.tensor(-0.0))
