"""Sparse gradients: the pushed rows and their state step, as torch.optim's do."""

import copy

import pytest
import torch

from dtypes import FLOATS
from helpers import (
    add_input,
    assert_same,
    bits,
    run_threads,
    scripted_add_twice,
    stored,
)
from kv_model import OPMATH
from row_values import LARGE, model_sum, numbers, some_rows, sparse
from torchkv import optim

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


@pytest.fixture
def kv(each_kv):
    return each_kv


OPTIMIZERS = {
    "SGD": lambda: optim.SGD(lr=0.1, weight_decay=0.01),
    "momentum": lambda: optim.SGD(lr=0.1, momentum=0.9),
    "nesterov": lambda: optim.SGD(lr=0.1, momentum=0.9, nesterov=True),
    "maximize": lambda: optim.SGD(lr=0.1, maximize=True),
    "clipped": lambda: optim.SGD(lr=0.1, rescale_grad=0.3, clip_value=0.5),
    "Adam": lambda: optim.Adam(lr=0.1),
    "AMSGrad": lambda: optim.Adam(lr=0.1, amsgrad=True, weight_decay=0.01),
    "AdamW": lambda: optim.AdamW(lr=0.1),
    "Adagrad": lambda: optim.Adagrad(lr=0.1, lr_decay=0.1, initial_accumulator_value=1),
    "RMSprop": lambda: optim.RMSprop(lr=0.1, centered=True, momentum=0.9),
    "Lion": lambda: optim.Lion(lr=0.1),
    "mxnet.SGD": lambda: optim.mxnet.SGD(momentum=0.9, wd=0.1),
    "mxnet.AdaGrad": lambda: optim.mxnet.AdaGrad(wd=0.1, clip_gradient=2),
    "mxnet.RMSProp": lambda: optim.mxnet.RMSProp(centered=True, lazy=True),
    "mxnet.Ftrl": lambda: optim.mxnet.Ftrl(),
    "mxnet.DCASGD": lambda: optim.mxnet.DCASGD(lamda=1, momentum=0.5, lazy=True),
    "mxnet.LARS": lambda: optim.mxnet.LARS(momentum=0.9, eta=0.5, wd=0.1),
    "mxnet.LBSGD": lambda: optim.mxnet.LBSGD(momentum=0.9, warmup_strategy="lars"),
    "mxnet.GroupAdaGrad": lambda: optim.mxnet.GroupAdaGrad(clip_gradient=1),
}


def optimizer_state(kv, key=3):
    return kv.optimizer.state_dict()["state"].get(key, {})


# Its noise is another one for each key.
SGLD = {"mxnet.SGLD": lambda: optim.mxnet.SGLD(seed=3, lazy=True)}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", [*OPTIMIZERS, *SGLD])
def test_only_pushed_rows_and_their_state_change(kv, name, dtype):
    """Each row as a push of the dense sum would step it; the others not at all."""
    shape = (8, 5)
    kv.init(3, numbers(shape, dtype))
    kv.set_optimizer((OPTIMIZERS | SGLD)[name]())
    for step in range(4):
        other = copy.deepcopy(kv)
        before, state_before = stored(kv, 3), optimizer_state(kv)
        values = [some_rows(shape, 3, dtype) for _ in range(2)]
        total, has = model_sum(values, shape, OPMATH.get(dtype, dtype))
        kv.push(3, values)
        other.push(3, total)
        assert not has.all()
        expected = torch.where(has[:, None], stored(other, 3), before)
        assert_same(stored(kv, 3), expected, f"step {step}")
        state, dense_state = optimizer_state(kv), optimizer_state(other)
        assert state["step"] == dense_state["step"] == step + 1
        for key, tensor in state.items():
            if isinstance(tensor, torch.Tensor):
                old = state_before.get(key)
                assert_same(tensor[has], dense_state[key][has], key)
                if old is not None:
                    assert_same(tensor[~has], old[~has], key)


