"""torchkv: the same network, its optimizer on a store that the program calls itself.

python module_torchkv.py [--kv-store device]
torchrun --nproc-per-node 2 module_torchkv.py --kv-store dist_sync
"""

import argparse
from collections import OrderedDict

import digits
import torch
from torch import nn

import torchkv

DEVICES = ["cpu", "cpu"]

parser = argparse.ArgumentParser()
parser.add_argument("--kv-store", default="local")
kv = torchkv.create(parser.parse_args().kv_store)

net = nn.Sequential(
    OrderedDict(
        conv1=nn.Conv2d(1, 8, 3),
        tanh1=nn.Tanh(),
        pool=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(72, 64),
        tanh2=nn.Tanh(),
        fc2=nn.Linear(64, 10),
    )
)
names = [name.replace(".", "_") for name, _ in net.named_parameters()]
weights = digits.first_weights([parameter.shape for parameter in net.parameters()])
for parameter, weight in zip(net.parameters(), weights, strict=True):
    parameter.data = torch.from_numpy(weight)
replicas = torchkv.replicate(net, DEVICES)

train, test = digits.load()
epoch_size = len(train[1]) // kv.num_workers // digits.BATCH_SIZE
schedule = torchkv.lr_scheduler.MultiFactorScheduler(
    [3 * epoch_size, 5 * epoch_size], factor=0.3, warmup_steps=5, base_lr=0.2
)
kv.set_optimizer(
    "sgd",
    learning_rate=0.2,
    momentum=0.9,
    wd=1e-3,
    lr_scheduler=schedule,
    rescale_grad=1 / (digits.BATCH_SIZE * kv.num_workers),
    param_idx2name=dict(enumerate(names)),  # biases have no weight decay
)
# By key, the parameter of each replica.
copies = list(zip(*(replica.parameters() for replica in replicas), strict=True))
keys = list(range(len(copies)))
kv.init(keys, [parameters[0] for parameters in copies])

loss_of = nn.CrossEntropyLoss(reduction="sum")
for epoch in range(8):
    losses = []
    for images, labels in digits.batches(train, epoch, kv.rank, kv.num_workers):
        outputs = replicas(torch.from_numpy(images))
        loss = loss_of(outputs, torch.from_numpy(labels))
        loss.backward()
        for key, parameters in enumerate(copies):
            kv.push(key, [p.grad for p in parameters], priority=-key)
            kv.pull(key, out=list(parameters), priority=-key)
        for replica in replicas:
            replica.zero_grad()
        losses.append(loss.item() / len(images))
    with torch.no_grad():
        outputs = replicas(torch.from_numpy(test[0])).numpy()
    if kv.rank == 0:
        digits.report(epoch, losses, outputs, test[1])
kv.close()
