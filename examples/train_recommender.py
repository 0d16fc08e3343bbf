"""Recommend words: factorize how often words stand near each other, in large tables.

The text is the source code of Python's standard library, which is on every machine that
has Python: nothing is downloaded. As users and items in a recommender, each word has a
row in one table, and a row in another as the neighbour of a word; the product of two
rows predicts the logarithm of how often the two words stand near each other (GloVe).

A batch has few of the words. So the tables are `torchkv.nn.StoreEmbedding`s, whose rows
are in a store: a lookup pulls the distinct rows of the batch, and `trainer.step` pushes
their gradients only. The same model is then trained with `nn.Embedding`, whose
gradients have all rows. Losses and tables are the same; the program prints by how much
they differ, and the bytes that went to and from the stores.

    python examples/train_recommender.py
    python examples/train_recommender.py --smoke
    python examples/train_recommender.py --words read,socket,thread
"""

import argparse
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

import torchkv

PACKAGES = "asyncio", "email", "http", "json", "logging", "multiprocessing", "unittest"
WINDOW = 5  # words that are at most so far apart are near each other
MIN_COUNT = 5  # rarer words are left out
MIN_PAIRS = 2  # and so are rarer pairs


# --- The data -------------------------------------------------------------------


class Data(NamedTuple):
    """How often words stand near each other, for P pairs of V words."""

    words: list[str]  # by id, the most frequent first
    pairs: Tensor  # (P, 2), ids
    counts: Tensor  # (P,), a neighbour at distance d counts 1 / d


def read_words(limit: int) -> list[str]:
    """Return the first `limit` words of the standard library, in lower case.

    Its modules are read in alphabetical order, then some packages. Parts of names are
    words of their own: `read_words` is "read" and "words".
    """
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(folder.glob("*.py"))
    for package in PACKAGES:
        paths += sorted((folder / package).glob("*.py"))
    words: list[str] = []
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        words += [word.lower() for word in re.findall("[A-Za-z][a-z]+", text)]
        if len(words) >= limit:
            break
    return words[:limit]