@pytest.mark.parametrize("shape", [(8, 5), LARGE], ids=str)
@pytest.mark.parametrize("name", [*OPTIMIZERS, "LAMB"])
def test_all_rows_are_a_dense_push(kv, name, shape):
    """The bits of the dense push, if all replicas push all rows, in any order."""
    kv.init([3, 5], [numbers(shape)] * 2)
    make = OPTIMIZERS.get(name, lambda: optim.LAMB(lr=0.1))
    kv.set_optimizer(make())
    for _ in range(3):
        dense = [numbers(shape) for _ in range(3)]
        orders = [torch.randperm(shape[0]), torch.arange(shape[0]), None]
        values = [
            value if order is None else sparse(order.tolist(), value[order], shape)
            for value, order in zip(dense, orders, strict=True)
        ]
        kv.push([3, 5], [values, dense])
        assert_same(stored(kv, 3), stored(kv, 5))
    ours, theirs = optimizer_state(kv, 3), optimizer_state(kv, 5)
    assert {*ours} == {*theirs}
    for key, tensor in ours.items():
        if isinstance(tensor, torch.Tensor):
            assert_same(tensor, theirs[key], key)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_dense_replica_steps_all_rows(kv, name):
    shape = (8, 5)
    kv.init([3, 5], [numbers(shape)] * 2)
    kv.set_optimizer(OPTIMIZERS[name]())
    for _ in range(2):
        values = [some_rows(shape, 3), numbers(shape), some_rows(shape, 3)]
        kv.push([3, 5], [values, model_sum(values, shape, torch.float32)[0]])
        assert_same(stored(kv, 3), stored(kv, 5))


def test_steps_in_all_shards(kv):
    kv.init(3, numbers(LARGE))
    kv.set_optimizer(optim.Adam(lr=0.1))
    for _ in range(2):
        other = copy.deepcopy(kv)
        before = stored(kv, 3)
        values = [some_rows(LARGE, 300), some_rows(LARGE, 300, coalesced=True)]
        total, has = model_sum(values, LARGE, torch.float32)
        kv.push(3, values)
        other.push(3, [total])
        expected = torch.where(has[:, None], stored(other, 3), before)
        assert_same(stored(kv, 3), expected)


def test_a_push_without_rows_is_a_step(kv):
    kv.init(3, numbers((4, 5)))
    kv.set_optimizer(optim.Adam(lr=0.1))
    before = stored(kv, 3)
    kv.push(3, some_rows((4, 5), 0))
    assert_same(stored(kv, 3), before)
    assert optimizer_state(kv)["step"] == 1


@pytest.mark.parametrize("make", [optim.LAMB, optim.mxnet.LAMB], ids=str)
def test_rules_that_need_all_rows_get_the_dense_sum(kv, make):
    shape = (8, 5)
    kv.init([3, 5], [numbers(shape)] * 2)
    kv.set_optimizer(make())
    for _ in range(2):
        values = [some_rows(shape, 3) for _ in range(2)]
        kv.push([3, 5], [values, model_sum(values, shape, torch.float32)[0]])
        assert_same(stored(kv, 3), stored(kv, 5))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_accumulated_pushes_step_as_their_dense_sum(kv, dtype):
    shape = (8, 5)
    kv.init([3, 5], [numbers(shape, dtype)] * 2)
    kv.set_optimizer(optim.Adam(lr=0.1, accumulate=3))
    for _ in range(2):
        for _ in range(3):
            value = some_rows(shape, 5, dtype, coalesced=True)
            kv.push([3, 5], [value, value.to_dense()])
        assert_same(stored(kv, 3), stored(kv, 5))


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_max_norm(kv, scale):
    """The norm is that of the merged rows, and the step is that of the rows."""
    shape = (8, 5)
    kv.init(3, numbers(shape, torch.float64))
    kv.set_optimizer(optim.SGD(lr=0.1, max_norm=1))
    values = [some_rows(shape, 4, torch.float64) for _ in range(2)]
    for value in values:
        value._values().mul_(scale)
    total, _ = model_sum(values, shape, torch.float64)
    before = stored(kv, 3)
    kv.push(3, values)
    assert kv.optimizer.grad_norm == pytest.approx(float(total.norm()), rel=1e-12)
    factor = min(1.0, 1 / (float(total.norm()) + 1e-6))
    torch.testing.assert_close(
        stored(kv, 3), before - 0.1 * factor * total, rtol=1e-12, atol=1e-12
    )


