"""The digits example trains exactly what plain loops train, and reads digits well."""

import functools
import importlib.util
import re
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import torchkv
from helpers import assert_same, run_program
from torchkv.compression import BF16, FP8, FP16, Int4, OneBit, TopK, TwoBit

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_digits.py"
NUM_REPLICAS = 4
BATCH_SIZE, LR, MOMENTUM, SEED = 64, 0.1, 0.9, 3

# Every epoch runs the same code, so a few are representative of the whole run.
EPOCHS = 8

one_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.cuda)]
)


def import_example():
    spec = importlib.util.spec_from_file_location("train_digits", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


digits = import_example()


pytestmark = pytest.mark.usefixtures("one_thread")  # as the example's main sets it


@pytest.fixture
def reproducible_convolutions():
    """Lets cuDNN choose only algorithms that give the same bits every time."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


def weights_by_epoch(store_type, device, dtype):
    """Trains by the example's own functions; yields every replica's weights."""
    replicas = torchkv.replicate(
        digits.make_model(SEED, dtype), [device] * NUM_REPLICAS
    )
    sgd = torchkv.optim.SGD(lr=LR, momentum=MOMENTUM)
    for _ in digits.train(
        replicas,
        torchkv.Trainer(replicas, sgd, kvstore=store_type),
        digits.load_data(dtype),
        epochs=EPOCHS,
        batch_size=BATCH_SIZE,
        lr=LR,
        seed=SEED,
    ):
        yield [[w.detach().clone() for w in r.parameters()] for r in replicas]


def rates_and_batches(dtype, epochs=1):
    """Yields every epoch's learning rate and the batches that the example sees."""
    data = digits.load_data(dtype)
    generator = torch.Generator().manual_seed(SEED)
    for epoch in range(epochs):
        yield (
            digits.learning_rate(LR, epoch, epochs),
            digits.batches(data.train_images, data.train_labels, BATCH_SIZE, generator),
        )


def shard_gradients(model, images, labels):
    """The gradients of each equal shard's part of the batch's mean loss."""
    size = BATCH_SIZE // NUM_REPLICAS
    gradients = []
    for shard, target in zip(images.split(size), labels.split(size), strict=True):
        loss = F.cross_entropy(model(shard), target, reduction="sum") / BATCH_SIZE
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    assert len(gradients) == NUM_REPLICAS
    return gradients


@functools.cache
def plain_loop_weights(device):
    """Trains one model without a store, with the arithmetic that the store promises."""
    model = digits.make_model(SEED).to(device)
    weights = list(model.parameters())
    velocities = [torch.zeros_like(w) for w in weights]
    for lr, batches in rates_and_batches(torch.float32, EPOCHS):
        for images, labels in batches:
            gradients = shard_gradients(model, images.to(device), labels.to(device))
            with torch.no_grad():
                for k, (a, b, c, d) in enumerate(zip(*gradients, strict=True)):
                    velocities[k] = MOMENTUM * velocities[k] + (((a + b) + c) + d)
                    weights[k].copy_(weights[k] - lr * velocities[k])
    return [w.detach() for w in weights]


@one_device
@pytest.mark.usefixtures("reproducible_convolutions")
def test_weights_have_the_bits_of_a_plain_loop(store_type, device):
    expected = plain_loop_weights(device)
    *_, replicas = weights_by_epoch(store_type, device, torch.float32)

    assert len(replicas) == NUM_REPLICAS
    for r, weights in enumerate(replicas):
        for key, (weight, plain) in enumerate(zip(weights, expected, strict=True)):
            assert_same(weight, plain, f"replica {r}, parameter {key}")


@one_device
@pytest.mark.usefixtures("reproducible_convolutions")
def test_sharded_weights_have_the_same_bits(device, monkeypatch):
    """One device acts as many, one per replica."""
    monkeypatch.setenv("TORCHKV_PLACES", ",".join([device] * NUM_REPLICAS))
    test_weights_have_the_bits_of_a_plain_loop("device", device)


def test_bits_show_the_order_of_the_sum():
    """Another order of the shards gives other bits, so the test above can fail."""
    _, batches = next(rates_and_batches(torch.float32))
    gradients = shard_gradients(digits.make_model(SEED), *next(batches))
    for a, b, c, d in zip(*gradients, strict=True):
        left_to_right = ((a + b) + c) + d
        assert not torch.equal(left_to_right, ((d + c) + b) + a)
        assert not torch.equal(left_to_right, (a + b) + (c + d))


def full_batch_weights_by_epoch(device):
    """Trains one model on whole batches by torch's own mean loss and optimizer."""
    model = digits.make_model(SEED, torch.float64).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for lr, batches in rates_and_batches(torch.float64, EPOCHS):
        optimizer.param_groups[0]["lr"] = lr
        for images, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()
        yield [w.detach().clone() for w in model.parameters()]


@one_device
def test_float64_equals_training_without_replicas(device):
    num_epochs = 0
    for replicas, expected in zip(
        weights_by_epoch("device", device, torch.float64),
        full_batch_weights_by_epoch(device),
        strict=True,
    ):
        num_epochs += 1
        for weights in replicas:
            for weight, whole in zip(weights, expected, strict=True):
                difference = (weight - whole).abs().max().item()
                assert difference <= 1e-10, f"epoch {num_epochs}"

    assert num_epochs == EPOCHS
    start = digits.make_model(SEED, torch.float64).to(device)
    for first, last in zip(start.parameters(), expected, strict=True):
        assert (first - last).abs().max().item() > 0.01  # there was training at all


def test_shards_of_unequal_size_add_up_to_the_batch():
    """Three devices and 64 scans: shards of 22, 21 and 21."""
    model = digits.make_model(SEED, torch.float64)
    replicas = torchkv.replicate(digits.make_model(SEED, torch.float64), ["cpu"] * 3)
    _, batches = next(rates_and_batches(torch.float64))
    images, labels = next(batches)
    losses = replicas.backward(digits.summed_loss, images, labels)

    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    assert losses.shape == (3,)
    mean = losses.sum().item() / BATCH_SIZE
    assert mean == pytest.approx(loss.item(), rel=0, abs=1e-14)
    parameters = [m.parameters() for m in [model, *replicas]]
    for whole, *shards in zip(*parameters, strict=True):
        total = sum(shard.grad for shard in shards) / BATCH_SIZE
        torch.testing.assert_close(total, whole.grad, rtol=0, atol=1e-14)


def test_held_out_scans_are_fixed_stratified_and_never_trained_on():
    data, again = digits.load_data(), digits.load_data()
    for one, other in zip(data, again, strict=True):
        assert_same(one, other)
    assert data.train_images.shape == (digits.NUM_TRAINED_ON, 1, 8, 8)
    assert data.test_images.shape == (digits.NUM_HELD_OUT, 1, 8, 8)
    assert digits.NUM_TRAINED_ON + digits.NUM_HELD_OUT == 1797

    # Each digit has 174 to 183 scans, so a fifth of them is 35 to 37.
    assert all(35 <= n <= 37 for n in torch.bincount(data.test_labels).tolist())
    trained_on = {tuple(image.flatten().tolist()) for image in data.train_images}
    assert len(trained_on) > 1400
    for image in data.test_images:
        assert tuple(image.flatten().tolist()) not in trained_on


def test_batches_take_every_scan_once_and_shift_it_by_at_most_a_pixel():
    image = torch.zeros(1, 1, 8, 8)
    image[0, 0, 4, 4] = 1
    images, labels = image.repeat(900, 1, 1, 1), torch.arange(900)
    generator = torch.Generator().manual_seed(0)
    seen = list(digits.batches(images, labels, 300, generator))

    assert [len(batch) for batch, _ in seen] == [300, 300, 300]
    assert sorted(torch.cat([batch for _, batch in seen]).tolist()) == list(range(900))
    lit = torch.cat([batch for batch, _ in seen]).nonzero()
    assert len(lit) == 900
    places, counts = lit[:, 2:].unique(dim=0, return_counts=True)
    assert places.tolist() == [[y, x] for y in (3, 4, 5) for x in (3, 4, 5)]
    assert counts.min() > 60  # each of the nine shifts takes about 100 scans


def test_batches_keep_scan_and_label_together():
    images = torch.zeros(500, 1, 8, 8)
    images[:, 0, 3, 3] = torch.arange(500.0)
    generator = torch.Generator().manual_seed(0)
    for batch, labels in digits.batches(images, torch.arange(500), 64, generator):
        assert batch.amax(dim=(1, 2, 3)).tolist() == labels.tolist()


def test_learning_rate_falls_along_half_a_cosine():
    rates = [digits.learning_rate(0.1, epoch, 80) for epoch in range(80)]
    assert rates[0] == 0.1
    assert rates[40] == pytest.approx(0.05)
    assert 0 < rates[79] < 1e-4
    assert rates == sorted(rates, reverse=True)


def assert_shows_curves(path, num_curves):
    """The PNG decodes, and each half has lines of `num_curves` different colours."""
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = matplotlib.image.imread(path)
    height, width, _ = pixels.shape
    assert height > 300 and width > 600
    colours = np.round(pixels[..., :3] * 255).astype(int)
    for half in np.array_split(colours, 2, axis=1):
        # Axes, text and grid are grey: only curves have a hue. Where they cross or
        # end, a few pixels have a mixture of colours.
        hued = half[half.max(axis=-1) - half.min(axis=-1) > 100]
        _, counts = np.unique(hued, axis=0, return_counts=True)
        assert (counts > 300).sum() == num_curves


def test_command_line_reads_98_percent_of_held_out_scans(tmp_path):
    result = run_program(EXAMPLE, "--seeds", "0,1,2", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr  # a clean first impression
    assert "80/80" in result.stderr  # the progress bar reached its end

    finals = re.findall(
        r"^seed (\d): (\d+\.\d+)% of 360 held-out scans correct$", result.stdout, re.M
    )
    assert [seed for seed, _ in finals] == ["0", "1", "2"]
    mean = re.search(r"^mean of 3 seeds: (\d+\.\d+)%$", result.stdout, re.M)
    assert mean is not None, result.stdout
    assert float(mean[1]) == pytest.approx(
        sum(float(accuracy) for _, accuracy in finals) / 3, abs=0.011
    )
    assert float(mean[1]) >= 98.0, result.stdout

    assert result.stdout.endswith("\nlearning curve: digits.png\n")
    assert_shows_curves(tmp_path / "digits.png", num_curves=3)


def test_command_line_takes_all_options(tmp_path):
    result = run_program(
        EXAMPLE,
        *("--devices", "cpu,cpu,cpu", "--type", "local", "--dtype", "float64"),
        *("--epochs", "2", "--batch-size", "100", "--lr", "0.05", "--momentum", "0.8"),
        *("--seeds", "5", "--plot", "curve.png"),
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(
        r"seed 5: \d+\.\d+% of 360 held-out scans correct\n"
        r"learning curve: curve\.png\n",
        result.stdout,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]
    assert_shows_curves(tmp_path / "curve.png", num_curves=1)


NOT_DEVICES = (
    "argument --devices: expected cpu or cuda:<number>, separated by commas, but got "
)


def test_command_line_refuses_wrong_devices_in_one_line(tmp_path):
    result = run_program(EXAMPLE, "--devices", "cpu,gpu", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == f"train_digits.py: error: {NOT_DEVICES}'gpu'\n"
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices", "cpu,gpu"], NOT_DEVICES + "'gpu'"),
        (["--devices", "cpu,"], NOT_DEVICES + "''"),
        (["--devices", "meta"], NOT_DEVICES + "'meta'"),
        (
            ["--devices", "cuda:99"],
            f"argument --devices: expected one of the {torch.cuda.device_count()} "
            "visible GPUs, but got 'cuda:99'",
        ),
        (
            ["--devices", "cpu,cpu,cpu", "--batch-size", "2"],
            "argument --batch-size: expected 3 (one scan per device) to 1437 (all "
            "of them), but got 2",
        ),
        (
            ["--devices", "cpu", "--batch-size", "1438"],
            "argument --batch-size: expected 1 (one scan per device) to 1437 (all "
            "of them), but got 1438",
        ),
        (["--epochs", "0"], "argument --epochs: expected at least 1, but got 0"),
        (
            ["--seeds", "one"],
            "argument --seeds: expected whole numbers, separated by commas, but got "
            "'one'",
        ),
    ],
)
def test_wrong_options_are_errors_of_one_line(options, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_digits.py", *options])
    with pytest.raises(SystemExit) as error:
        digits.parse_args()
    assert error.value.code == 2
    assert capsys.readouterr() == ("", f"train_digits.py: error: {message}\n")


def test_default_devices_are_all_gpus_or_four_times_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert digits.parse_devices(digits.default_devices()) == [torch.device("cpu")] * 4
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert digits.parse_devices(digits.default_devices()) == [
        torch.device("cuda", index) for index in range(3)
    ]


COMPRESSIONS = [
    OneBit(0.0),
    TwoBit(1.0),
    FP16(),
    BF16(),
    FP8(),
    Int4(),
    TopK(ratio=0.05),
]


@functools.cache
def accuracy_with(compression):
    """On the held-out digits, of 4 replicas whose gradients are compressed.

    At a learning rate of 0.02, for 60 epochs: at 0.05, for 30, TwoBit is 3 points worse
    than no compression. The mean of two runs, because what is right by chance differs
    by up to a point between processors.
    """
    data, lr = digits.load_data(), 0.02
    options = {"learning_rate": lr, "momentum": MOMENTUM}
    accuracies = []
    for seed in (SEED, SEED + 1):
        replicas = torchkv.replicate(digits.make_model(seed), ["cpu"] * NUM_REPLICAS)
        trainer = torchkv.Trainer(
            replicas, "sgd", options, compression_params=compression
        )
        *_, last = digits.train(
            replicas, trainer, data, epochs=60, batch_size=BATCH_SIZE, lr=lr, seed=seed
        )
        accuracies.append(last.accuracy)
    return sum(accuracies) / len(accuracies)


@pytest.mark.slow
@pytest.mark.parametrize("compression", COMPRESSIONS, ids=str)
def test_compressed_gradients_train_as_well(compression):
    assert accuracy_with(None) > 0.96
    assert accuracy_with(compression) >= accuracy_with(None) - 0.01
