"""Options of each optimizer, to be compared with torch.optim's own steps."""

import itertools

# Per class: values of each option, the first of which is torch's default.
GRIDS = {
    "SGD": {
        "lr": [0.05, 0.01],
        "momentum": [0, 0.9],
        "dampening": [0, 0.3, -0.2],
        "weight_decay": [0, 0.02],
        "nesterov": [False, True],
        "maximize": [False, True],
    },
    "Adam": {
        "lr": [0.01],
        "betas": [(0.9, 0.999), (0.3, 0.7)],
        "weight_decay": [0, 0.02],
        "amsgrad": [False, True],
        "maximize": [False, True],
        "eps": [1e-8, 1e-3],
    },
    "AdamW": {
        "lr": [0.01],
        "betas": [(0.9, 0.999), (0.3, 0.7)],
        "weight_decay": [0.01, 0],
        "amsgrad": [False, True],
        "maximize": [False, True],
        "eps": [1e-8, 1e-3],
    },
    "Adagrad": {
        "lr": [0.05],
        "lr_decay": [0, 0.1],
        "weight_decay": [0, 0.02],
        "initial_accumulator_value": [0, 0.5],
        "maximize": [False, True],
        "eps": [1e-10, 1e-3],
    },
    "RMSprop": {
        "lr": [0.01],
        "alpha": [0.99, 0.6],
        "weight_decay": [0, 0.02],
        "momentum": [0, 0.8],
        "centered": [False, True],
        "maximize": [False, True],
        "eps": [1e-8, 1e-3],
    },
}


def is_valid(options):
    if options.get("dampening", 0) < 0 and options["lr"] == 0.05:
        return False  # weights grow to 20, and torch's own roundings with them
    return not options.get("nesterov") or (
        options["momentum"] > 0 and options["dampening"] == 0
    )


CASES = [
    (name, options)
    for name, grid in GRIDS.items()
    for values in itertools.product(*grid.values())
    if is_valid(options := dict(zip(grid, values, strict=True)))
]
FEW = [
    ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.02}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.02}),
    ("AdamW", {"lr": 0.01}),
    ("Adagrad", {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.8}),
]


def ids(case):
    return (
        str(case) if not isinstance(case, dict) else "-".join(map(str, case.values()))
    )
