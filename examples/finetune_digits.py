"""Fine-tune a digit classifier with checkpoints; resume it with identical results.

A small network is first trained on the digits 0 to 4. Then it gets a new last layer and
is fine-tuned on all ten digits with AdamW and a cosine schedule, on several replicas;
the old layers use a tenth of the learning rate. After each epoch, everything that the
rest of the run depends on is written to one file: the weights, the state of the
optimizer, of the schedule and of the random number generator. An interrupted and
resumed run ends with weights that are bitwise identical to those of an uninterrupted
run:

    python examples/finetune_digits.py
    python examples/finetune_digits.py --checkpoint other.pt --stop-after 3
    python examples/finetune_digits.py --checkpoint other.pt --resume

With a store of several processes, each process trains on its share of every batch, and
rank 0 writes the checkpoints, which all ranks read. This is bitwise reproducible, too:

    torchrun --nproc-per-node 2 examples/finetune_digits.py --kvstore dist_sync
"""

import argparse
import os

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from train_digits import (
    Data,
    batches,
    default_devices,
    load_data,
    make_model,
    measure_accuracy,
    parse_devices,
    summed_loss,
)

import torchkv

BATCH_SIZE = 64
PRETRAINING_EPOCHS = 4
SEED = 0


def train_epoch(
    replicas: torchkv.Replicas,
    trainer: torchkv.Trainer,
    images: Tensor,
    labels: Tensor,
    generator: torch.Generator,
) -> float:
    """Train for one epoch on this process's share; return the mean loss of that."""
    store = trainer.kvstore
    loss, count = 0.0, 0
    for batch in batches(images, labels, BATCH_SIZE, generator):
        share = [t.tensor_split(store.num_workers)[store.rank] for t in batch]
        loss += replicas.backward(summed_loss, *share).sum().item()
        count += len(share[0])
        trainer.step(BATCH_SIZE)  # of all processes together
    return loss / count


def pretrain(devices: list[torch.device], kvstore: str, data: Data) -> nn.Module:
    """Return a network trained on the digits 0 to 4, with a new last layer."""
    model = make_model(SEED)
    replicas = torchkv.replicate(model, devices)
    options = {"learning_rate": 0.1, "momentum": 0.9}
    trainer = torchkv.Trainer(replicas, "sgd", options, kvstore=kvstore)
    low = data.train_labels < 5
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(PRETRAINING_EPOCHS):
        images, labels = data.train_images[low], data.train_labels[low]
        train_epoch(replicas, trainer, images, labels, generator)
    model[-1].reset_parameters()
    return model


def save(path: str, checkpoint: dict[str, object]) -> None:
    """Write a checkpoint atomically: an interruption leaves the previous one intact."""
    torch.save(checkpoint, path + ".new")
    os.replace(path + ".new", path)


def parse_args() -> argparse.Namespace:
    """Return the command-line options."""
    parser = argparse.ArgumentParser(
        description="Fine-tune a digit classifier, with checkpoints.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--devices",
        type=parse_devices,
        default=default_devices(),
        help="one replica on each, in each process; a device may be repeated",
    )
    parser.add_argument(
        "--kvstore", default="device", metavar="TYPE", help="type of the store"
    )
    parser.add_argument("--epochs", type=int, default=20, help="in the whole run")
    parser.add_argument("--lr", type=float, default=0.02, help="initial learning rate")
    parser.add_argument(
        "--checkpoint", default="digits.pt", metavar="PATH", help="of each epoch"
    )
    parser.add_argument(
        "--stop-after", type=int, metavar="EPOCH", help="stop early, after this epoch"
    )
    parser.add_argument(
        "--resume", action="store_true", help="resume from the checkpoint"
    )
    return parser.parse_args()


def main() -> None:
    """Fine-tune from the beginning or from a checkpoint."""
    args = parse_args()
    torch.set_num_threads(1)  # as in train_digits.py
    data = load_data()
    generator = torch.Generator().manual_seed(SEED)
    if args.resume:
        model = make_model(SEED)
    else:
        model = pretrain(args.devices, args.kvstore, data)

    replicas = torchkv.replicate(model, args.devices)
    adamw = torchkv.optim.AdamW(lr=args.lr)
    trainer = torchkv.Trainer(replicas, adamw, kvstore=args.kvstore)
    is_first_rank = trainer.kvstore.rank == 0
    old_layers = [key for key, _ in model[:-1].named_parameters()]
    trainer.optimizer.set_lr_mult({key: 0.1 for key in old_layers})
    schedule = CosineAnnealingLR(trainer.optimizer, T_max=args.epochs)

    first = 0
    if args.resume:
        saved = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        replicas.load_state_dict(saved["model"])
        trainer.load_state_dict(saved["trainer"])
        schedule.load_state_dict(saved["schedule"])
        generator.set_state(saved["generator"])
        first = saved["epoch"]
        if is_first_rank:
            print(f"resumed after epoch {first}")

    for epoch in range(first + 1, args.epochs + 1):
        loss = train_epoch(
            replicas, trainer, data.train_images, data.train_labels, generator
        )
        schedule.step()
        checkpoint = {
            "model": replicas.state_dict(),
            "trainer": trainer.state_dict(),  # on all ranks
            "schedule": schedule.state_dict(),
            "generator": generator.get_state(),
            "epoch": epoch,
        }
        if is_first_rank:
            save(args.checkpoint, checkpoint)
            accuracy = measure_accuracy(replicas[0], data.test_images, data.test_labels)
            print(
                f"epoch {epoch}: loss {loss:.4f}, {accuracy:.2%} of held-out scans "
                "correct"
            )
        if epoch == args.stop_after:
            break


if __name__ == "__main__":
    main()
