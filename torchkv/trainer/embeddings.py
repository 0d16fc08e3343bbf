"""The StoreEmbedding modules of a Trainer, whose tables are keys of its store."""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from torchkv.arguments import StoreKey, expect, shown
from torchkv.kvstore import KVStore
from torchkv.nn.embedding import StoreEmbedding, embeddings_of
from torchkv.trainer.replicas import existing


class Embeddings:
    """Modules by key and replica, and their gradients.

    A replica may have several modules of one key, and replicas may share a module,
    which is then the first one's. Each module's gradient is one value of the key.
    """

    def __init__(
        self, replicas: Sequence[nn.Module], more: Iterable[StoreEmbedding] | None
    ) -> None:
        """Finds the modules in replicas; the first one also has `more`.

        Raises:
            ValueError: replicas whose modules have different keys, or only some of
                several replicas.
            TypeError: `more` has something else.
        """
        given = [] if more is None else list(_checked(more))
        of_replicas = [embeddings_of(module) for module in replicas] or [[]]
        of_replicas[0] = [*of_replicas[0], *given]
        keys = [{module.key for module in modules} for modules in of_replicas]
        for i, other in enumerate(keys[1:], 1):
            if different := keys[0] ^ other:
                raise ValueError(
                    "Trainer: expected replicas with StoreEmbeddings of the same keys, "
                    f"but only one has it (key {shown(min(different, key=str))}, "
                    f"replica {i})"
                )
        self._of_key: dict[StoreKey, list[list[StoreEmbedding]]] = {}
        seen: set[int] = set()
        for i, modules in enumerate(of_replicas):
            for module in modules:
                if id(module) not in seen:
                    seen.add(id(module))
                    groups = self._of_key.setdefault(
                        module.key, [[] for _ in of_replicas]
                    )
                    groups[i].append(module)
        _check_all_replicas(seen)

    def check_store(
        self,
        store: Any,
        update_on_kvstore: bool,
        parameters: Mapping[StoreKey, Any],
    ) -> None:
        """ValueError unless a trainer with that store can step the tables.

        `store` is what the trainer was given, before it creates one.
        """
        kinds = {type(key) for key in parameters}
        for module in self._modules():
            where = f"(key {shown(module.key)})"
            if not (isinstance(store, KVStore) and store._impl == module.store._impl):
                raise ValueError(
                    "Trainer: expected the StoreEmbedding's store as the trainer's, "
                    f"but got {store!r} and {module.store!r}; pass kvstore= the "
                    "store in which the table is, and make replicas with "
                    f"torchkv.replicate, whose tables are in one store {where}"
                )
            if not update_on_kvstore:
                raise ValueError(
                    "Trainer: expected update_on_kvstore to be True or None with a "
                    f"StoreEmbedding, whose rows the store steps, but got False {where}"
                )
            if module.key in parameters:
                raise ValueError(
                    "Trainer: expected a StoreEmbedding with a key of its own, but got "
                    f"that of a parameter {where}"
                )
            if kinds - {type(module.key)}:
                raise ValueError(
                    "Trainer: expected a StoreEmbedding with a key of the parameters' "
                    "type, which is str, or int where they have no names, but got "
                    f"{type(module.key).__name__} {where}"
                )

    def _modules(self) -> Iterable[StoreEmbedding]:
        for groups in self._of_key.values():
            for group in groups:
                yield from group

    def keys(self) -> KeysView[StoreKey]:
        """The keys of the tables."""
        return self._of_key.keys()

    def __len__(self) -> int:
        """The number of tables."""
        return len(self._of_key)

    def __contains__(self, key: object) -> bool:
        """Whether it is the key of a table."""
        return key in self._of_key

    # -- gradients

    def trained(self) -> list[StoreKey]:
        """The keys of tables that the first replica has not frozen."""
        return [
            key
            for key, groups in self._of_key.items()
            if any(m.requires_grad for m in next(filter(None, groups), []))
        ]

    def gradients(self, key: StoreKey) -> tuple[list[Tensor], int | None]:
        """The modules' gradients, and the first replica without one, if any."""
        without, result = None, []
        for i, group in enumerate(self._of_key[key]):
            found = [gradient for m in group if (gradient := m.grad) is not None]
            if group and not found and without is None:
                without = i
            result += found
        return result, without

    def first_of(self, key: StoreKey) -> Tensor:
        """The gradient of the first module that has one, as it is accumulated."""
        rows = [
            rows
            for group in self._of_key[key]
            for module in group
            for rows in module.rows_with_grad()
        ]
        gradient = rows[0].grad
        assert gradient is not None
        return gradient

    def rows_with_grad(self) -> list[Tensor]:
        """Tensors whose ``.grad`` are all modules' gradients."""
        return [rows for m in self._modules() for rows in m.rows_with_grad()]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, or else sets them to those of no rows."""
        for module in self._modules():
            module.zero_grad(set_to_none)


def _checked(modules: Any) -> Iterable[StoreEmbedding]:
    what = "StoreEmbedding modules as embeddings"
    expect("Trainer", modules, Iterable, what)
    for module in modules:
        expect("Trainer", module, StoreEmbedding, what)
        yield module


def _check_all_replicas(given: set[int]) -> None:
    """ValueError if replicas are left out, as the table would lack their gradients."""
    for replicas in list(existing):
        for copies in zip(*map(embeddings_of, replicas), strict=False):
            if len({id(module) for module in copies} & given) not in (
                0,
                len({*map(id, copies)}),
            ):
                raise ValueError(
                    f"Trainer: expected all {len(replicas)} replicas of a "
                    "StoreEmbedding, but got only some of them; pass the Replicas "
                    f"that torchkv.replicate returned (key {shown(copies[0].key)})"
                )