def test_the_norm_has_the_same_bits_for_any_number_of_threads(kv):
    kv.init(3, torch.zeros(20_000, 40))
    kv.set_optimizer(optim.SGD(lr=0.1, max_norm=1))
    values = [some_rows((20_000, 40), 20_000) for _ in range(2)]
    norms, before = set(), torch.get_num_threads()
    try:
        for threads in [1, 2, 3]:
            torch.set_num_threads(threads)
            kv.push(3, values)
            norms.add(kv.optimizer.grad_norm)
    finally:
        torch.set_num_threads(before)
    assert len(norms) == 1


def test_rows_that_are_not_finite_make_no_step(kv):
    kv.init(3, numbers((8, 5)))
    kv.set_optimizer(optim.Adam(lr=0.1, skip_nonfinite=True))
    before = stored(kv, 3)
    bad = some_rows((8, 5), 4)
    bad._values()[2, 3] = torch.inf
    kv.push(3, [some_rows((8, 5), 4), bad])
    assert_same(stored(kv, 3), before)
    assert kv.optimizer.num_skipped == 1
    kv.push(3, some_rows((8, 5), 4))
    assert optimizer_state(kv)["step"] == 1


@pytest.mark.parametrize("updater", [lambda: add_input, scripted_add_twice])
def test_opaque_updaters_get_the_dense_sum(kv, updater):
    shape = (6, 4)
    kv.set_updater(updater())
    kv.init([3, 5], [numbers(shape)] * 2)
    for _ in range(2):
        values = [some_rows(shape, 3) for _ in range(2)]
        kv.push([3, 5], [values, model_sum(values, shape, torch.float32)[0]])
        assert_same(stored(kv, 3), stored(kv, 5))


def test_torch_optim_classes_get_the_dense_sum(kv):
    shape = (6, 4)
    kv.init([3, 5], [numbers(shape)] * 2)
    kv.set_optimizer(torch.optim.NAdam, lr=0.1)
    for _ in range(2):
        values = [some_rows(shape, 3) for _ in range(2)]
        kv.push([3, 5], [values, model_sum(values, shape, torch.float32)[0]])
        assert_same(stored(kv, 3), stored(kv, 5))


# -- parity with torch.optim on sparse gradients


def embedding(dim=8):
    torch.manual_seed(3)
    return torch.nn.Embedding(20, dim, sparse=True)


def gradients_of(model):
    model.zero_grad()
    output = model(torch.randint(20, (12,)))
    (output * torch.randn_like(output)).sum().backward()
    return model.weight.grad


@pytest.mark.parametrize(
    ("ours", "theirs", "tolerance"),
    [
        (lambda: optim.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1), 1e-6),
        (
            lambda: optim.Adagrad(lr=0.1, lr_decay=0.01, initial_accumulator_value=0.5),
            lambda p: torch.optim.Adagrad(
                p, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.5
            ),
            1e-6,
        ),
        # SparseAdam adds eps before it corrects the bias of the second moment.
        (
            lambda: optim.Adam(lr=0.01, eps=1e-12),
            lambda p: torch.optim.SparseAdam(p, lr=0.01, eps=1e-12),
            1e-4,
        ),
    ],
    ids=["SGD", "Adagrad", "SparseAdam"],
)
def test_parity_with_torch_optim(kv, ours, theirs, tolerance):
    model = embedding()
    optimizer = theirs(list(model.parameters()))
    kv.init(3, model.weight.detach())
    kv.set_optimizer(ours())
    for _ in range(10):
        gradient = gradients_of(model)
        kv.push(3, gradient)
        optimizer.step()
        torch.testing.assert_close(
            stored(kv, 3), model.weight.detach(), rtol=tolerance, atol=tolerance
        )


