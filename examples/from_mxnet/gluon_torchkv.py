"""torchkv: the same perceptron by torchkv's Trainer, on two devices."""

import digits
import torch
from torch import nn

import torchkv

DEVICES = ["cpu", "cpu"]

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
trainer = torchkv.Trainer(
    replicas, "sgd", {"learning_rate": 0.02, "momentum": 0.9, "wd": 1e-4}
)

train, test = digits.load()
for epoch in range(8):
    losses = []
    for images, labels in digits.batches(train, epoch):
        # Scatters the images, runs the replicas, and gathers what they return.
        outputs = replicas(torch.from_numpy(images))
        loss = loss_of(outputs, torch.from_numpy(labels))
        loss.backward()
        trainer.step(len(images))
        losses.append(loss.item() / len(images))
    with torch.no_grad():
        outputs = replicas(torch.from_numpy(test[0])).numpy()
    digits.report(epoch, losses, outputs, test[1])
