"""Run by MXNet's own Python: writes the weights that its optimizers end with.

``python mxnet_peer.py OUT.npz DTYPE...``: by name, options and dtype.
"""

import sys

import mxnet as mx
import numpy as np

from mxnet_cases import CASES, ids, rate, start


def train(name, options, dtype):
    weight, gradients = start()
    optimizer = mx.optimizer.create(name, **options)
    weight = mx.nd.array(weight, dtype=dtype)
    state = optimizer.create_state_multi_precision(0, weight)
    for step, gradient in enumerate(gradients):
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
np.savez(sys.argv[1], **results)
