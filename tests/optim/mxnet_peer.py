"""Run by MXNet's own Python: writes the weights that its optimizers end with.

``python mxnet_peer.py OUT.npz DTYPE...``: by name, options and dtype.
"""

import sys

import mxnet as mx
import numpy as np

from mxnet_cases import CASES, SCHEDULED, ids, rate, start


def train(name, options, dtype, schedule=None):
    weight, gradients = start()
    if schedule is not None:
        scheduler = getattr(mx.lr_scheduler, schedule[0])(**schedule[1])
        options = {**options, "lr_scheduler": scheduler}
    optimizer = mx.optimizer.create(name, **options)
    weight = mx.nd.array(weight, dtype=dtype)
    state = optimizer.create_state_multi_precision(0, weight)
    for step, gradient in enumerate(gradients):
        if schedule is None:
            optimizer.set_learning_rate(rate(name, step))
        pushed = mx.nd.array(gradient, dtype=dtype)
        optimizer.update_multi_precision(0, weight, pushed, state)
    return weight.asnumpy()


results = {}
for dtype in sys.argv[2:]:
    for name, options in CASES:
        try:
            results[f"{name} {ids(options)} {dtype}"] = train(name, options, dtype)
        except mx.base.MXNetError:
            assert dtype == "float64"  # some only have float32 states
    for name, options, schedule in SCHEDULED:
        weights = train(name, options, dtype, schedule)
        results[f"{name} {ids(options)} {ids(schedule)} {dtype}"] = weights
np.savez(sys.argv[1], **results)
