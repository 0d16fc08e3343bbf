"""Random calls with sparse values, on dense and row-sparse keys, against models.

A model of a key is a dict of its rows, each with the optimizer's state, which are
stepped by the formulas of ``torch.optim``. Keys and rows come and go, the optimizer
changes, and the store is copied and loaded.
"""

import copy
import random

import pytest
import torch

import torchkv
from helpers import script
from row_values import some_rows
from torchkv import optim
from torchkv.initializers import Normal

SHAPES = [(1,), (9,), (6, 5), (4, 2, 3), (7, 64)]
DTYPES = [torch.float32, torch.float64]
LR = 0.1


def sgd(gradient, state, count):
    state["momentum"] = 0.9 * state.get("momentum", 0) + gradient
    return LR * state["momentum"]


def adagrad(gradient, state, count):
    state["sum"] = state.get("sum", 0) + gradient * gradient
    return LR * gradient / (state["sum"].sqrt() + 1e-10)


def adam(gradient, state, count):
    state["mean"] = 0.9 * state.get("mean", 0) + 0.1 * gradient
    state["square"] = 0.999 * state.get("square", 0) + 0.001 * gradient * gradient
    root = (state["square"] / (1 - 0.999**count)).sqrt() + 1e-8
    return LR * state["mean"] / (1 - 0.9**count) / root


OPTIMIZERS = {
    sgd: lambda: optim.SGD(lr=LR, momentum=0.9),
    adagrad: lambda: optim.Adagrad(lr=LR),
    adam: lambda: optim.Adam(lr=LR),
}


# Gets and writes whole values, so that there are no row-sparse keys then.
def add(key: str, input: torch.Tensor, stored: torch.Tensor):
    stored.add_(input)


class Rows:
    """The model of a key: its rows in fp64, and what the others are."""

    def __init__(self, initial, dtype, is_sparse):
        self.dtype, self.is_sparse = dtype, is_sparse
        self.initial = initial.double()
        self.rows = {} if is_sparse else dict(enumerate(self.initial))
        self.forget_states()

    @property
    def shape(self):
        return self.initial.shape

    def forget_states(self):
        self.states, self.count = {}, 0

    def push(self, values, rule):
        """`rule`: a formula, ``"add"``, or None, which replaces the value."""
        gradients = {}
        for value in values:
            ids = value._indices()[0] if value.is_sparse else range(len(value))
            for row, numbers in zip(
                ids, value._values() if value.is_sparse else value, strict=True
            ):
                gradients[int(row)] = gradients.get(int(row), 0) + numbers.double()
        if rule is None:
            zeros = torch.zeros_like(self.initial)
            self.rows = {} if self.is_sparse else dict(enumerate(zeros))
            self.rows |= gradients
            return
        self.count += 1
        for row, gradient in gradients.items():
            before = self.rows.get(row, self.initial[row])
            if rule == "add":
                self.rows[row] = before + gradient
            else:
                state = self.states.setdefault(row, {})
                self.rows[row] = before - rule(gradient, state, self.count)

    def delete(self, ids):
        for row in ids:
            self.rows.pop(row, None)
            self.states.pop(row, None)

    def check(self, store, key, device):
        value = store.pull(key).cpu()
        if self.is_sparse:
            ids = value.indices()[0].tolist()
            assert ids == sorted(self.rows)
            assert store.num_rows(key) == len(ids)
            value = value.values()
        else:
            ids = range(len(value))
        for row, found in zip(ids, value, strict=True):
            torch.testing.assert_close(
                found.double(), self.rows[row], rtol=1e-4, atol=1e-5
            )
            self.rows[row] = found.double()  # or rounding errors would add up
        order = torch.randint(self.shape[0], (2, 3))
        found = store.row_sparse_pull(key, row_ids=order.to(device)).cpu()
        for row, numbers in zip(order.view(-1), found.flatten(0, 1), strict=True):
            expected = self.rows.get(int(row), self.initial[int(row)])
            assert torch.equal(numbers, expected.to(self.dtype))


class Player:
    """Makes the same random calls on a store and on models of its keys."""

    def __init__(self, seed, store, device):
        torch.manual_seed(seed)
        self.random = random.Random(seed)
        self.store, self.device = store, device
        self.rule = None
        self.keys = {}

    def step(self):
        ops = ["init", *["push"] * 6, "rows", "delete", "updater"]
        if not self.store.type.startswith("dist"):  # which refuse copies
            ops += ["copy", "load"]
        op = self.random.choice(ops)
        if not self.keys:
            op = "init"
        getattr(self, op)()

    def init(self):
        key = f"w{self.random.randint(0, 4)}"
        if key in self.keys:
            return
        shape, dtype = self.random.choice(SHAPES), self.random.choice(DTYPES)
        if self.rule == "add" or self.random.random() < 0.5:
            initial = torch.randn(shape, dtype=dtype)
            self.store.init(key, initial.to(self.device))
            self.keys[key] = Rows(initial, dtype, is_sparse=False)
            return
        init = Normal(seed=self.random.randint(0, 99))
        self.store.init_rows(key, shape[1:], dtype=dtype, num_rows=shape[0], init=init)
        initial = self.store.row_sparse_pull(key, row_ids=torch.arange(shape[0]))
        self.keys[key] = Rows(initial, dtype, is_sparse=True)

    def value(self, model):
        dtype = self.random.choice([model.dtype, torch.float32, torch.bfloat16])
        if self.random.random() < 0.2:
            return torch.randn(model.shape).to(dtype)
        count = self.random.randint(0, model.shape[0])
        coalesced = self.random.random() < 0.5
        return some_rows(tuple(model.shape), count, dtype, coalesced)

    def push(self):
        keys = self.random.sample(
            list(self.keys), self.random.randint(1, len(self.keys))
        )
        values = [
            [self.value(self.keys[key]) for _ in range(self.random.randint(1, 4))]
            for key in keys
        ]
        self.store.push(keys, [[v.to(self.device) for v in group] for group in values])
        for key, group in zip(keys, values, strict=True):
            self.keys[key].push(group, self.rule)

    def rows(self):
        """Forgets some."""
        sparse = [key for key, model in self.keys.items() if model.is_sparse]
        if sparse:
            key = self.random.choice(sparse)
            ids = torch.randint(self.keys[key].shape[0], (2,))
            self.store.delete(key, row_ids=ids.to(self.device))
            self.keys[key].delete(ids.tolist())

    def delete(self):
        key = self.random.choice(list(self.keys))
        self.store.delete(key)
        del self.keys[key]

    def updater(self):
        has_sparse_key = any(model.is_sparse for model in self.keys.values())
        self.rule = self.random.choice(
            [None, *OPTIMIZERS, *OPTIMIZERS, *([] if has_sparse_key else ["add"])]
        )
        if self.rule in OPTIMIZERS:
            self.store.set_optimizer(OPTIMIZERS[self.rule]())
        else:
            self.store.set_updater(script(add) if self.rule == "add" else None)
        for model in self.keys.values():
            model.forget_states()

    def copy(self):
        self.store = copy.deepcopy(self.store)

    def load(self):
        """Into a store that has none of it."""
        type = self.store.type
        state = self.store.state_dict()
        self.store = torchkv.create(type)
        self.store.load_state_dict(state)

    def check(self):
        assert set(self.store.keys()) == set(self.keys)
        for key, model in self.keys.items():
            model.check(self.store, key, self.device)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)
@pytest.mark.parametrize("seed", range(20))
def test_random_calls_agree_with_the_models(seed, each_kv, device):
    player = Player(seed, each_kv, device)
    for _ in range(40):
        player.step()
        player.check()
