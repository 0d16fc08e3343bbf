"""The store of a Trainer: a new one, or an empty one of the caller's."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch

from torchkv import compression
from torchkv.arguments import StoreKey, check_known, expect
from torchkv.compression import Compression
from torchkv.kvstore import KVStore, create
from torchkv.optim import StoreOptimizer
from torchkv.parameter_names import name_among, with_keys
from torchkv.registered import KVStoreBase


def configure(
    store: KVStore,
    optimizer: str | StoreOptimizer | type[torch.optim.Optimizer],
    optimizer_params: Mapping[str, Any],
    kvstore: KVStore | KVStoreBase | None,
    compression_params: Compression,
    names: Set[StoreKey],
) -> None:
    """Sets a trainer's optimizer and compression, or changes nothing."""
    if isinstance(optimizer, StoreOptimizer):
        settings = optimizer._settings().renamed("Trainer", name_among(names))
        settings.check("Trainer", None)
        check_known("Trainer", settings.names(), names)
    before = kvstore.gradient_compression if isinstance(kvstore, KVStore) else None
    if compression_params is not None:
        _compress(kvstore, compression_params, names)
    try:
        store.set_optimizer(optimizer, **optimizer_params)
    except BaseException:
        if compression_params is not None and isinstance(kvstore, KVStore):
            kvstore.set_gradient_compression(before)
        raise


def _compress(
    kvstore: KVStore | KVStoreBase | None,
    compression_params: Compression,
    names: Set[StoreKey],
) -> None:
    """Sets the compression of a trainer's store, whose keys will be `names`."""
    if not isinstance(kvstore, KVStore):
        what = "Trainer: compression_params need a store of torchkv's"
        raise ValueError(f"{what}, but got {kvstore!r}")
    groups, keys = compression.parse(compression_params)
    group_of = with_keys("Trainer", keys, name_among(names))
    check_known("Trainer", group_of, names)
    kvstore.set_gradient_compression(compression.shown_as(groups, group_of))


def empty_store(
    kvstore: str | KVStore | KVStoreBase | None, tables: Set[StoreKey]
) -> KVStore | KVStoreBase | None:
    """The store of a trainer, or a new one, with no keys but those of `tables`."""
    if kvstore is None:
        return None
    if isinstance(kvstore, str):
        return create(kvstore)
    expect("Trainer", kvstore, KVStoreBase, "a store or a store type as kvstore")
    if isinstance(kvstore, KVStore) and (
        not tables >= {*kvstore.keys()} or kvstore.optimizer is not None
    ):
        other, hint = "", "create one for each trainer"
        if tables:
            other = " but those of its StoreEmbeddings"
            hint = "after another trainer, set_updater(None) and delete the other keys"
        raise ValueError(
            f"Trainer: expected a store that has neither keys{other} nor an optimizer, "
            f"but got {kvstore!r}; {hint}"
        )
    return kvstore
