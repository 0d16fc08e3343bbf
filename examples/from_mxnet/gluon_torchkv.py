"""torchkv: the same perceptron by torchkv's Trainer, in one process or several.

python gluon_torchkv.py
torchrun --nproc-per-node 2 gluon_torchkv.py --kv-store dist_sync
"""

import argparse

import digits
import torch
from reports import Metric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchkv

DEVICES = ["cpu", "cpu"]

parser = argparse.ArgumentParser()
parser.add_argument("--kv-store", default="device")
parser.add_argument("--batch-size", type=int, default=64, help="of one worker")
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--lr", type=float, default=0.001)
parser.add_argument("--log-interval", type=int, default=10, help="in batches")
parser.add_argument("--save", metavar="FILE", help="write the parameters to FILE")
args = parser.parse_args()
store = torchkv.create(args.kv_store)

train, validation = digits.load()
sampler = digits.SplitSampler(len(train[1]), store.num_workers, store.rank)
train_data = DataLoader(
    TensorDataset(*map(torch.from_numpy, train)),
    args.batch_size,
    sampler=sampler,
    drop_last=True,
)
validation_data = DataLoader(
    TensorDataset(*map(torch.from_numpy, validation)), args.batch_size
)

net = nn.Sequential(
    nn.Flatten(),
    nn.Linear(64, 128),
    nn.ReLU(),
    nn.Linear(128, 64),
    nn.ReLU(),
    nn.Linear(64, 10),
)
parameters = list(net.parameters())
weights = digits.first_weights([parameter.shape for parameter in parameters])
for parameter, weight in zip(parameters, weights, strict=True):
    parameter.data = torch.from_numpy(weight)
replicas = torchkv.replicate(net, DEVICES)

loss_of = nn.CrossEntropyLoss(reduction="sum")
trainer = torchkv.Trainer(replicas, "adam", {"learning_rate": args.lr}, kvstore=store)


def report(when, metric):
    """Prints a metric."""
    values = ", ".join(f"{name} {value:.5f}" for name, value in metric.get_name_value())
    # With its newline: the workers share a terminal.
    print(f"worker {store.rank}, {when}: {values}\n", end="", flush=True)


@torch.no_grad()
def evaluate():
    """The metric of the validation data, on the first device."""
    metric = Metric()
    for data, label in validation_data:
        output = net(data.to(DEVICES[0]))
        metric.update([label.to(DEVICES[0])], [output.softmax(1)])
    return metric


def forward_backward(data, label):
    """Computes the gradients on all devices; returns the outputs."""
    outputs = [replica(x) for replica, x in zip(replicas, data, strict=True)]
    losses = [loss_of(output, label[i]) for i, output in enumerate(outputs)]
    for loss in losses:
        loss.backward()
    return outputs


def train_batch(batch, metric):
    """Makes a step with the gradients of all devices and workers."""
    # As split_and_load, of both at once.
    data, label = zip(*replicas.scatter(*batch), strict=True)
    outputs = forward_backward(data, label)
    trainer.step(len(batch[0]))
    metric.update(label, [output.softmax(1) for output in outputs])


for epoch in range(args.epochs):
    metric = Metric()
    for i, batch in enumerate(train_data, 1):
        train_batch(batch, metric)
        if i % args.log_interval == 0:
            report(f"epoch {epoch}, batch {i}, training", metric)
    report(f"epoch {epoch}, training", metric)
    report(f"epoch {epoch}, validation", evaluate())

if args.save and store.rank == 0:
    torch.save(net.state_dict(), args.save)
store.close()
