"""Every option of each optimizer, compared with torch.optim's own steps."""

import pytest
import torch

import torchkv
from helpers import allocated_bytes, assert_same, bits, full, run_threads, stored
from optim_cases import CASES, FEW, ids
from torchkv import optim

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

STEPS = 100

TOLERANCES = {
    torch.float32: {"rtol": 1e-6, "atol": 1e-6},
    torch.float64: {"rtol": 1e-12, "atol": 1e-14},
    torch.complex64: {"rtol": 1e-6, "atol": 1e-6},
    torch.complex128: {"rtol": 1e-12, "atol": 1e-14},
}

SHAPES = [(5, 3, 2, 4), (37,), (), (0, 3)]


def replicas_of(gradient, count):
    """Values that add up to `gradient`, exactly: halves of its bits each."""
    parts = [gradient * 2.0 ** -(i + 1) for i in range(count - 1)]
    return [*parts, gradient * 2.0 ** -(count - 1)]


class Pair:
    """A store and torch's optimizer on the same values."""

    def __init__(self, kv, name, options, dtype=torch.float32, shapes=SHAPES):
        self.kv = kv
        self.values = [torch.randn(shape, dtype=dtype) for shape in shapes]
        if len(shapes[0]) == 4:
            fmt = torch.channels_last
            self.values[0] = self.values[0].contiguous(memory_format=fmt)
        self.keys = list(range(len(shapes)))
        self.parameters = [torch.nn.Parameter(v.clone()) for v in self.values]
        kv.init(self.keys, self.values)
        cls = getattr(torch.optim, name)
        self.theirs = cls(self.parameters, foreach=False, **options)
        self.ours = getattr(optim, name)(**options)
        kv.set_optimizer(self.ours)

    def gradients(self):
        return [torch.randn_like(p) for p in self.parameters]

    def step(self, count=1):
        gradients = self.gradients()
        pushed = [replicas_of(g, count) for g in gradients]
        if count > 1:  # layouts of all kinds
            pushed[0][1] = pushed[0][1].contiguous()
            pushed[0][0] = pushed[0][0].transpose(0, 3).contiguous().transpose(0, 3)
        self.kv.push(self.keys, pushed)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.theirs.step()

    def check(self):
        for key, parameter in zip(self.keys, self.parameters, strict=True):
            torch.testing.assert_close(
                stored(self.kv, key), parameter.detach(), **TOLERANCES[parameter.dtype]
            )


@pytest.mark.parametrize(("name", "options"), CASES, ids=ids)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_each_combination_of_options_matches_torch(name, options, dtype):
    with torchkv.create() as kv:
        pair = Pair(kv, name, options, dtype)
        for step in range(STEPS):
            pair.step(1 + step % 4)
        pair.check()


@pytest.mark.parametrize(("name", "options"), FEW, ids=ids)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_values_match_torch(kv, name, options, dtype):
    if name == "RMSprop" and options.get("centered"):
        options = {**options, "eps": 1e-3}  # a variance near 0 has few right digits
    pair = Pair(kv, name, options, dtype)
    for step in range(STEPS):
        pair.step(1 + step % 4)
    pair.check()


@pytest.mark.parametrize(("name", "options"), FEW, ids=ids)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_has_an_fp32_master(kv, name, options, dtype):
    value = torch.randn(5, 3).to(dtype)
    kv.init(3, value)
    kv.set_optimizer(getattr(optim, name)(**options))
    parameter = torch.nn.Parameter(value.float())
    theirs = getattr(torch.optim, name)([parameter], foreach=False, **options)
    for _ in range(STEPS):
        gradient = torch.randn(5, 3).to(dtype)
        kv.push(3, gradient)
        parameter.grad = gradient.float()
        theirs.step()
    master = kv.optimizer.state_dict()["state"][3]["master"]
    assert master.dtype == torch.float32
    torch.testing.assert_close(master, parameter.detach(), rtol=1e-6, atol=1e-6)
    assert_same(stored(kv, 3), master.to(dtype))


# --- Lion and LAMB: the papers


def lion_step(w, m, g, lr, betas, weight_decay):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms", algorithm 2."""
    update = (betas[0] * m + (1 - betas[0]) * g).sign() + weight_decay * w
    return w - lr * update, betas[1] * m + (1 - betas[1]) * g


