"""MXNet: a perceptron by gluon's Trainer, on two devices."""

import digits
import mxnet as mx
from mxnet import autograd, gluon

DEVICES = [mx.cpu(0), mx.cpu(1)]

net = gluon.nn.Sequential()
net.add(
    gluon.nn.Flatten(),
    gluon.nn.Dense(128, activation="relu", in_units=64),
    gluon.nn.Dense(64, activation="relu", in_units=128),
    gluon.nn.Dense(10, in_units=64),
)
net.initialize(ctx=DEVICES)
parameters = list(net.collect_params().values())
weights = digits.first_weights([parameter.shape for parameter in parameters])
for i, weight in enumerate(weights):
    parameters[i].set_data(mx.nd.array(weight))

loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
trainer = gluon.Trainer(
    net.collect_params(), "sgd", {"learning_rate": 0.02, "momentum": 0.9, "wd": 1e-4}
)

train, test = digits.load()
for epoch in range(8):
    losses = []
    for images, labels in digits.batches(train, epoch):
        data = gluon.utils.split_and_load(images, DEVICES)
        label = gluon.utils.split_and_load(labels, DEVICES)
        with autograd.record():
            parts = [loss_of(net(x), label[i]) for i, x in enumerate(data)]
        for part in parts:
            part.backward()
        trainer.step(len(images))
        losses.append(sum(part.sum().asscalar() for part in parts) / len(images))
    outputs = net(mx.nd.array(test[0], ctx=DEVICES[0])).asnumpy()
    digits.report(epoch, losses, outputs, test[1])
