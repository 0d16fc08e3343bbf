"""MXNet: a convolutional network by the Module API, its optimizer on a kvstore.

python module_mxnet.py [--kv-store device]
"""

import argparse

import digits
import mxnet as mx
import numpy as np

DEVICES = [mx.cpu(0), mx.cpu(1)]

parser = argparse.ArgumentParser()
parser.add_argument("--kv-store", default="local")
kv = mx.kv.create(parser.parse_args().kv_store)

symbol = mx.sym.Variable("data")
symbol = mx.sym.Convolution(symbol, kernel=(3, 3), num_filter=8, name="conv1")
symbol = mx.sym.Activation(symbol, act_type="tanh")
symbol = mx.sym.Pooling(symbol, pool_type="max", kernel=(2, 2), stride=(2, 2))
symbol = mx.sym.FullyConnected(mx.sym.Flatten(symbol), num_hidden=64, name="fc1")
symbol = mx.sym.Activation(symbol, act_type="tanh")
symbol = mx.sym.FullyConnected(symbol, num_hidden=10, name="fc2")
symbol = mx.sym.SoftmaxOutput(symbol, name="softmax")

module = mx.mod.Module(symbol, context=DEVICES)
shape = (digits.BATCH_SIZE, 1, 8, 8)
module.bind([("data", shape)], [("softmax_label", shape[:1])])
all_shapes = symbol.infer_shape(data=shape)[0]
shapes = {
    name: all_shapes[i]
    for i, name in enumerate(symbol.list_arguments())
    if name not in ("data", "softmax_label")
}
weights = map(mx.nd.array, digits.first_weights(list(shapes.values())))
module.init_params(arg_params={name: next(weights) for name in shapes})

train, test = digits.load()
epoch_size = len(train[1]) // kv.num_workers // digits.BATCH_SIZE
schedule = mx.lr_scheduler.MultiFactorScheduler(
    [3 * epoch_size, 5 * epoch_size], factor=0.3, warmup_steps=5, base_lr=0.2
)
module.init_optimizer(  # divides by the batch size
    kvstore=kv,
    optimizer="sgd",
    optimizer_params={
        "learning_rate": 0.2,
        "momentum": 0.9,
        "wd": 1e-3,
        "lr_scheduler": schedule,
    },
)

for epoch in range(8):
    losses = []
    for images, labels in digits.batches(train, epoch, kv.rank, kv.num_workers):
        module.forward_backward(
            mx.io.DataBatch([mx.nd.array(images)], [mx.nd.array(labels)])
        )
        module.update()
        probabilities = module.get_outputs()[0].asnumpy()
        losses.append(-np.log(probabilities[np.arange(len(labels)), labels]).mean())
    iterator = mx.io.NDArrayIter(*test, digits.BATCH_SIZE)
    digits.report(epoch, losses, module.predict(iterator).asnumpy(), test[1])
