"""Modules of PyTorch whose parameters are values of a store."""

from torchkv.nn.embedding import StoreEmbedding

__all__ = ["StoreEmbedding"]