def count_pairs(text: list[str]) -> Data:
    """Count the pairs of different words that are near each other in a text."""
    frequent = [item for item in Counter(text).items() if item[1] >= MIN_COUNT]
    words = [word for word, _ in sorted(frequent, key=lambda item: (-item[1], item[0]))]
    id_of = {word: i for i, word in enumerate(words)}
    ids = torch.tensor([id_of[word] for word in text if word in id_of])
    firsts, seconds, weights = [], [], []
    for distance in range(1, WINDOW + 1):
        left, right = ids[:-distance], ids[distance:]
        firsts += [left, right]
        seconds += [right, left]
        weights.append(torch.full((2 * len(left),), 1 / distance))
    codes = torch.cat(firsts) * len(words) + torch.cat(seconds)
    distinct, index = codes.unique(return_inverse=True)
    counts = torch.zeros(len(distinct)).index_add_(0, index, torch.cat(weights))
    pairs = torch.stack([distinct // len(words), distinct % len(words)], dim=1)
    kept = (pairs[:, 0] != pairs[:, 1]) & (counts >= MIN_PAIRS)
    return Data(words, pairs[kept], counts[kept])


# --- The model ------------------------------------------------------------------


class Factors(nn.Module):
    """Predicts the logarithm of the count of pairs of words.

    A row of each table is a vector, and a bias as its last element.
    """

    def __init__(self, words: nn.Module, neighbours: nn.Module) -> None:
        """Take the two tables."""
        super().__init__()
        self.words = words
        self.neighbours = neighbours
        self.mean = nn.Parameter(torch.zeros(()))

    def forward(self, pairs: Tensor) -> Tensor:
        """Return the predictions for pairs of ids of shape (B, 2)."""
        word, neighbour = self.words(pairs[:, 0]), self.neighbours(pairs[:, 1])
        products = (word[:, :-1] * neighbour[:, :-1]).sum(dim=1)
        return products + word[:, -1] + neighbour[:, -1] + self.mean


def loss_of(model: nn.Module, pairs: Tensor, counts: Tensor) -> Tensor:
    """Return GloVe's loss: squared errors, of which frequent pairs weigh more."""
    weights = (counts / 100).clamp(max=1) ** 0.75
    return (weights * (model(pairs) - counts.log()) ** 2).mean()


def make_tables(num_words: int, dim: int, seed: int) -> dict[str, Tensor]:
    """Return the initial tables of both runs."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.rand(num_words, dim + 1, generator=generator) - 0.5) / dim
        for name in ("words", "neighbours")
    }


class Run(NamedTuple):
    """A model, its trainer, and the store that has the weights."""

    model: nn.Module
    trainer: torchkv.Trainer
    store: torchkv.KVStore


def with_store(tables: dict[str, Tensor], lr: float) -> Run:
    """Return a model whose tables are in a store, and only there."""
    store = torchkv.create("local")
    for key, table in tables.items():
        store.init(key, table)
    embeddings = [
        torchkv.nn.StoreEmbedding(*table.shape, store, key)
        for key, table in tables.items()
    ]
    model = Factors(*embeddings)
    # The trainer finds the embeddings, and steps them and the mean in one push.
    adagrad = torchkv.optim.Adagrad(lr=lr)
    return Run(model, torchkv.Trainer(model, adagrad, kvstore=store), store)


def with_parameters(tables: dict[str, Tensor], lr: float) -> Run:
    """Return the same model with tables that are parameters."""
    store = torchkv.create("local")
    embeddings = [
        nn.Embedding.from_pretrained(table.clone(), freeze=False)
        for table in tables.values()
    ]
    model = Factors(*embeddings)
    adagrad = torchkv.optim.Adagrad(lr=lr)
    return Run(model, torchkv.Trainer(model, adagrad, kvstore=store), store)


# --- Training -------------------------------------------------------------------


def train(
    run: Run, data: Data, *, epochs: int, batch_size: int, seed: int
) -> Iterator[float]:
    """Train in place; yield the mean loss of each batch.

    All randomness comes from `seed`: the same one gives the same batches.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(data.pairs), generator=generator)
        for batch in order.split(batch_size):
            loss = loss_of(run.model, data.pairs[batch], data.counts[batch])
            loss.backward()
            run.trainer.step()
            yield loss.item()


@torch.no_grad()
def tables_of(model: Factors) -> list[Tensor]:
    """Return both tables, from wherever they are."""
    tables = []
    for table in (model.words, model.neighbours):
        if isinstance(table, nn.Embedding):
            tables.append(table.weight)
        else:
            tables.append(table.store.pull(table.key))
    return tables


def num_bytes(store: torchkv.KVStore) -> int:
    """Return how many bytes of values went to and from the store."""
    stats = store.stats().values()
    return sum(key["bytes_pushed"] + key["bytes_pulled"] for key in stats)


def nearest(tables: list[Tensor], index: int, count: int = 6) -> list[int]:
    """Return the words with the most similar rows, by cosine, the nearest first."""
    vectors = nn.functional.normalize(sum(table[:, :-1] for table in tables))
    similar = vectors @ vectors[index]
    similar[index] = -1
    return similar.topk(min(count, len(vectors) - 1)).indices.tolist()


# --- The command line -----------------------------------------------------------


def means(losses: list[float], count: int = 200) -> tuple[list[float], list[float]]:
    """Return up to `count` means of consecutive losses, and the steps they are at."""
    chunks = torch.tensor(losses).tensor_split(min(count, len(losses)))
    steps = torch.arange(1.0, len(losses) + 1).tensor_split(len(chunks))
    return [x.mean().item() for x in steps], [x.mean().item() for x in chunks]


def plot(curves: dict[str, list[float]], path: str) -> None:
    """Plot the loss of each run by step, as a PNG."""
    figure = Figure(figsize=(6, 4), layout="constrained")  # needs no display
    axes = figure.subplots()
    # The runs have the same losses, so the first line is wide, to be seen below.
    for (name, losses), width in zip(curves.items(), (5, 1.5), strict=True):
        axes.plot(*means(losses), label=name, linewidth=width)
    axes.set(title="Training loss", xlabel="step", yscale="log")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=120)


