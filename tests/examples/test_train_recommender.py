"""The recommender trains what plain PyTorch trains, and moves fewer bytes."""

import importlib.util
import re
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from torch import nn

from helpers import run_program

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_recommender.py"
RUN = {"epochs": 2, "batch_size": 64, "seed": 3}


def import_example():
    spec = importlib.util.spec_from_file_location("train_recommender", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


recommender = import_example()


@pytest.fixture(scope="module")
def data():
    return recommender.count_pairs(recommender.read_words(20_000))


def plain(data, tables):
    """torch's own loop: its losses and tables."""
    embeddings = [
        nn.Embedding.from_pretrained(table.clone(), freeze=False, sparse=True)
        for table in tables.values()
    ]
    model = recommender.Factors(*embeddings)
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1)

    class Trainer:
        def step(self):
            optimizer.step()
            optimizer.zero_grad()

    run = recommender.Run(model, Trainer(), None)
    losses = [*recommender.train(run, data, **RUN)]
    return losses, recommender.tables_of(model)


@pytest.mark.parametrize("make", ["with_store", "with_parameters"])
def test_losses_and_tables_are_those_of_torchs_own_loop(data, make):
    tables = recommender.make_tables(len(data.words), 8, seed=1)
    run = getattr(recommender, make)(tables, 0.1)
    losses = [*recommender.train(run, data, **RUN)]
    expected, expected_tables = plain(data, tables)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[-1] < losses[0] / 2
    actual = recommender.tables_of(run.model)
    for table, other, first in zip(
        actual, expected_tables, tables.values(), strict=True
    ):
        torch.testing.assert_close(table, other.detach(), rtol=1e-4, atol=1e-5)
        assert (table - first).abs().max() > 0.1


def test_pairs_are_counted_by_distance():
    text = "a b a c a b".split() * 4
    data = recommender.count_pairs(text)
    assert data.words == ["a", "b", "c"][: len(data.words)]
    expected = {}
    ids = [data.words.index(word) if word in data.words else None for word in text]
    ids = [i for i in ids if i is not None]
    for i, first in enumerate(ids):
        for j, second in enumerate(ids):
            if first != second and 0 < abs(i - j) <= recommender.WINDOW:
                pair = first, second
                expected[pair] = expected.get(pair, 0) + 1 / abs(i - j)
    actual = dict(
        zip(map(tuple, data.pairs.tolist()), data.counts.tolist(), strict=True)
    )
    kept = {k: x for k, x in expected.items() if x >= recommender.MIN_PAIRS}
    assert kept and actual == pytest.approx(kept)


def test_rare_words_are_left_out():
    text = ["often", "seen"] * 20 + ["rare"] * (recommender.MIN_COUNT - 1)
    assert recommender.count_pairs(text).words == ["often", "seen"]


def test_the_text_is_the_same_each_time():
    words = recommender.read_words(5000)
    assert len(words) == 5000 and words == recommender.read_words(6000)[:5000]
    assert all(re.fullmatch("[a-z]{2,}", word) for word in words)


def test_nearest_rows():
    tables = [torch.tensor([[1.0, 0.0, 9], [0.0, 1.0, 9], [3.0, 0.5, -9]])] * 2
    assert recommender.nearest(tables, 0) == [2, 1]


def assert_shows_two_curves(path):
    """The PNG decodes, and has lines of two colours."""
    pixels = matplotlib.image.imread(path)
    height, width, _ = pixels.shape
    assert height > 300 and width > 500
    colours = np.round(pixels[..., :3] * 255).astype(int)
    hued = colours[colours.max(axis=-1) - colours.min(axis=-1) > 100]
    _, counts = np.unique(hued, axis=0, return_counts=True)
    assert (counts > 300).sum() == 2


OUTPUT = re.compile(
    r"\d+ words of text, (\d+) rows, \d+ pairs\n"
    r"StoreEmbedding: loss (\d\.\d+), \d+\.\d MiB to and from the store\n"
    r"nn\.Embedding: loss (\d\.\d+), \d+\.\d MiB to and from the store\n"
    r"largest difference of losses (\S+), of tables (\S+)\n"
    r"bytes of StoreEmbedding: (\d+\.\d)% of those of nn\.Embedding\n"
    r"(?:[a-z]+: .+\n)+"
    r"loss curves: (.+)\n"
)


def test_command_line_moves_a_fraction_of_the_bytes(tmp_path):
    result = run_program(EXAMPLE, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
    assert result.stderr.count("100%") >= 2  # both progress bars reached their end
    found = OUTPUT.fullmatch(result.stdout)
    assert found, result.stdout
    rows, loss, dense_loss, of_losses, of_tables, fraction, path = found.groups()
    assert int(rows) > 5000 and float(loss) < 0.04
    assert loss == dense_loss and path == "recommender.png"
    assert float(of_losses) < 1e-5 and float(of_tables) < 1e-5
    assert float(fraction) < 15
    assert re.search(r"^error: .*\braise\b", result.stdout, re.M)
    assert_shows_two_curves(tmp_path / path)


def test_command_line_takes_all_options(tmp_path):
    result = run_program(
        EXAMPLE,
        *("--smoke", "--length", "8000", "--dim", "4", "--epochs", "1"),
        *("--batch-size", "100", "--lr", "0.05", "--seed", "2"),
        *("--words", "error,nosuchword", "--plot", "curve.png"),
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert OUTPUT.fullmatch(result.stdout), result.stdout
    assert "\nnosuchword: not in the text\n" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epochs", "0"], "argument --epochs: expected at least 1, but got 0"),
        (["--batch-size", "0"], "argument --batch-size: expected at least 1, but got"),
        (["--length", "10"], "argument --length: expected at least 1000, but got 10"),
    ],
)
def test_wrong_options_are_errors_of_one_line(options, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_recommender.py", *options])
    with pytest.raises(SystemExit) as error:
        recommender.parse_args()
    assert error.value.code == 2
    assert f"train_recommender.py: error: {message}" in capsys.readouterr().err
