"""torchkv: the same network, its optimizer on a store that the program calls itself.

python module_torchkv.py --model-prefix digits
python module_torchkv.py --model-prefix digits --load-epoch 4
torchrun --nproc-per-node 2 module_torchkv.py --kv-store dist_sync
"""

import logging
import sys
from collections import OrderedDict

import digits
import torch
import torch.nn.functional as F
from reports import Metric, Speedometer, log_metric
from torch import nn

import torchkv

DEVICES = ["cpu", "cpu"]


def network():
    """The module to train."""
    net = OrderedDict(conv1=nn.Conv2d(1, 8, 3))
    net["tanh1"] = nn.Tanh()
    net["pool"] = nn.MaxPool2d(2)
    net.update(flatten=nn.Flatten(), fc1=nn.Linear(72, 64))
    net["tanh2"] = nn.Tanh()
    net["fc2"] = nn.Linear(64, 10)
    return nn.Sequential(net)


def lr_schedule(args, kv):
    """The learning rate to begin with, and the scheduler that changes it."""
    epochs = [int(epoch) for epoch in args.lr_step_epochs.split(",")]
    # Updates are counted from epoch 0: a checkpoint's optimizer has their number.
    steps = [epoch * digits.epoch_size(args, kv) for epoch in epochs]
    return args.lr, torchkv.lr_scheduler.MultiFactorScheduler(steps, args.lr_factor)


def load_model(args, kv):
    """A module with its first parameters, or with those of a checkpoint."""
    net = network()
    if args.load_epoch is not None:
        path = f"{digits.prefix(args, kv)}-{args.load_epoch:04}.params"
        net.load_state_dict(torch.load(path))
        return net
    weights = digits.first_weights([p.shape for p in net.parameters()])
    for parameter, weight in zip(net.parameters(), weights, strict=True):
        parameter.data = torch.from_numpy(weight)
    return net


def save_model(net, args, kv, epoch):
    """Writes a checkpoint after an epoch."""
    if args.model_prefix is not None:
        path = f"{digits.prefix(args, kv)}-{epoch + 1:04}"
        torch.save(net.state_dict(), f"{path}.params")
        kv.save_optimizer_states(f"{path}.states")


def fit(args):
    """Trains, and validates after each epoch."""
    kv = torchkv.create(args.kv_store)
    if args.gc_type != "none":
        compression = {"type": args.gc_type, "threshold": args.gc_threshold}
        kv.set_gradient_compression(compression)
    head = f"Node[{kv.rank}] %(message)s"
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format=head)
    train, validation = digits.load()
    net = load_model(args, kv)
    lr, scheduler = lr_schedule(args, kv)
    options = {"learning_rate": lr, "wd": args.wd, "lr_scheduler": scheduler}
    if args.optimizer in digits.WITH_MOMENTUM:
        options["momentum"] = args.mom
    # From here on, what Module.fit does.
    names = [name.replace(".", "_") for name, _ in net.named_parameters()]
    options["param_idx2name"] = dict(zip(names, names, strict=True))
    num_summed = kv.num_workers if kv.type == "dist_sync" else 1
    options["rescale_grad"] = 1 / (args.batch_size * num_summed)
    kv.set_optimizer(args.optimizer, **options)
    replicas = torchkv.replicate(net, DEVICES)
    # By key, the parameter of each replica.
    copies = [
        list(key) for key in zip(*(r.parameters() for r in replicas), strict=True)
    ]
    kv.broadcast(names, [parameters[0] for parameters in copies], out=copies)
    if args.load_epoch is not None:
        path = f"{digits.prefix(args, kv)}-{args.load_epoch:04}.states"
        kv.load_optimizer_states(path)
    for epoch in range(args.load_epoch or 0, args.num_epochs):
        metric = Metric()
        speedometer = Speedometer(args.batch_size, args.disp_batches)
        for i, batch in enumerate(digits.batches(train, args, kv, epoch)):
            images, labels = (torch.from_numpy(x).to(DEVICES[0]) for x in batch)
            outputs = replicas(images)
            F.cross_entropy(outputs, labels, reduction="sum").backward()
            gradients = [[p.grad for p in parameters] for parameters in copies]
            kv.pushpull(names, gradients, out=copies)
            for replica in replicas:
                replica.zero_grad()
            metric.update([labels], [outputs.softmax(1)])
            speedometer(epoch, i, metric)
        log_metric(epoch, "Train", metric)
        save_model(net, args, kv, epoch)
        metric = Metric()
        images, labels = (torch.from_numpy(x).to(DEVICES[0]) for x in validation)
        with torch.no_grad():
            metric.update([labels], [replicas(images).softmax(1)])
        log_metric(epoch, "Validation", metric)
    kv.close()


fit(digits.fit_options(__doc__.splitlines()[0]))
