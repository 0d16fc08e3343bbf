"""Values on GPUs, pushed to a store of several processes, which may share a GPU."""

import pytest
import torch

import ranks
import torchkv

pytestmark = pytest.mark.cuda

SIZE = 300_001  # split between the servers
STEPS = 5
WARM_UP = 2  # pushes that allocate pinned memory, for which CUDA waits for the GPU
DELAY = 400_000_000  # cycles, 0.2 s: the first call loads kernels


def steps(rank):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    kv = torchkv.create("dist_sync", timeout=60)
    kv.init(["w", "b"], [torch.zeros(SIZE), torch.zeros(3)])
    kv.set_optimizer("sgd", learning_rate=1.0)
    gradient = torch.empty(SIZE, device="cuda")
    out = torch.empty(SIZE, device="cuda")
    waits = 0
    for step in range(STEPS):
        torch.cuda._sleep(DELAY)
        gradient.fill_(step + rank)
        kv.push(["w", "b"], [[gradient, gradient], torch.ones(3)])
        if step >= WARM_UP:
            waits += torch.cuda.current_stream().query()
        gradient.fill_(torch.nan)  # the sum is not the caller's memory
    kv.pull("w", out=out)
    bias = kv.pull("b")
    kv.close()
    return out.cpu(), bias, waits


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_push_sums_on_the_gpu_and_does_not_wait(num_ranks):
    total = sum(2 * (step + rank) for step in range(STEPS) for rank in range(num_ranks))
    for out, bias, waits in ranks.run(steps, num_ranks):
        assert torch.equal(out, torch.full((SIZE,), -float(total)))
        assert torch.equal(bias, torch.full((3,), -float(STEPS * num_ranks)))
        assert waits == 0