class Parser(argparse.ArgumentParser):
    """Reports errors in one line; argparse would print the usage first."""

    def error(self, message: str) -> NoReturn:
        """Print `message` and exit."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse_args() -> argparse.Namespace:
    """Return the validated command-line options."""
    parser = Parser(
        description="Factorize how often words stand near each other.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--length", type=int, default=1_000_000, help="words of text")
    parser.add_argument("--dim", type=int, default=32, help="of the vectors")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the pairs")
    parser.add_argument("--batch-size", type=int, default=512, help="pairs")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of tables and batches")
    parser.add_argument(
        "--words",
        default="import,error,list,thread,read,test",
        help="whose nearest ones are printed",
    )
    parser.add_argument(
        "--plot", default="recommender.png", metavar="PATH", help="the loss curves"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="little text, only to see whether it runs"
    )
    args = parser.parse_args()
    if args.smoke:
        args.length, args.epochs = min(args.length, 30_000), min(args.epochs, 2)
    for name, least in (
        ("length", 1000),
        ("dim", 1),
        ("epochs", 1),
        ("batch_size", 1),
    ):
        if (value := getattr(args, name)) < least:
            option = "--" + name.replace("_", "-")
            parser.error(
                f"argument {option}: expected at least {least}, but got {value}"
            )
    return args


def main() -> None:
    """Train both runs, compare them, and print the nearest words."""
    args = parse_args()
    torch.set_num_threads(1)  # more hardly help with such small batches
    text = read_words(args.length)
    data = count_pairs(text)
    print(f"{len(text)} words of text, {len(data.words)} rows, {len(data.pairs)} pairs")

    tables = make_tables(len(data.words), args.dim, args.seed)
    runs: dict[str, Run] = {}
    curves: dict[str, list[float]] = {}
    makers: dict[str, Callable[[dict[str, Tensor], float], Run]] = {
        "StoreEmbedding": with_store,
        "nn.Embedding": with_parameters,
    }
    for name, make in makers.items():
        runs[name] = make(tables, args.lr)
        progress = tqdm(
            train(
                runs[name],
                data,
                epochs=args.epochs,
                batch_size=args.batch_size,
                seed=args.seed,
            ),
            desc=name,
            total=args.epochs * -(-len(data.pairs) // args.batch_size),
            unit="step",
        )
        losses = curves[name] = []
        for loss in progress:
            losses.append(loss)
            if len(losses) % 100 == 0:
                mean = sum(losses[-100:]) / 100
                progress.set_postfix(loss=f"{mean:.4f}", refresh=False)
        moved = num_bytes(runs[name].store)
        last = sum(losses[-100:]) / len(losses[-100:])
        print(f"{name}: loss {last:.4f}, {moved / 2**20:.1f} MiB to and from the store")

    ours, dense = runs.values()
    of_losses = max(abs(a - b) for a, b in zip(*curves.values(), strict=True))
    pairs = zip(tables_of(ours.model), tables_of(dense.model), strict=True)
    of_tables = max((a - b).abs().max().item() for a, b in pairs)
    print(f"largest difference of losses {of_losses:.1e}, of tables {of_tables:.1e}")
    fraction = num_bytes(ours.store) / num_bytes(dense.store)
    print(f"bytes of StoreEmbedding: {fraction:.1%} of those of nn.Embedding")

    for word in args.words.split(","):
        if word in data.words:
            near = nearest(tables_of(ours.model), data.words.index(word))
            print(f"{word}: {', '.join(data.words[i] for i in near)}")
        else:
            print(f"{word}: not in the text")
    plot(curves, args.plot)
    print(f"loss curves: {args.plot}")


if __name__ == "__main__":
    main()
