"""Store types of third parties, which :func:`torchkv.create` makes by their names."""

from __future__ import annotations

from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, overload

from torchkv import _C

_types: dict[str, type[KVStoreBase]] = {}
_Class = TypeVar("_Class", bound="type[KVStoreBase]")


@overload
def register(name: str, /) -> Callable[[_Class], _Class]: ...
@overload
def register(cls: _Class, /) -> _Class: ...
def register(what: Any, /) -> Any:
    """Decorates a class, a new store type: ``torchkv.create(name)`` makes an instance.

    ::

        @torchkv.register("horovod")
        class Horovod(torchkv.KVStoreBase): ...

    As MXNet's ``KVStoreBase.register``, also without a name: then it is that of the
    class in lower case. C++ libraries add types that all bindings create, with
    ``torchkv::register_store``.

    Raises:
        TypeError: neither a str nor a class derived from :class:`KVStoreBase`.
        ValueError: the name of a type that exists, built in, an alias or registered.
    """
    if isinstance(what, str):
        return lambda cls: _add(what, cls)
    return _add(getattr(what, "__name__", "").lower(), what)


def _add(name: str, cls: _Class) -> _Class:
    if not (isinstance(cls, type) and issubclass(cls, KVStoreBase)):
        raise TypeError(
            "register: expected a class derived from torchkv.KVStoreBase, but got "
            f"{cls!r}"
        )
    _C.register_store(name)
    _types[name] = cls
    return cls


def registered(name: object) -> type[KVStoreBase] | None:
    """The class that is registered as `name`, if any."""
    return _types.get(name) if isinstance(name, str) else None


class KVStoreBase(ABC):
    """What a store type of a third party derives from, as in MXNet.

    A :class:`torchkv.Trainer` with ``update_on_kvstore=False`` trains with any such
    store. Keys and values are lists: of each key, one tensor per replica of this
    process.
    """

    OPTIMIZER: ClassVar[str] = "optimizer"
    """The capability of updates on the store."""

    # Not ABCMeta's: as MXNet's decorator of classes.
    register = staticmethod(register)

    @property
    def type(self) -> str:
        """The name under which the class is registered."""
        return next((k for k, cls in _types.items() if cls is type(self)), "")

    @property
    def rank(self) -> int:
        """This process's number among the workers."""
        return 0

    @property
    def num_workers(self) -> int:
        """The number of worker processes."""
        return 1

    def is_capable(self, capability: str) -> bool:
        """Whether the store has a capability, such as :attr:`OPTIMIZER`."""
        return False

    @abstractmethod
    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> object:
        """Copies a first value of each key, rank 0's, to all outs of all processes."""

    @abstractmethod
    def pushpull(
        self, key: Any, value: Any, out: Any = None, priority: int = 0
    ) -> object:
        """Writes the sum of all values of all processes to the outs, or the values."""

    def close(self) -> None:  # noqa: B027  # most have nothing to free
        """Frees what the store has."""


def is_a(cls: type) -> None:
    """Makes ``isinstance(store, KVStoreBase)`` true for a class with other bases."""
    ABCMeta.register(KVStoreBase, cls)
