"""The formulas of MXNet 1.9.1's optimizers in NumPy, by name, from its documentation.

Where the documentation differs from what MXNet 1.9.1 computes, they are what it
computes: `test_mxnet_itself.py` compares the two.
"""

import numpy as np


def limit(x, bound):
    return np.clip(x, -bound, bound) if bound else x


class Formula:
    """One key: `step` makes one step with a gradient."""

    def __init__(self, name, weight, options):
        self.w = np.array(weight, np.float64)
        self.t = 0
        self.o = {**COMMON, **DEFAULTS[name], **options}
        self.state = [np.zeros_like(self.w) for _ in range(3)]
        self.formula = globals()[name]

    def step(self, gradient, learning_rate=None):
        if learning_rate is not None:
            self.o["learning_rate"] = learning_rate
        self.t += 1
        g = np.array(gradient, np.float64) * self.o["rescale_grad"]
        self.w = self.formula(self.w, g, self, **self.o)


COMMON = {
    "learning_rate": 0.01,
    "wd": 0.0,
    "rescale_grad": 1.0,
    "clip_gradient": None,
}
DEFAULTS = {
    "sgd": {"momentum": 0.0},
    "ccsgd": {"momentum": 0.0},
    "nag": {"momentum": 0.0},
    "signum": {"learning_rate": 0.01, "momentum": 0.9, "wd_lh": 0.0},
    "adam": {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
    "adamax": {"learning_rate": 0.002, "beta1": 0.9, "beta2": 0.999},
    "nadam": {
        "learning_rate": 0.001,
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-8,
        "schedule_decay": 0.004,
    },
    "adagrad": {"eps": 1e-7},
    "adadelta": {"rho": 0.9, "epsilon": 1e-5},
    "rmsprop": {
        "learning_rate": 0.001,
        "gamma1": 0.9,
        "gamma2": 0.9,
        "epsilon": 1e-8,
        "centered": False,
        "clip_weights": None,
    },
    "ftrl": {"learning_rate": 0.1, "lamda1": 0.01, "beta": 1},
    "ftml": {"beta1": 0.6, "beta2": 0.999, "epsilon": 1e-8},
    "dcasgd": {"momentum": 0.0, "lamda": 0.04},
    "test": {},
    "lamb": {
        "learning_rate": 0.001,
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-6,
        "lower_bound": None,
        "upper_bound": None,
        "bias_correction": True,
    },
    "lars": {
        "momentum": 0.0,
        "eta": 0.001,
        "eps": 0,
        "momentum_correction": True,
    },
    "lbsgd": {
        "momentum": 0.0,
        "warmup_strategy": "linear",
        "warmup_epochs": 5,
        "batch_scale": 1,
        "updates_per_epoch": 32,
        "begin_epoch": 0,
        "num_epochs": 60,
    },
    "sgld": {},
    "groupadagrad": {"eps": 1e-5},
}


def sgd(w, g, s, *, learning_rate, wd, clip_gradient, momentum, **_):
    s.state[0] = momentum * s.state[0] - learning_rate * (
        limit(g, clip_gradient) + wd * w
    )
    return w + s.state[0]


ccsgd = sgd


def nag(w, g, s, *, learning_rate, wd, clip_gradient, momentum, **_):
    g = limit(g, clip_gradient)
    change = learning_rate * (g + wd * w)
    w = w + momentum * (momentum * s.state[0] - change) - change
    # The weight decay in the momentum is that of the new weight.
    s.state[0] = momentum * s.state[0] - learning_rate * (g + wd * w)
    return w


def signum(w, g, s, *, learning_rate, wd, clip_gradient, momentum, wd_lh, **_):
    if momentum == 0:  # signSGD: no wd_lh, and the decay is outside of the sign
        return (1 - learning_rate * wd) * w - learning_rate * np.sign(g)
    s.state[0] = momentum * s.state[0] - (1 - momentum) * (
        limit(g, clip_gradient) + wd * w
    )
    return (1 - learning_rate * wd_lh) * w + learning_rate * np.sign(s.state[0])


def moments(w, g, s, wd, clip_gradient, beta1, beta2):
    g = limit(g + wd * w, clip_gradient)
    s.state[0] = beta1 * s.state[0] + (1 - beta1) * g
    s.state[1] = beta2 * s.state[1] + (1 - beta2) * g**2
    return g, s.state[0], s.state[1]


def adam(w, g, s, *, learning_rate, wd, clip_gradient, beta1, beta2, epsilon, **_):
    _, m, v = moments(w, g, s, wd, clip_gradient, beta1, beta2)
    rate = learning_rate * np.sqrt(1 - beta2**s.t) / (1 - beta1**s.t)
    return w - rate * m / (np.sqrt(v) + epsilon)


def adamax(w, g, s, *, learning_rate, wd, clip_gradient, beta1, beta2, **_):
    g = limit(g + wd * w, clip_gradient)
    s.state[0] = beta1 * s.state[0] + (1 - beta1) * g
    s.state[1] = np.maximum(beta2 * s.state[1], np.abs(g))
    return w - learning_rate / (1 - beta1**s.t) * s.state[0] / s.state[1]


def nadam(
    w, g, s, *, learning_rate, wd, clip_gradient, beta1, beta2, epsilon,
    schedule_decay, **_,
):  # fmt: skip
    g, m, v = moments(w, g, s, wd, clip_gradient, beta1, beta2)
    momentums = [
        beta1 * (1 - 0.5 * 0.96 ** (i * schedule_decay)) for i in range(1, s.t + 2)
    ]
    bias, next_bias = np.prod(momentums[:-1]), np.prod(momentums)
    mean = (1 - momentums[-2]) * g / (1 - bias) + momentums[-1] * m / (1 - next_bias)
    return w - learning_rate * mean / (np.sqrt(v / (1 - beta2**s.t)) + epsilon)


def adagrad(w, g, s, *, learning_rate, wd, clip_gradient, eps, **_):
    g = limit(g, clip_gradient)
    s.state[0] = s.state[0] + g**2
    return w - learning_rate * (g / np.sqrt(s.state[0] + eps) + wd * w)


def adadelta(w, g, s, *, wd, clip_gradient, rho, epsilon, **_):
    g = limit(g, clip_gradient)
    s.state[0] = rho * s.state[0] + (1 - rho) * g**2
    change = np.sqrt(s.state[1] + epsilon) / np.sqrt(s.state[0] + epsilon) * g
    s.state[1] = rho * s.state[1] + (1 - rho) * change**2
    return w - change - wd * w


def rmsprop(
    w, g, s, *, learning_rate, wd, clip_gradient, gamma1, gamma2, epsilon, centered,
    clip_weights, **_,
):  # fmt: skip
    g = limit(g + wd * w, clip_gradient)
    s.state[0] = gamma1 * s.state[0] + (1 - gamma1) * g**2
    if not centered:
        w = w - learning_rate * g / np.sqrt(s.state[0] + epsilon)
        return limit(w, clip_weights)
    s.state[1] = gamma1 * s.state[1] + (1 - gamma1) * g
    root = np.sqrt(s.state[0] - s.state[1] ** 2 + epsilon)
    s.state[2] = gamma2 * s.state[2] - learning_rate * g / root
    return limit(w + s.state[2], clip_weights)


def ftrl(w, g, s, *, learning_rate, wd, clip_gradient, lamda1, beta, **_):
    g = limit(g, clip_gradient)
    before = np.sqrt(s.state[1])
    s.state[1] = s.state[1] + g**2
    root = np.sqrt(s.state[1])
    s.state[0] = z = s.state[0] + g - (root - before) * w / learning_rate
    rest = np.maximum(np.abs(z) - lamda1, 0)
    return -np.sign(z) * rest / ((beta + root) / learning_rate + wd)


def ftml(w, g, s, *, learning_rate, wd, clip_gradient, beta1, beta2, epsilon, **_):
    d, v, z = s.state
    g = limit(g + wd * w, clip_gradient)
    v = beta2 * v + (1 - beta2) * g**2
    new_d = (1 - beta1**s.t) / learning_rate
    new_d = new_d * (np.sqrt(v / (1 - beta2**s.t)) + epsilon)
    z = beta1 * z + (1 - beta1) * g - (new_d - beta1 * d) * w
    s.state = [new_d, v, z]
    return -z / new_d


def dcasgd(w, g, s, *, learning_rate, wd, clip_gradient, momentum, lamda, **_):
    g = limit(g, clip_gradient)
    previous = w if s.t == 1 else s.state[0]
    s.state[0] = w
    s.state[1] = momentum * s.state[1] - learning_rate * (
        g + wd * w + lamda * g**2 * (w - previous)
    )
    return w + s.state[1]


def test(w, g, s, **_):
    return w + g


def norm(x):
    return np.sqrt(np.sum(x**2))


def lamb(
    w, g, s, *, learning_rate, wd, clip_gradient, beta1, beta2, epsilon, lower_bound,
    upper_bound, bias_correction, **_,
):  # fmt: skip
    _, m, v = moments(w, limit(g, clip_gradient), s, 0, None, beta1, beta2)
    if bias_correction:
        m, v = m / (1 - beta1**s.t), v / (1 - beta2**s.t)
    change = m / (np.sqrt(v) + epsilon) + wd * w
    size = norm(w)
    size = max(size, lower_bound) if lower_bound else size
    size = min(size, upper_bound) if upper_bound else size
    trust = size / norm(change) if size > 0 and norm(change) > 0 else 1
    return w - learning_rate * trust * change


def lars(
    w, g, s, *, learning_rate, wd, clip_gradient, momentum, eta, eps,
    momentum_correction, **_,
):  # fmt: skip
    w_norm, g_norm = norm(w), norm(g)
    trust = 1.0
    if w_norm > 0 and g_norm > 0:
        trust = eta * w_norm / (g_norm + wd * w_norm + eps)
    last = getattr(s, "last_lr", learning_rate)
    s.last_lr = learning_rate
    if momentum_correction and last != 0:
        momentum = momentum * (learning_rate / last)
    g = limit(g, clip_gradient) + wd * w
    s.state[0] = momentum * s.state[0] - learning_rate * trust * g
    return w + s.state[0]


def lbsgd(
    w, g, s, *, learning_rate, wd, clip_gradient, rescale_grad, momentum,
    warmup_strategy, warmup_epochs, batch_scale, updates_per_epoch, begin_epoch, **_,
):  # fmt: skip
    s.state[1] = s.state[1] + g
    updates = begin_epoch * updates_per_epoch + s.t
    if updates % batch_scale != 0:
        return w
    g, s.state[1] = s.state[1] / batch_scale, np.zeros_like(w)
    warmup = warmup_epochs * updates_per_epoch
    if warmup_strategy == "lars":  # of the gradient that is not rescaled
        w2, g2 = norm(w) ** 2, norm(g / rescale_grad) ** 2
        factor = np.clip(np.sqrt(w2 / (g2 + wd * w2 + 1e-18)), 0.01, 100)
    elif updates >= warmup:
        factor = batch_scale
    elif warmup <= 1:
        factor = 1
    else:
        part = updates / warmup
        power = {"linear": part, "power2": part**2, "sqrt": np.sqrt(part)}
        factor = 1 + (batch_scale - 1) * power.get(warmup_strategy, 0)
    s.state[0] = momentum * s.state[0] - factor * learning_rate * (
        limit(g, clip_gradient) + wd * w
    )
    return w + s.state[0]


def sgld(w, g, s, *, learning_rate, wd, clip_gradient, **_):
    """The mean; the variance is the learning rate."""
    return w - learning_rate / 2 * (limit(g, clip_gradient) + wd * w)


def groupadagrad(w, g, s, *, learning_rate, clip_gradient, eps, **_):
    g = limit(g, clip_gradient)
    s.state[0] = s.state[0] + np.mean(g**2, axis=1, keepdims=True)
    return w - learning_rate * g / np.sqrt(s.state[0] + eps)
