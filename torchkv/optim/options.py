"""Options of the built-in optimizers, as users write them and as C++ takes them.

Ranges are checked in C++: of what is done to gradients, which all optimizers share, in
``csrc/update/optimizer.cpp``, of the formulas in ``csrc/core/rule.cpp``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from torchkv.arguments import as_number, near


class GradientOptions(TypedDict, total=False):
    """What is done to the summed gradient before the formula, in this order.

    Keyword arguments and attributes of all optimizers of :mod:`torchkv.optim`. Writing
    an attribute takes effect at the next push.
    """

    accumulate: int
    """The number of pushes of a key that are added up to one step."""
    rescale_grad: float
    """A factor, such as 1 / batch size."""
    clip_value: float | None
    """Clamps each element to [-clip_value, clip_value], if not None."""
    max_norm: float | None
    """Clips the total 2-norm of the gradients of all keys of one push, as
    ``torch.nn.utils.clip_grad_norm_`` does, if not None."""
    skip_nonfinite: bool
    """Discards pushes whose gradients' norm is not finite."""
    lazy: bool
    """Whether sparse gradients step only the rows that they have (the default, as
    MXNet's ``lazy_update``). If False, they are dense gradients with zeros."""


GRADIENT_DEFAULTS: dict[str, Any] = {
    "accumulate": 1,
    "rescale_grad": 1.0,
    "clip_value": None,
    "max_norm": None,
    "skip_nonfinite": False,
    "lazy": True,
}


# Options that are bools, with the names that C++ has for them.
_SWITCHES = {
    name: name
    for name in (
        "nesterov",
        "maximize",
        "amsgrad",
        "centered",
        "skip_nonfinite",
        "lazy",
        "bias_correction",
        "momentum_correction",
    )
}
_SWITCHES["decoupled_weight_decay"] = "decoupled"

# None is 0 in C++.
_OPTIONAL = (
    "clip_value",
    "max_norm",
    "clip_gradient",
    "clip_weights",
    "lower_bound",
    "upper_bound",
)

# Names that are the numbers of a C++ enum.
_CHOICES = {"warmup_strategy": ("linear", "power2", "sqrt", "lars")}

_COUNTS = ("accumulate", "batch_scale", "begin_update", "seed", "warmup_updates")


def with_defaults(
    op: str, options: Mapping[str, Any], others: Iterable[str] = ()
) -> dict[str, Any]:
    """Gradient options with defaults; `others` are further options, for messages."""
    for name in options:
        if name not in GRADIENT_DEFAULTS:
            known = [*others, *GRADIENT_DEFAULTS]
            raise TypeError(
                f"{op}: unknown option {name!r}; expected one of {', '.join(known)}"
                f"{near(name, known)}"
            )
    numbers = numbers_of(op, {**GRADIENT_DEFAULTS, **options})
    return options_of(GRADIENT_DEFAULTS, numbers)


def numbers_of(op: str, options: Mapping[str, Any]) -> dict[str, float]:
    """Options as the numbers of C++."""
    result: dict[str, float] = {}
    for name, value in options.items():
        if name == "betas":
            if not isinstance(value, list | tuple) or len(value) != 2:
                raise ValueError(
                    f"{op}: expected two numbers as betas, but got {value!r}"
                )
            for i, beta in enumerate(value):
                result[f"beta{i + 1}"] = as_number(op, f"betas[{i}]", beta)
        elif name in _SWITCHES:
            if not isinstance(value, bool | int) or value not in (0, 1):
                raise TypeError(
                    f"{op}: expected True or False as {name}, but got {value!r}"
                )
            result[_SWITCHES[name]] = value
        elif value is None and name in _OPTIONAL:
            result[name] = 0.0
        elif name in _CHOICES:
            if value not in _CHOICES[name]:
                raise ValueError(
                    f"{op}: expected one of {', '.join(map(repr, _CHOICES[name]))} as "
                    f"{name}, but got {value!r}"
                )
            result[name] = _CHOICES[name].index(value)
        else:
            result[name] = as_number(op, name, value)
            if name in _OPTIONAL and result[name] <= 0:
                raise ValueError(
                    f"{op}: expected a {name} greater than 0, or None, but got "
                    f"{value!r}"
                )
    return result


def options_of(names: Iterable[str], numbers: Mapping[str, float]) -> dict[str, Any]:
    """Options from the numbers of C++."""
    result: dict[str, Any] = {}
    for name in names:
        if name == "betas":
            result[name] = (numbers["beta1"], numbers["beta2"])
        elif name in _SWITCHES:
            result[name] = bool(numbers[_SWITCHES[name]])
        elif name in _OPTIONAL:
            result[name] = numbers[name] or None
        elif name in _CHOICES:
            result[name] = _CHOICES[name][int(numbers[name])]
        else:
            number = numbers[name]
            is_count = name in _COUNTS and number.is_integer()
            result[name] = int(number) if is_count else number
    return result
