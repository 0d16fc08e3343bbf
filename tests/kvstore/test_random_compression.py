"""Random calls of stores that compress, with sparse values among them, against models.

Keys come and go, schemes change, updaters too, and the store is saved and loaded.
"""

import copy
import random

import pytest
import torch

from compression_model import WITH_FEEDBACK, Model, some
from helpers import assert_same, script

SHAPES = [(1,), (5,), (2, 3), (1025,), (0, 3), (4, 2, 3)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def add(key: str, input: torch.Tensor, stored: torch.Tensor):
    stored.add_(input)


class Player:
    """Makes the same random calls on a store and on models of its keys."""

    def __init__(self, seed, store, device="cpu"):
        torch.manual_seed(seed)
        self.random = random.Random(seed)
        self.store, self.device = store, device
        self.codec, self.adds = None, False
        self.stored, self.models = {}, {}

    def step(self):
        ops = ["init", "push", "push", "push", "push", "scheme", "assign", "delete"]
        op = self.random.choice([*ops, "updater", "copy"])
        if op in ("push", "assign", "delete") and not self.stored:
            op = "init"
        getattr(self, op)()

    def init(self):
        key = f"w{self.random.randint(0, 4)}"
        if key not in self.stored:
            value = some(self.random.choice(SHAPES), self.random.choice(DTYPES))
            self.store.init(key, value.to(self.device))
            self.stored[key] = value
            self.models[key] = Model(None, value.shape, value.dtype)

    def push(self):
        keys = self.random.sample(
            list(self.stored), self.random.randint(1, len(self.stored))
        )
        keys += self.random.choice([[], keys[:1]])  # merged into one list
        values = [
            [self.value(key) for _ in range(self.random.randint(1, 3))] for key in keys
        ]
        theirs = [[each.to(self.device) for each in group] for group in values]
        if self.random.random() < 0.5:
            self.store.push(keys, theirs)
        else:
            outs = [torch.zeros_like(self.stored[key]) for key in keys]
            self.store.pushpull(keys, theirs, out=outs)
        groups = {}
        for key, group in zip(keys, values, strict=True):
            groups.setdefault(key, []).extend(group)
        for key, group in groups.items():
            total = self.sum(key, group).to(self.stored[key].dtype)
            self.stored[key] = self.stored[key] + total if self.adds else total

    def value(self, key):
        like = self.stored[key]
        dtype = self.random.choice(DTYPES) if self.random.random() < 0.2 else like.dtype
        value = some(like.shape, dtype)
        # Of a list with a sparse value nothing is compressed.
        if like.dim() > 1 and len(like) != 0 and self.random.random() < 0.1:
            value[0] = 0
            return value.to_sparse(1)
        return value

    def sum(self, key, values):
        model = self.models[key]
        sparse = any(value.is_sparse for value in values)
        if self.codec is not None and not sparse:
            model.codec = self.codec
            return model.sum(values)
        wide = [value.to_dense().to(model.dtype) for value in values]
        if any(value.dtype == torch.float64 for value in values):
            wide = [value.to_dense().double() for value in values]
        return sum(wide[1:], wide[0])

    def scheme(self):
        self.codec = self.random.choice([None, *WITH_FEEDBACK])
        self.store.set_gradient_compression(self.codec)
        if self.codec is None:
            for model in self.models.values():
                model.residuals = []

    def assign(self):
        key = self.random.choice(list(self.stored))
        value = some(self.stored[key].shape, self.stored[key].dtype)
        self.store.assign(key, value.to(self.device))
        self.stored[key] = value

    def delete(self):
        key = self.random.choice(list(self.stored))
        self.store.delete(key)
        del self.stored[key], self.models[key]

    def updater(self):
        self.adds = not self.adds
        self.store.set_updater(script(add) if self.adds else None)

    def copy(self):
        self.store = copy.deepcopy(self.store)

    def check(self):
        assert set(self.store.keys()) == set(self.stored)
        for key, value in self.stored.items():
            assert_same(self.store.pull(key).cpu(), value)
        state = self.store.state_dict()["keys"]
        for key, model in self.models.items():
            residuals = state[key].get("residuals", [])
            assert len(residuals) == len(model.residuals)
            for actual, expected in zip(residuals, model.residuals, strict=True):
                assert torch.equal(actual.cpu(), expected)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)
@pytest.mark.parametrize("seed", range(40))
def test_random_calls_agree_with_the_models(seed, device_kv, device):
    player = Player(seed, device_kv, device)
    for _ in range(60):
        player.step()
        player.check()
