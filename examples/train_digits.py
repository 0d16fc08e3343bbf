"""Train a small convolutional network on handwritten digits, on several devices.

Every device has a copy (a *replica*) of the network; the trainer's store has the
weights and the optimizer, here SGD with momentum. A training step:

1. `replicas.backward` splits the batch into one shard per device, and each replica
   computes its gradients;
2. `trainer.step` pushes them: the store sums the replicas' gradients of each weight,
   and its optimizer updates the stored weight;
3. it then pulls the new weights into all replicas.

The digits are 1,797 real scans of 8x8 pixels that are part of scikit-learn, so
nothing is downloaded. No GPU is needed: devices may be repeated.

    python examples/train_digits.py
    python examples/train_digits.py --devices cuda:0,cuda:1 --seeds 0,1,2
"""

import argparse
import math
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from tqdm import tqdm

import torchkv

NUM_HELD_OUT = 360  # scans not used for training, the same ones in every run
NUM_TRAINED_ON = 1797 - NUM_HELD_OUT


# --- The data -------------------------------------------------------------------


class Data(NamedTuple):
    """Scans of shape (N, 1, 8, 8) with values from 0 to 1, and their digits."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_data(dtype: torch.dtype = torch.float32) -> Data:
    """Return the digits in a fixed split, stratified by digit."""
    pixels, labels = load_digits(return_X_y=True)
    train, test = train_test_split(
        range(len(labels)), test_size=NUM_HELD_OUT, stratify=labels, random_state=0
    )
    all_images = torch.tensor(pixels, dtype=dtype).view(-1, 1, 8, 8) / 16
    all_labels = torch.tensor(labels)
    return Data(
        all_images[train], all_labels[train], all_images[test], all_labels[test]
    )


def batches(
    images: Tensor, labels: Tensor, batch_size: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one epoch of shuffled full batches, each scan shifted by up to one pixel.

    All randomness comes from `generator`: the same seed gives the same batches.
    """
    # windows[n, :, dy, dx] is scan n shifted by (dy - 1, dx - 1) pixels.
    windows = F.pad(images, (1, 1, 1, 1)).unfold(2, 8, 1).unfold(3, 8, 1)
    dy, dx = torch.randint(0, 3, (2, len(images)), generator=generator)
    shifted = windows[torch.arange(len(images)), :, dy, dx]

    order = torch.randperm(len(images), generator=generator)
    for batch in order.split(batch_size):
        if len(batch) == batch_size:  # drop the last, incomplete batch
            yield shifted[batch], labels[batch]


# --- The network ----------------------------------------------------------------