def lamb_step(w, m, v, g, t, lr, betas, eps, weight_decay):
    """You et al., "Large Batch Optimization for Deep Learning", algorithm 2."""
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    r = (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
    update = r + weight_decay * w
    norms = w.norm(), update.norm()
    trust = norms[0] / norms[1] if norms[0] > 0 and norms[1] > 0 else 1.0
    return w - lr * trust * update, m, v


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("shape", [(5, 7), (), (0,)], ids=str)
def test_lion_matches_the_paper(kv, weight_decay, maximize, shape):
    w = torch.randn(shape, dtype=torch.float64)
    m = torch.zeros_like(w)
    kv.init(3, w)
    betas = (0.8, 0.95)
    kv.set_optimizer(
        optim.Lion(0.01, betas, weight_decay=weight_decay, maximize=maximize)
    )
    for _ in range(STEPS):
        g = torch.randn_like(w)
        kv.push(3, [g / 2, g / 2])
        w, m = lion_step(w, m, -g if maximize else g, 0.01, betas, weight_decay)
    torch.testing.assert_close(stored(kv, 3), w, rtol=1e-12, atol=1e-14)
    state = kv.optimizer.state_dict()["state"][3]
    torch.testing.assert_close(state["exp_avg"], m, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_lamb_matches_the_paper(kv, weight_decay, maximize, dtype):
    shapes = [(5, 7), (), (0,), (3, 2)]
    weights = [torch.randn(shape, dtype=dtype) for shape in shapes]
    weights[3].zero_()  # no norm, no scaling
    kv.init([0, 1, 2, 3], weights)
    kv.set_optimizer(optim.LAMB(0.01, weight_decay=weight_decay, maximize=maximize))
    states = [(w.double(), torch.zeros_like(w).double()) for w in weights]
    states = [(w, m, m) for w, m in states]
    for t in range(1, STEPS + 1):
        gradients = [torch.randn_like(w) for w in weights]
        kv.push([0, 1, 2, 3], [[g] for g in gradients])
        states = [
            lamb_step(
                *state,
                g.double() * (-1 if maximize else 1),
                t,
                0.01,
                (0.9, 0.999),
                1e-6,
                weight_decay,
            )
            for state, g in zip(states, gradients, strict=True)
        ]
    for key, (w, _, _) in enumerate(states):
        tolerance = 1e-10 if dtype == torch.float64 else 2e-5
        torch.testing.assert_close(
            stored(kv, key), w.to(dtype), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("cls", [optim.Lion, optim.LAMB])
def test_lion_and_lamb_treat_a_complex_number_as_two_real_ones(kv, cls, dtype):
    w = torch.randn(5, 7, dtype=dtype)
    with torchkv.create() as other:
        for store, value in ((kv, w), (other, torch.view_as_real(w))):
            store.init(3, value)
            store.set_optimizer(cls(0.01, weight_decay=0.1))
        for _ in range(STEPS):
            g = [torch.randn_like(w) for _ in range(2)]
            kv.push(3, g)
            other.push(3, [torch.view_as_real(v) for v in g])
        assert_same(torch.view_as_real(stored(kv, 3)), stored(other, 3))
        ours, theirs = (s.optimizer.state_dict()["state"][3] for s in (kv, other))
        assert_same(torch.view_as_real(ours["exp_avg"]), theirs["exp_avg"])


# --- Gradient options


def test_rescaled_and_clipped_by_value(kv):
    options = {"lr": 0.05, "momentum": 0.9}
    value = torch.randn(4, 5)
    parameter = torch.nn.Parameter(value.clone())
    theirs = torch.optim.SGD([parameter], **options, foreach=False)
    kv.init("w", value)
    kv.set_optimizer(optim.SGD(**options, rescale_grad=1 / 8, clip_value=0.1))
    for _ in range(STEPS):
        gradients = [torch.randn(4, 5) for _ in range(3)]
        kv.push("w", gradients)
        total = (gradients[0] + gradients[1]) + gradients[2]
        parameter.grad = (total / 8).clamp(-0.1, 0.1)
        theirs.step()
    torch.testing.assert_close(
        stored(kv, "w"), parameter.detach(), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipped_by_norm_of_all_keys(kv, max_norm):
    values = [torch.randn(4, 5), torch.randn(7), torch.randn(())]
    parameters = [torch.nn.Parameter(v.clone()) for v in values]
    theirs = torch.optim.Adam(parameters, lr=0.01, foreach=False)
    kv.init([0, 1, 2], values)
    kv.set_optimizer(optim.Adam(lr=0.01, max_norm=max_norm))
    for _ in range(STEPS):
        gradients = [torch.randn_like(v) for v in values]
        kv.push([0, 1, 2], gradients)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=False)
        theirs.step()
    for key, parameter in enumerate(parameters):
        torch.testing.assert_close(
            stored(kv, key), parameter.detach(), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("name", ["SGD", "Adam", "LAMB", "Lion"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pushes_accumulate_to_one_step(kv, name, dtype):
    value = torch.randn(4, 5).to(dtype)
    with torchkv.create() as other:
        for store, count in ((kv, 3), (other, 1)):
            store.init(3, value)
            store.set_optimizer(getattr(optim, name)(lr=0.1, accumulate=count))
        for _ in range(4):
            gradients = [torch.randint(-8, 9, (4, 5)).to(dtype) for _ in range(3)]
            before = bits(stored(kv, 3))
            for gradient in gradients[:2]:
                kv.push(3, [gradient])
                assert bits(stored(kv, 3)) == before
            state = kv.optimizer.state_dict()["state"][3]
            assert state["num_accumulated"] == 2
            kv.push(3, gradients[2])
            other.push(3, gradients)
            assert_same(stored(kv, 3), stored(other, 3))


def test_a_nonfinite_push_makes_no_step(kv):
    kv.init([3, 5], [full(1), full(1)])
    kv.set_optimizer(optim.SGD(lr=0.5, skip_nonfinite=True, clip_value=1.0))
    assert kv.optimizer.num_skipped == 0
    for bad in (torch.inf, -torch.inf, torch.nan):
        gradient = full(1)
        gradient[1, 2] = bad
        kv.push([3, 5], [full(1), gradient])
    assert kv.optimizer.num_skipped == 3
    for key in (3, 5):
        assert_same(stored(kv, key), full(1))
        assert kv.optimizer.state_dict()["state"][key]["step"] == 0
    kv.push([3, 5], [full(1), full(1)])
    assert kv.optimizer.num_skipped == 3
    assert_same(stored(kv, 5), full(0.5))


def test_gradient_options_together(kv):
    """Pushes without infinities add up; their sum is rescaled, then clipped twice."""
    values = [torch.randn(4, 5), torch.randn(7), torch.randn(())]
    parameters = [torch.nn.Parameter(v.clone()) for v in values]
    options = {"lr": 0.05, "momentum": 0.9}
    theirs = torch.optim.SGD(parameters, **options, foreach=False)
    kv.init([0, 1, 2], values)
    kv.set_optimizer(
        optim.SGD(
            **options,
            accumulate=2,
            rescale_grad=1 / 8,
            clip_value=0.1,
            max_norm=0.3,
            skip_nonfinite=True,
        )
    )
    added: list[list[torch.Tensor]] = []
    for push in range(STEPS):
        gradients = [torch.randn_like(v) for v in values]
        bad = push % 7 == 3  # of pushes that would step, and of others
        if bad:
            gradients[1][2] = torch.inf
        kv.push([0, 1, 2], gradients)
        if not bad:
            added.append(gradients)
        elif added:  # the step that was due is lost
            added = []
        if len(added) == 2:
            for parameter, *both in zip(parameters, *added, strict=True):
                parameter.grad = (sum(both) / 8).clamp(-0.1, 0.1)
            torch.nn.utils.clip_grad_norm_(parameters, 0.3, foreach=False)
            theirs.step()
            added = []
    assert kv.optimizer.num_skipped == len(range(3, STEPS, 7))
    for key, parameter in enumerate(parameters):
        torch.testing.assert_close(
            stored(kv, key), parameter.detach(), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize(
    ("name", "options"),
    [("LAMB", {}), ("SGD", {"momentum": 0.9}), ("Adam", {}), ("Lion", {})],
)
def test_bits_do_not_depend_on_the_number_of_threads(name, options):
    value = torch.randn(300_001)
    small = [torch.randn(1000 + i) for i in range(20)]
    gradients = [torch.randn(300_001) for _ in range(2)]
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with torchkv.create() as kv:
                keys = list(range(21))
                kv.init(keys, [value, *small])
                make = getattr(optim, name)
                kv.set_optimizer(make(lr=0.1, max_norm=0.5, **options))
                for _ in range(3):
                    kv.push(keys, [gradients, *([v] * 2 for v in small)])
                results.append([bits(v) for v in kv.pull(keys)])
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1]


def test_threads_push_different_keys():
    keys = list(range(8))
    values = [torch.randn(50) for _ in keys]
    gradients = torch.randn(30, 8, 50)
    with torchkv.create() as kv, torchkv.create() as one:
        for store in (kv, one):
            store.init(keys, values)
            store.set_optimizer(optim.AdamW(lr=0.01))
        for gradient in gradients:
            one.push(keys, list(gradient))

        def body(key):
            for gradient in gradients:
                kv.push(key, gradient[key])
                kv.optimizer.lr = 0.01

        run_threads([lambda key=key: body(key) for key in keys])
        assert [bits(v) for v in kv.pull(keys)] == [bits(v) for v in one.pull(keys)]


@pytest.mark.parametrize("name", ["SGD", "AdamW", "LAMB"])
def test_state_is_stored_once_for_any_number_of_replicas(name):
    def first_push(replicas):
        with torchkv.create() as kv:
            kv.init(3, torch.zeros(1000, dtype=torch.bfloat16))
            options = {"momentum": 0.9} if name == "SGD" else {}
            kv.set_optimizer(getattr(optim, name)(**options))
            values = [torch.ones(1000, dtype=torch.bfloat16)] * replicas
            return allocated_bytes(lambda: kv.push(3, values))

    tensors = 2 if name == "SGD" else 3  # with the master
    for replicas in (1, 4):
        assert first_push(replicas) == tensors * 4000
