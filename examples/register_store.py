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
            dist.broadcast(replica.copy_(tensor), src=0)

    def pushpull(self, key, value, out=None, priority=0):
        """Replaces gradients by their sums over the processes."""
        for (tensor,), (result,) in zip(value, out or value, strict=True):
            dist.all_reduce(result.copy_(tensor))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(1, 1)
    trainer = torchkv.Trainer(model, "sgd", {"learning_rate": 0.1}, "process_group")
    for _ in range(200):  # a line, of which each process has data of its own
        x = torch.rand(16, 1)
        torch.nn.functional.mse_loss(model(x), 3 * x - 1).backward()
        trainer.step(batch_size=dist.get_world_size())
    print(f"rank {dist.get_rank()}: {model.weight.item():.6f} {model.bias.item():.6f}")
    dist.destroy_process_group()
