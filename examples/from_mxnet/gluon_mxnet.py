"""MXNet: a perceptron by gluon's Trainer, in one process or several.

Does what MXNet's example/distributed_training/cifar10_dist.py does, with the metrics of
its example/gluon/mnist/mnist.py.

python gluon_mxnet.py
python tools/launch.py -n 2 python gluon_mxnet.py --kv-store dist_sync
"""

import argparse

import digits
import mxnet as mx
from mxnet import autograd, gluon

DEVICES = [mx.cpu(0), mx.cpu(1)]

parser = argparse.ArgumentParser()
parser.add_argument("--kv-store", default="device")
parser.add_argument("--batch-size", type=int, default=64, help="of one worker")
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--lr", type=float, default=0.001)
parser.add_argument("--log-interval", type=int, default=10, help="in batches")
parser.add_argument("--save", metavar="FILE", help="write the parameters to FILE")
args = parser.parse_args()
store = mx.kv.create(args.kv_store)

train, validation = digits.load()
sampler = digits.SplitSampler(len(train[1]), store.num_workers, store.rank)
# Without a last batch that is not full: MXNet's dist stores need batches of one size.
train_data = gluon.data.DataLoader(
    gluon.data.ArrayDataset(*train),
    args.batch_size,
    sampler=sampler,
    last_batch="discard",
)
validation_data = gluon.data.DataLoader(
    gluon.data.ArrayDataset(*validation), args.batch_size
)

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
    net.collect_params(), "adam", {"learning_rate": args.lr}, kvstore=store
)


def report(when, metric):
    """Prints a metric."""
    values = ", ".join(f"{name} {value:.5f}" for name, value in metric.get_name_value())
    # With its newline: the workers share a terminal.
    print(f"worker {store.rank}, {when}: {values}\n", end="", flush=True)


def evaluate():
    """The metric of the validation data, on the first device."""
    metric = mx.metric.create(["accuracy", "ce"])
    for data, label in validation_data:
        output = net(data.as_in_context(DEVICES[0]))
        metric.update([label], [output.softmax()])
    return metric


def forward_backward(data, label):
    """Computes the gradients on all devices; returns the outputs."""
    with autograd.record():
        outputs = [net(x) for x in data]
        losses = [loss_of(output, label[i]) for i, output in enumerate(outputs)]
    for loss in losses:
        loss.backward()
    return outputs


def train_batch(batch, metric):
    """Makes a step with the gradients of all devices and workers."""
    data = gluon.utils.split_and_load(batch[0], DEVICES)
    label = gluon.utils.split_and_load(batch[1], DEVICES)
    outputs = forward_backward(data, label)
    trainer.step(len(batch[0]))
    metric.update(label, [output.softmax() for output in outputs])


for epoch in range(args.epochs):
    metric = mx.metric.create(["accuracy", "ce"])
    for i, batch in enumerate(train_data, 1):
        train_batch(batch, metric)
        if i % args.log_interval == 0:
            report(f"epoch {epoch}, batch {i}, training", metric)
    report(f"epoch {epoch}, training", metric)
    report(f"epoch {epoch}, validation", evaluate())

if args.save and store.rank == 0:
    net.save_parameters(args.save)
