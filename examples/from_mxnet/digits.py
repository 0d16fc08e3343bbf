"""The programs' data (scikit-learn's 8x8 digits), first weights and options."""

import argparse

import numpy as np
from sklearn.datasets import load_digits

NUM_TRAIN = 1440
# Of the optimizers with MXNet's names, those that take a momentum.
WITH_MOMENTUM = "sgd", "nag", "signum", "lbsgd"


def load():
    """Images from 0 to 1, of shape (N, 1, 8, 8), and labels; then those to validate."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(labels))
    images = (pixels[order] / 16).reshape(-1, 1, 8, 8).astype(np.float32)
    labels = labels[order].astype(np.int64)
    validation = images[NUM_TRAIN:], labels[NUM_TRAIN:]
    return (images[:NUM_TRAIN], labels[:NUM_TRAIN]), validation


class SplitSampler:
    """The indices of one of `num_parts` parts of a data set, shuffled for each epoch.

    The DataLoader of gluon takes it as a sampler, and so does that of torch.
    """

    def __init__(self, length, num_parts, part, epoch=0):
        """Takes part number `part`; `epoch` is the first one."""
        size = length // num_parts
        self.indices = np.arange(part * size, (part + 1) * size)
        self.epoch = epoch

    def __iter__(self):
        """The indices of the next epoch."""
        random = np.random.RandomState(self.epoch)
        self.epoch += 1
        return iter(random.permutation(self.indices).tolist())

    def __len__(self):
        """How many there are in an epoch."""
        return len(self.indices)


def epoch_size(args, kv):
    """How many full batches each worker has in an epoch."""
    return NUM_TRAIN // kv.num_workers // args.batch_size


def batches(data, args, kv, epoch):
    """The batches of one worker in one epoch."""
    images, labels = data
    order = list(SplitSampler(len(labels), kv.num_workers, kv.rank, epoch))
    for i in range(epoch_size(args, kv)):
        batch = order[i * args.batch_size : (i + 1) * args.batch_size]
        yield images[batch], labels[batch]


def prefix(args, kv):
    """Of the files of checkpoints: each worker writes its own."""
    return args.model_prefix if kv.rank == 0 else f"{args.model_prefix}-{kv.rank}"


def first_weights(shapes):
    """Weights of these shapes, as Xavier; zeros for biases."""
    random = np.random.RandomState(2)
    return [
        random.uniform(-1, 1, shape).astype(np.float32)
        * np.sqrt(6 / (shape[0] + np.prod(shape[1:])), dtype=np.float32)
        if len(shape) > 1
        else np.zeros(shape, np.float32)
        for shape in shapes
    ]


def fit_options(description):
    """The command line of the module programs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--kv-store", default="device", help="the type of the store")
    add("--num-epochs", type=int, default=8, help="the epoch to end before")
    add("--lr", type=float, default=0.1, help="the first learning rate")
    add("--lr-factor", type=float, default=0.3, help="what multiplies it")
    add("--lr-step-epochs", default="3,6", help="at the beginning of these epochs")
    add("--optimizer", default="sgd", help="its name")
    add("--mom", type=float, default=0.9, help="the momentum, if it has one")
    add("--wd", type=float, default=1e-4, help="the weight decay")
    add("--batch-size", type=int, default=40, help="of one worker")
    add("--disp-batches", type=int, default=10, help="batches between two reports")
    add("--model-prefix", help="write a checkpoint after each epoch, with this prefix")
    add("--load-epoch", type=int, help="continue after so many epochs' checkpoint")
    add("--gc-type", default="none", help="the gradient compression, such as 2bit")
    add("--gc-threshold", type=float, default=0.5, help="its threshold")
    args = parser.parse_args()
    if args.load_epoch is not None and args.model_prefix is None:
        parser.error("--load-epoch needs --model-prefix")
    return args
