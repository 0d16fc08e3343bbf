"""Tables in stores, and torch's own embeddings with the same rows."""

import torch
from torch import nn

import torchkv

ROWS, DIM = 12, 5


def table(seed=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, DIM, generator=generator, dtype=dtype)


def make(optimizer=None, dtype=torch.float32, **options):
    """A StoreEmbedding of a dense key, in a store with an optimizer."""
    store = torchkv.create("local")
    store.init("table", table(dtype=dtype))
    if optimizer is not None:
        store.set_optimizer(optimizer)
    return torchkv.nn.StoreEmbedding(ROWS, DIM, store, "table", **options)


def plain(padding_idx=None, sparse=True, dtype=torch.float32):
    """nn.Embedding; its padding is zeros, as a StoreEmbedding's."""
    rows = table(dtype=dtype)
    if padding_idx is not None:
        rows[padding_idx] = 0
    return nn.Embedding.from_pretrained(
        rows, freeze=False, padding_idx=padding_idx, sparse=sparse
    )


def plain_bag(mode, padding_idx=None, include_last_offset=False):
    rows = table()
    if padding_idx is not None:
        rows[padding_idx] = 0
    return nn.EmbeddingBag.from_pretrained(
        rows,
        freeze=False,
        mode=mode,
        padding_idx=padding_idx,
        include_last_offset=include_last_offset,
    )


def stored(embedding):
    return embedding.store.pull(embedding.key)


def weighted(output):
    """A loss whose gradients differ by position, and are small numbers."""
    weights = torch.arange(output.numel(), dtype=torch.float32).view(output.shape)
    return (output.float() * (weights.remainder(7) - 3)).sum()
