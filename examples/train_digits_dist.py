"""Trains a small network on scikit-learn's digits with several processes.

    torchrun --nproc-per-node 2 examples/train_digits_dist.py
    torchrun --nproc-per-node 4 examples/train_digits_dist.py --type dist_async

Each process trains on its part of the batches. The optimizer runs on the store's
servers, one in each process, which hold the parameters: `pushpull` sends the gradients
there and brings the new values back.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import torchkv


def load() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images and labels to train on, and to test with."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1500], order[1500:]
    return images[train], labels[train], images[test], labels[test]


def network() -> nn.Module:
    """The same first values everywhere; rank 0's count."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def main() -> None:
    """Trains, and prints the accuracy on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--type", default="dist_sync", help="dist_sync or dist_async")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=60, help="of all processes")
    parser.add_argument("--save", metavar="FILE", help="write the weights to FILE")
    args = parser.parse_args()

    torch.set_num_threads(1)
    model = network()
    images, labels, test_images, test_labels = load()

    kv = torchkv.create(args.type)
    names = [name for name, _ in model.named_parameters()]
    parameters = list(model.parameters())
    kv.init(names, [parameter.detach() for parameter in parameters])
    kv.set_optimizer("sgd", learning_rate=0.1, momentum=0.9)
    kv.pull(names, out=parameters)

    generator = torch.Generator().manual_seed(1)
    for epoch in range(args.epochs):
        order = torch.randperm(len(images), generator=generator)
        for batch in order.split(args.batch):
            part = batch[kv.rank :: kv.num_workers]
            loss = nn.functional.cross_entropy(
                model(images[part]), labels[part], reduction="sum"
            )
            model.zero_grad()
            (loss / len(batch)).backward()
            kv.pushpull(names, [p.grad for p in parameters], out=parameters)
        if kv.rank == 0 and epoch % 5 == 4:
            print(f"epoch {epoch + 1}: loss {loss.item() / len(part):.4f}", flush=True)

    kv.barrier()
    kv.pull(names, out=parameters)
    with torch.no_grad():
        guesses = model(test_images).argmax(1)
    accuracy = (guesses == test_labels).float().mean().item()
    if kv.rank == 0:
        print(f"{kv.num_workers} processes, {kv.type}: test accuracy {accuracy:.3f}")
        if args.save:
            torch.save(model.state_dict(), args.save)
    kv.close()


if __name__ == "__main__":
    main()
