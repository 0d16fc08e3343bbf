"""A store type of one's own: sums over the default process group, by a Trainer.

torchrun --nproc-per-node 2 examples/register_store.py
"""

import torch
import torch.distributed as dist

import torchkv


@torchkv.register("process_group")
class ProcessGroupStore(torchkv.KVStoreBase):
    """Sums gradients with torch.distributed, one replica per process."""

    rank = property(lambda self: dist.get_rank())
    num_workers = property(lambda self: dist.get_world_size())

    def broadcast(self, key, value, out, priority=0):
        """Gives rank 0's weights to all processes."""
        for tensor, (replica,) in zip(value, out, strict=True):
            replica.copy_(tensor)
            dist.broadcast(replica, src=0)

    def pushpull(self, key, value, out=None, priority=0):
        """Replaces gradients by their sums over the processes."""
        for (tensor,), (result,) in zip(value, out or value, strict=True):
            result.copy_(tensor)
            dist.all_reduce(result)


def main() -> None:
    """Fits a line, each process with data of its own."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(1, 1)
    trainer = torchkv.Trainer(
        model, "sgd", {"learning_rate": 0.1}, kvstore="process_group"
    )
    for _ in range(200):
        x = torch.rand(16, 1)
        torch.nn.functional.mse_loss(model(x), 3 * x - 1).backward()
        trainer.step(batch_size=dist.get_world_size())
    print(f"rank {dist.get_rank()}: {model.weight.item():.6f} {model.bias.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