# -- threads


@pytest.mark.parametrize("optimizer", [None, "Adam"])
def test_the_same_bits_for_any_number_of_threads(kv, optimizer):
    shape = (30_000, 40)
    values = [
        some_rows(shape, 20_000),
        some_rows(shape, 9000, coalesced=True),
        some_rows(shape, 5000),
    ]
    start, results, before = numbers(shape), set(), torch.get_num_threads()
    try:
        for threads in [1, 2, 3]:
            torch.set_num_threads(threads)
            if 3 in kv:
                kv.delete(3)
            kv.init(3, start)
            if optimizer:
                kv.set_optimizer(OPTIMIZERS[optimizer]())
            kv.push(3, values)
            kv.push(3, values[:2])
            results.add(bits(stored(kv, 3)))
    finally:
        torch.set_num_threads(before)
    assert len(results) == 1


def test_concurrent_pushes(kv):
    shape = (50, 8)
    kv.init(3, torch.zeros(shape))
    kv.set_optimizer(optim.SGD(lr=1.0))
    ids = [*range(0, 50, 3)]
    value = sparse(ids, -torch.ones(len(ids), 8), shape)

    def push():
        for _ in range(50):
            kv.push(3, [value, value])

    run_threads([push] * 4)
    expected = torch.zeros(shape)
    expected[ids] = 400
    assert_same(stored(kv, 3), expected)


NOT_LAZY = {
    "SGD": lambda: optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.1, lazy=False),
    "Adam": lambda: optim.Adam(lr=0.1, lazy=False),
    "mxnet.SGD": lambda: optim.mxnet.SGD(momentum=0.9, lazy_update=False),
    "mxnet.Ftrl": lambda: optim.mxnet.Ftrl(lazy=False),
    "clipped": lambda: optim.Adagrad(lr=0.1, max_norm=0.5, lazy=False),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", NOT_LAZY)
def test_without_lazy_all_rows_step(kv, name, dtype):
    shape = (8, 5)
    kv.init(3, numbers(shape, dtype))
    kv.set_optimizer(NOT_LAZY[name]())
    assert not kv.optimizer.lazy
    dense = copy.deepcopy(kv)
    for step in range(3):
        values = [some_rows(shape, 3, dtype) for _ in range(2)]
        total, _ = model_sum(values, shape, OPMATH.get(dtype, dtype))
        kv.push(3, values)
        dense.push(3, total)
        assert_same(stored(kv, 3), stored(dense, 3), f"step {step}")


def test_lazy_by_name_and_as_an_attribute(kv):
    kv.init(3, torch.zeros(4, 2))
    kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5, lazy_update=False)
    rows = sparse([1], torch.ones(1, 2), (4, 2))
    kv.push(3, rows)
    kv.push(3, sparse([2], torch.ones(1, 2), (4, 2)))
    assert stored(kv, 3)[:, 0].tolist() == [0, -1.5, -1, 0]
    kv.optimizer.lazy = True
    kv.push(3, sparse([2], torch.ones(1, 2), (4, 2)))
    assert stored(kv, 3)[:, 0].tolist() == [0, -1.5, -2.5, 0]
    assert copy.deepcopy(kv).optimizer.lazy
    kv.set_optimizer("adamw", lazy_update=False)
    assert not kv.optimizer.lazy
    assert not copy.deepcopy(kv).optimizer.lazy
    with pytest.raises(TypeError, match="True or False as lazy"):
        kv.optimizer.lazy = 0.5


@pytest.mark.parametrize("by_name", [False, True])
def test_lazy_and_lazy_update_are_one_option(kv, by_name):
    def make(**options):
        kv.set_optimizer(*(["sgd"] if by_name else [optim.mxnet.SGD]), **options)
        return kv.optimizer

    assert make().lazy
    assert not make(lazy=False).lazy
    assert not make(lazy_update=False).lazy
    with pytest.raises(ValueError, match="'lazy' or 'lazy_update'.*got both"):
        make(lazy=True, lazy_update=False)
    assert not kv.optimizer.lazy
