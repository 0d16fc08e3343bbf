"""Options of MXNet's optimizers, and a run with a changing learning rate."""

import itertools

import numpy as np

STEPS = 100

_GRADIENT = [
    {},
    {"wd": 0.05, "rescale_grad": 0.5},
    {"wd": 0.2, "clip_gradient": 0.4},
    {"clip_gradient": 0.3, "rescale_grad": 2.0},
]
_OPTIONS = {
    "sgd": [{}, {"momentum": 0.9}],
    "ccsgd": [{"momentum": 0.5}],
    "nag": [{}, {"momentum": 0.9}],
    "signum": [{}, {"momentum": 0.0}, {"momentum": 0.5, "wd_lh": 0.1}],
    "adam": [{}, {"beta1": 0.5, "beta2": 0.7, "epsilon": 1e-2}],
    "adamax": [{}, {"beta1": 0.5, "beta2": 0.7}],
    "nadam": [{}, {"beta1": 0.5, "beta2": 0.7, "epsilon": 1e-2, "schedule_decay": 2}],
    "adagrad": [{}, {"eps": 0.1}],
    "adadelta": [{}, {"rho": 0.5, "epsilon": 1e-2}],
    "rmsprop": [
        {},
        {"gamma1": 0.5, "epsilon": 1e-2, "clip_weights": 1.0},
        {"centered": True, "epsilon": 1e-2},
        {"centered": True, "gamma1": 0.8, "gamma2": 0.3, "epsilon": 1e-3},
    ],
    "ftrl": [{}, {"lamda1": 0.3, "beta": 2}],
    "ftml": [{}, {"beta1": 0.3, "beta2": 0.9, "epsilon": 1e-2}],
    "dcasgd": [{}, {"lamda": 1.0}],
    "test": [{}],
    "lamb": [
        {},
        {"beta1": 0.5, "beta2": 0.7, "epsilon": 1e-2, "bias_correction": False},
        {"lower_bound": 3.0, "upper_bound": 4.0},
        {"upper_bound": 0.5},
    ],
    "lars": [
        {"eta": 0.5},
        {"momentum": 0.9, "eta": 0.2, "eps": 0.1},
        {"momentum": 0.9, "eta": 0.2, "momentum_correction": False},
    ],
    "lbsgd": [
        {},
        {"momentum": 0.9, "batch_scale": 2, "updates_per_epoch": 8},
        *(
            {"batch_scale": 4, "warmup_strategy": strategy, "begin_epoch": 1}
            for strategy in ("linear", "power2", "sqrt", "lars")
        ),
        {"momentum": 0.5, "warmup_strategy": "lars"},
    ],
    "groupadagrad": [{}, {"eps": 0.1}],
}

CASES = [
    (name, {**options, **gradient})
    for name, every in _OPTIONS.items()
    for options, gradient in itertools.product(every, _GRADIENT)
    if not (name == "groupadagrad" and "wd" in gradient)
]

# What each key is made from.
KEYS = (7, 8, 9)


def shares(name, options):
    """Whether MXNet's optimizer has a number that the steps of all keys change."""
    if name == "lars":  # the last learning rate
        return options.get("momentum") and options.get("momentum_correction", True)
    return name == "nadam"  # the schedule of the momentum


OF_SEVERAL_KEYS = [
    (name, options)
    for name, options in CASES
    if not shares(name, options)
    and ("wd" in options or name == "groupadagrad")
    and "clip_gradient" not in options
]
# With what docs/from_mxnet.md says of their difference from MXNet.
SHARING = [
    ("nadam", {}, 0.005),
    ("lars", {"momentum": 0.9, "eta": 0.2, "eps": 0.1}, 0.43),
]

# Of the learning rate, by name, with the options of MXNet's class.
SCHEDULES = [
    ("FactorScheduler", {"step": 7, "factor": 0.7, "base_lr": 0.1}),
    (
        "FactorScheduler",
        {"step": 3, "factor": 0.5, "stop_factor_lr": 1e-3, "warmup_steps": 9},
    ),
    (
        "MultiFactorScheduler",
        {"step": [5, 30, 31], "factor": 0.3, "base_lr": 0.1, "warmup_steps": 3},
    ),
    (
        "PolyScheduler",
        {"max_update": 80, "base_lr": 0.1, "pwr": 3, "final_lr": 0.01}
        | {"warmup_steps": 10, "warmup_begin_lr": 0.05, "warmup_mode": "constant"},
    ),
    (
        "CosineScheduler",
        {"max_update": 60, "base_lr": 0.1, "final_lr": 0.001, "warmup_steps": 5},
    ),
]
SCHEDULED = [
    (name, options, schedule)
    for name, options in [
        ("sgd", {"momentum": 0.9}),
        ("sgd", {"learning_rate": 0.05}),
        ("adam", {"begin_num_update": 4}),
        ("nadam", {"learning_rate": None, "wd": 0.01}),
        ("lbsgd", {"batch_scale": 2, "begin_num_update": 3, "updates_per_epoch": 8}),
    ]
    for schedule in SCHEDULES
]

# Of the learning rate, by step: a warm-up, then steps down and up again.
_RATES = {"signum": 0.01, "adam": 0.02, "adamax": 0.02, "nadam": 0.02, "lamb": 0.02}


def rate(name, step):
    base = _RATES.get(name, 0.05)
    return base * (0.25 + 0.75 * min(step / 10, 1)) * (0.5 if 40 <= step < 70 else 1)


def start(seed=KEYS[0]):
    """The first weights, and the gradients of each step."""
    random = np.random.default_rng(seed)
    weight = random.standard_normal((5, 7))
    return weight, random.standard_normal((STEPS, 5, 7)) + 0.1 * weight


def case(name, options, *more):
    """The name of a case."""
    return " ".join([name, *map(ids, (options, *more))])


def ids(case):
    if isinstance(case, tuple):
        return f"{case[0]}({ids(case[1])})"
    if not isinstance(case, dict):
        return str(case)
    return "-".join(f"{name}={value}" for name, value in case.items()) or "defaults"