def make_model(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the network with weights drawn from `seed`.

    It has no BatchNorm, which would normalize each shard separately: training on four
    devices would then differ from training on one.
    """
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    ).to(dtype)


def summed_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the sum, not the mean, of the losses.

    The losses of the shards then add up to the loss of the batch, for any sizes of the
    shards, and so do their gradients. `trainer.step(batch_size)` divides by the size of
    the batch.
    """
    return F.cross_entropy(model(images), labels, reduction="sum")


def learning_rate(initial: float, epoch: int, num_epochs: int) -> float:
    """Return the learning rate for `epoch`: cosine decay from `initial` to almost 0."""
    return initial * 0.5 * (1 + math.cos(math.pi * epoch / num_epochs))


# --- Training -------------------------------------------------------------------


class Epoch(NamedTuple):
    """A point of the learning curve."""

    loss: float  # mean over the training scans
    accuracy: float  # on the held-out scans, from 0 to 1


@torch.no_grad()
def measure_accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the accuracy of `model` on `images`, from 0 to 1."""
    device = next(model.parameters()).device
    answers = model(images.to(device)).argmax(dim=1).cpu()
    return (answers == labels).double().mean().item()


def train(
    replicas: torchkv.Replicas,
    trainer: torchkv.Trainer,
    data: Data,
    *,
    epochs: int,
    batch_size: int,
    lr: float,
    seed: int,
) -> Iterator[Epoch]:
    """Train `replicas` in place, with initial learning rate `lr`; yield each epoch."""
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        trainer.set_learning_rate(learning_rate(lr, epoch, epochs))
        losses = []
        for images, labels in batches(
            data.train_images, data.train_labels, batch_size, generator
        ):
            losses.append(replicas.backward(summed_loss, images, labels))
            trainer.step(batch_size)
        loss = sum(shards.sum().item() for shards in losses) / batch_size / len(losses)
        accuracy = measure_accuracy(replicas[0], data.test_images, data.test_labels)
        yield Epoch(loss, accuracy)


# --- The command line -----------------------------------------------------------


def plot(curves: dict[int, list[Epoch]], path: str) -> None:
    """Plot loss and held-out accuracy of every seed by epoch, as a PNG."""
    figure = Figure(figsize=(9, 4), layout="constrained")  # needs no display
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    for seed, curve in curves.items():
        numbers = range(1, len(curve) + 1)
        losses = [epoch.loss for epoch in curve]
        percents = [100 * epoch.accuracy for epoch in curve]
        loss_axes.plot(numbers, losses, ".-", markersize=3, label=f"seed {seed}")
        accuracy_axes.plot(numbers, percents, ".-", markersize=3)
    loss_axes.set(title="Training loss", xlabel="epoch", yscale="log")
    loss_axes.legend()
    # Scale the axis to the later epochs: the first ones would flatten the curve.
    rest = [e for curve in curves.values() for e in curve[len(curve) // 4 :]]
    lowest = 100 * min(epoch.accuracy for epoch in rest)
    accuracy_axes.set(
        title="Held-out accuracy (%)", xlabel="epoch", ylim=(lowest - 1, 100.5)
    )
    for axes in (loss_axes, accuracy_axes):
        axes.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=120)


def default_devices() -> str:
    """Return all GPUs or, without GPUs, the CPU four times."""
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return ",".join(gpus or ["cpu"] * 4)


def parse_devices(text: str) -> list[torch.device]:
    """Return the devices named in `text`, such as "cpu,cpu" or "cuda:0,cuda:1"."""
    devices = []
    for name in text.split(","):
        try:
            device = torch.device(name)
        except RuntimeError:  # its message is long and differs between versions
            device = None
        num_gpus = torch.cuda.device_count()
        if device is None or device.type not in ("cpu", "cuda"):
            raise argparse.ArgumentTypeError(
                f"expected cpu or cuda:<number>, separated by commas, but got {name!r}"
            )
        if device.type == "cuda" and (device.index or 0) >= num_gpus:
            raise argparse.ArgumentTypeError(
                f"expected one of the {num_gpus} visible GPUs, but got {name!r}"
            )
        devices.append(device)
    return devices


def parse_seeds(text: str) -> list[int]:
    """Return the numbers in `text`, such as "0,1,2"."""
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected whole numbers, separated by commas, but got {text!r}"
        ) from None


class Parser(argparse.ArgumentParser):
    """Reports errors in one line; argparse would print the usage first."""

    def error(self, message: str) -> NoReturn:
        """Print `message` and exit."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse_args() -> argparse.Namespace:
    """Return the validated command-line options."""
    parser = Parser(
        description="Train a digit classifier on several devices.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--devices",
        type=parse_devices,
        default=default_devices(),
        help="one replica on each; a device may be repeated",
    )
    parser.add_argument(
        "--type", choices=["local", "device"], default="device", help="of the store"
    )
    parser.add_argument("--epochs", type=int, default=80, help="passes over the data")
    parser.add_argument("--batch-size", type=int, default=64, help="over all devices")
    parser.add_argument("--lr", type=float, default=0.1, help="initial learning rate")
    parser.add_argument("--momentum", type=float, default=0.9, help="of SGD")
    parser.add_argument(
        "--seeds", type=parse_seeds, default="0", help="one run per seed, such as 0,1,2"
    )
    parser.add_argument(
        "--dtype", choices=["float32", "float64"], default="float32", help="of weights"
    )
    parser.add_argument(
        "--plot", default="digits.png", metavar="PATH", help="the learning curves"
    )
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"argument --epochs: expected at least 1, but got {args.epochs}")
    if not len(args.devices) <= args.batch_size <= NUM_TRAINED_ON:
        parser.error(
            f"argument --batch-size: expected {len(args.devices)} (one scan per "
            f"device) to {NUM_TRAINED_ON} (all of them), but got {args.batch_size}"
        )
    return args


def main() -> None:
    """Train once per seed, print the accuracies and draw the learning curves."""
    args = parse_args()
    # More threads hardly help such a small model, and slow it down on a loaded machine.
    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    data = load_data(dtype)

    curves: dict[int, list[Epoch]] = {}
    for seed in args.seeds:
        replicas = torchkv.replicate(make_model(seed, dtype), args.devices)
        sgd = torchkv.optim.SGD(lr=args.lr, momentum=args.momentum)
        trainer = torchkv.Trainer(replicas, sgd, kvstore=args.type)
        progress = tqdm(
            train(
                replicas,
                trainer,
                data,
                epochs=args.epochs,
                batch_size=args.batch_size,
                lr=args.lr,
                seed=seed,
            ),
            desc=f"seed {seed}",
            total=args.epochs,
            unit="epoch",
        )
        curves[seed] = []
        for epoch in progress:
            curves[seed].append(epoch)
            progress.set_postfix(
                loss=f"{epoch.loss:.4f}", accuracy=f"{epoch.accuracy:.2%}"
            )
        accuracy = curves[seed][-1].accuracy
        print(f"seed {seed}: {accuracy:.2%} of {NUM_HELD_OUT} held-out scans correct")

    finals = [curve[-1].accuracy for curve in curves.values()]
    if len(finals) > 1:
        print(f"mean of {len(finals)} seeds: {sum(finals) / len(finals):.2%}")
    plot(curves, args.plot)
    print(f"learning curve: {args.plot}")


if __name__ == "__main__":
    main()
