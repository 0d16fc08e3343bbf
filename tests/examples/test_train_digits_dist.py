"""The example for several processes trains as one machine does."""

import re
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed.run
from torch import nn

import torchkv
from helpers import bits, run_program

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_digits_dist.py"
EPOCHS, BATCH = 15, 60


def run(num_processes, *arguments):
    """The accuracy that the example prints."""
    launch = torch.distributed.run.__file__, "--standalone"
    processes = f"--nproc-per-node={num_processes}"
    result = run_program(
        *launch,
        processes,
        EXAMPLE,
        f"--epochs={EPOCHS}",
        f"--batch={BATCH}",
        *arguments,
    )
    assert result.returncode == 0, result.stderr
    pattern = rf"{num_processes} processes, \w+: test accuracy (\d\.\d+)"
    return float(re.search(pattern, result.stdout)[1])


@pytest.fixture(scope="module")
def one_machine():
    return run(1, "--type=local")


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


def trained_with_replicas(example, count):
    """The weights of one machine with so many replicas, on `local`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        images, labels, _, _ = example["load"]()
        model = example["network"]()
        names = [name for name, _ in model.named_parameters()]
        parameters = list(model.parameters())
        kv = torchkv.create("local")
        kv.init(names, [parameter.detach() for parameter in parameters])
        kv.set_optimizer("sgd", learning_rate=0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(1)
        for _ in range(EPOCHS):
            order = torch.randperm(len(images), generator=generator)
            for batch in order.split(BATCH):
                gradients = []
                for rank in range(count):
                    part = batch[rank::count]
                    loss = nn.functional.cross_entropy(
                        model(images[part]), labels[part], reduction="sum"
                    )
                    model.zero_grad()
                    (loss / len(batch)).backward()
                    gradients.append([parameter.grad for parameter in parameters])
                pushed = [list(of_key) for of_key in zip(*gradients, strict=True)]
                kv.pushpull(names, pushed, out=parameters)
        return {name: bits(kv.pull(name)) for name in names}
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("num_processes", [2, 4])
def test_dist_sync_has_the_bits_of_one_machine(
    tmp_path, one_machine, example, num_processes
):
    path = tmp_path / "weights.pt"
    accuracy = run(num_processes, "--type=dist_sync", f"--save={path}")
    assert accuracy == pytest.approx(one_machine, abs=0.02) and accuracy > 0.9
    saved = {name: bits(value) for name, value in torch.load(path).items()}
    assert saved == trained_with_replicas(example, num_processes)


@pytest.mark.parametrize("num_processes", [2, 4])
def test_dist_async_has_the_accuracy_of_one_machine(one_machine, num_processes):
    accuracy = run(num_processes, "--type=dist_async")
    assert accuracy == pytest.approx(one_machine, abs=0.05) and accuracy > 0.9
