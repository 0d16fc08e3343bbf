"""Options of what is done to gradients, which all built-in optimizers share.

The ranges are checked in ``csrc/update/optimizer.cpp``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from torchkv.optim.groups import as_number, near


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


GRADIENT_DEFAULTS: dict[str, Any] = {
    "accumulate": 1,
    "rescale_grad": 1.0,
    "clip_value": None,
    "max_norm": None,
    "skip_nonfinite": False,
}


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
    result = {**GRADIENT_DEFAULTS, **options}
    for name, value in result.items():
        if name == "skip_nonfinite":
            result[name] = as_switch(op, name, value)
        elif value is not None or GRADIENT_DEFAULTS[name] is not None:
            number = as_number(op, name, value)
            # C++ takes 0 for None.
            if GRADIENT_DEFAULTS[name] is None and number <= 0:
                raise ValueError(
                    f"{op}: expected a {name} greater than 0, or None, but got "
                    f"{value!r}"
                )
            if name == "accumulate" and number.is_integer():
                result[name] = int(number)
    return result


def as_switch(op: str, name: str, value: Any) -> bool:
    """A bool; also of 0 and 1."""
    if not isinstance(value, bool | int) or value not in (0, 1):
        raise TypeError(f"{op}: expected True or False as {name}, but got {value!r}")
    return bool(value)


def gradient_numbers(gradient: Mapping[str, Any]) -> dict[str, float]:
    """Gradient options as the numbers of C++."""
    return {option: float(value or 0) for option, value in gradient.items()}


def gradient_of_numbers(numbers: Mapping[str, float]) -> dict[str, Any]:
    """Gradient options from the numbers of C++."""
    return {
        "accumulate": int(numbers["accumulate"]),
        "rescale_grad": numbers["rescale_grad"],
        "clip_value": numbers["clip_value"] or None,
        "max_norm": numbers["max_norm"] or None,
        "skip_nonfinite": bool(numbers["skip_nonfinite"]),
    }
