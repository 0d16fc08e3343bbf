"""MXNet's schedulers as functions: values that MXNet 1.9.1 returns."""

import copy
import pickle

import pytest

from torchkv.lr_scheduler import (
    CosineScheduler,
    FactorScheduler,
    LRScheduler,
    MultiFactorScheduler,
    PolyScheduler,
)

WARM = {"warmup_steps": 2, "warmup_begin_lr": 0.2}
# By scheduler, the rates of updates 0, 1, ...
RATES = [
    (
        FactorScheduler(3, 0.5, 0.1, base_lr=1.0),
        [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]
        + [0.125, 0.125, 0.125, 0.1, 0.1, 0.1, 0.1],
    ),
    (
        FactorScheduler(3, 0.5, base_lr=1.0, warmup_steps=4),
        [0, 0.25, 0.5, 0.75, 0.5, 0.5, 0.5, 0.25],
    ),
    (FactorScheduler(1, 0.5, 0.1, base_lr=0.01), [0.01, 0.01, 0.1, 0.1]),
    (MultiFactorScheduler([3, 6], 0.5, base_lr=1.0), [1] * 4 + [0.5] * 3 + [0.25] * 2),
    (
        CosineScheduler(6, 1.0, 0.1, **WARM),
        [0.2, 0.6, 1, 0.8681980515, 0.55, 0.2318019485, 0.1, 0.1, 0.1],
    ),
    (
        PolyScheduler(6, 1.0, 2, 0.1, **WARM, warmup_mode="constant"),
        [0.2, 0.2, 1, 0.60625, 0.325, 0.15625, 0.1, 0.1, 0.1],
    ),
    (PolyScheduler(4, 0.8, pwr=1), [0.8, 0.6, 0.4, 0.2, 0, 0]),
]
SCHEDULERS = [scheduler for scheduler, _ in RATES]


@pytest.mark.parametrize(("scheduler", "rates"), RATES, ids=repr)
def test_rates(scheduler, rates):
    assert [scheduler(n) for n in range(len(rates))] == pytest.approx(rates, rel=1e-9)
    assert scheduler(0) == pytest.approx(rates[0])  # not a matter of earlier calls


def test_many_steps_of_a_multi_factor_scheduler():
    scheduler = MultiFactorScheduler(list(range(1, 13)), 0.5, base_lr=1.0)
    assert [scheduler(n) for n in range(14)] == [1.0, 1.0] + [
        0.5**n for n in range(1, 13)
    ]


def test_defaults_are_mxnets():
    assert FactorScheduler(1)(5) == MultiFactorScheduler([1])(5) == 0.01
    assert PolyScheduler(2)(1) == pytest.approx(0.01 / 4)
    assert CosineScheduler(2)(1) == pytest.approx(0.01 / 2)


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=repr)
def test_copies_are_equal(scheduler):
    for again in (copy.deepcopy(scheduler), pickle.loads(pickle.dumps(scheduler))):
        assert again == scheduler and hash(again) == hash(scheduler)
        assert type(again) is type(scheduler) and repr(again) == repr(scheduler)
    assert sum(other == scheduler for other in SCHEDULERS) == 1
    assert scheduler != "a scheduler"


def test_repr():
    scheduler = FactorScheduler(1000, 0.5, base_lr=0.1)
    assert repr(scheduler) == (
        "FactorScheduler(step=1000.0, factor=0.5, stop_factor_lr=1e-08, base_lr=0.1)"
    )


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: FactorScheduler(0), ValueError, "step .*at least 1, but got 0"),
        (lambda: FactorScheduler(2.5), ValueError, "step .*whole number"),
        (lambda: FactorScheduler(1, 1.5), ValueError, "factor .*at most 1.*1.5"),
        (lambda: FactorScheduler(1, -0.5), ValueError, "factor .*at least 0"),
        (lambda: FactorScheduler("1"), TypeError, "number as step.*str"),
        (lambda: FactorScheduler(1, base_lr=-1), ValueError, "base_lr.*at least 0"),
        (lambda: FactorScheduler(1, base_lr=float("nan")), ValueError, "base_lr"),
        (lambda: MultiFactorScheduler([3, 3]), ValueError, "greater than the one"),
        (lambda: MultiFactorScheduler([0]), ValueError, r"step.0 .*at least 1"),
        (lambda: MultiFactorScheduler([]), TypeError, "at least one number"),
        (lambda: MultiFactorScheduler(3), TypeError, "list"),
        (lambda: MultiFactorScheduler([3], 2), ValueError, "factor"),
        (lambda: PolyScheduler(0), ValueError, "max_update"),
        (lambda: PolyScheduler(3, pwr=-1), ValueError, "pwr"),
        (lambda: PolyScheduler(3, warmup_steps=3), ValueError, "less than max_update"),
        (lambda: CosineScheduler(3, 1, -0.1), ValueError, "final_lr"),
        (lambda: CosineScheduler(3, warmup_mode="x"), ValueError, "warmup_mode.*'x'"),
        (lambda: FactorScheduler(1, warmup_steps=-1), ValueError, "warmup_steps"),
        (
            lambda: FactorScheduler(1, base_lr=0.1, warmup_begin_lr=0.2),
            ValueError,
            "warmup_begin_lr .*at most .*0.1, but got 0.2",
        ),
        (lambda: LRScheduler(), TypeError, "subclasses"),
        (lambda: FactorScheduler(1)(-1), ValueError, "at least 0, but got -1"),
    ],
    ids=range(21),
)
def test_refusals(make, error, text):
    with pytest.raises(error, match=text):
        make()
