"""Run by MXNet's own Python: writes the weights that its optimizers end with.

``python mxnet_peer.py OUT.npz DTYPE...``: for each dtype the names of the cases, and an
array of their weights.
"""

import sys

import mxnet as mx
import numpy as np

from mxnet_cases import (
    CASES,
    KEYS,
    OF_SEVERAL_KEYS,
    SCHEDULED,
    SHARING,
    case,
    rate,
    start,
)


def train(name, options, dtype, schedule=None, keys=(KEYS[0],)):
    """By key."""
    weights, gradients = zip(*map(start, keys), strict=True)
    if schedule is not None:
        scheduler = getattr(mx.lr_scheduler, schedule[0])(**schedule[1])
        options = {**options, "lr_scheduler": scheduler}
    optimizer = mx.optimizer.create(name, **options)
    weights = [mx.nd.array(weight, dtype=dtype) for weight in weights]
    states = [
        optimizer.create_state_multi_precision(i, weight)
        for i, weight in enumerate(weights)
    ]
    for step, of_keys in enumerate(zip(*gradients, strict=True)):
        if schedule is None:
            optimizer.set_learning_rate(rate(name, step))
        for i, gradient in enumerate(of_keys):
            pushed = mx.nd.array(gradient, dtype=dtype)
            optimizer.update_multi_precision(i, weights[i], pushed, states[i])
    return [weight.asnumpy() for weight in weights]


arrays = {}
for dtype in sys.argv[2:]:
    results = {}
    for name, options in CASES:
        try:
            (results[case(name, options)],) = train(name, options, dtype)
        except mx.base.MXNetError:
            assert dtype == "float64"  # some only have float32 states
    for name, options, *_ in [*OF_SEVERAL_KEYS, *SHARING]:
        if case(name, options) in results:
            trained = train(name, options, dtype, keys=KEYS)
            for key, weights in zip(KEYS, trained, strict=True):
                results[case(name, options, key)] = weights
    for name, options, schedule in SCHEDULED:
        (results[case(name, options, schedule)],) = train(
            name, options, dtype, schedule
        )
    arrays[f"{dtype} names"] = list(results)
    arrays[dtype] = np.stack(list(results.values()))
np.savez_compressed(sys.argv[1], **arrays)
