"""Push and pull between processes.

    torchrun --nproc-per-node 2 examples/dist_push_pull.py

MXNet's tutorial of its KVStore, part "run on multiple machines", with torchkv.
"""

import torch

import torchkv

kv = torchkv.create("dist_sync")
shape = (2, 3)

# Rank 0's value counts.
kv.init(3, torch.full(shape, 2.0))
a = torch.empty(shape)
kv.pull(3, out=a)
if kv.rank == 0:
    print(f"after init: {a[0, 0]:g}")

# The values of all processes are summed before the updater sees them; without an
# updater, the sum replaces the stored value.
kv.push(3, torch.ones(shape) * (kv.rank + 1))
kv.pull(3, out=a)
if kv.rank == 0:
    print(f"the sum over {kv.num_workers} processes: {a[0, 0]:g}")


# An updater runs on the server that holds the key, once a round.
def update(key, input, stored):
    """Adds twice the sum."""
    stored += input * 2


kv.set_updater(update)
kv.push(3, torch.ones(shape))
kv.pull(3, out=a)
if kv.rank == 0:
    print(f"after the updater: {a[0, 0]:g}")
kv.barrier()
kv.close()
