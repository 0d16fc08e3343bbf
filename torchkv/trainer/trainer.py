"""gluon's Trainer: trains the parameters of a model with an optimizer on a store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from torchkv.arguments import StoreKey, as_batch_size
from torchkv.compression import Compression
from torchkv.kvstore import KVStore, create
from torchkv.nn.embedding import StoreEmbedding
from torchkv.optim import StoreOptimizer
from torchkv.optim.torch_interface import Push
from torchkv.registered import KVStoreBase
from torchkv.trainer.embeddings import Embeddings
from torchkv.trainer.gradients import Gradients, Rescale, scaled
from torchkv.trainer.ownership import Ownership
from torchkv.trainer.parameters import Params, collected, modules_of
from torchkv.trainer.states import States
from torchkv.trainer.stores import configure, empty_store
from torchkv.trainer.weights import Weights, broadcast_frozen


class Trainer(States):
    """Trains parameters with an optimizer on a store, as ``mxnet.gluon.Trainer`` does.

    ::

        trainer = torchkv.Trainer(model.parameters(), "adamw", {"learning_rate": 1e-3})
        for images, labels in loader:
            F.cross_entropy(model(images), labels).backward()
            trainer.step()

    A step is one call of the store: it pushes all replicas' gradients, which are summed
    and stepped on in one pass, without a copy into buckets, and pulls the new weights.

    :meth:`step` sets every ``.grad`` to None, as in MXNet. Several calls of
    ``backward`` before it accumulate. :meth:`zero_grad` drops gradients without a step.

    A parameter's key in the store, and in :attr:`optimizer`, is its name or, if it has
    none, its position. Tied weights have one key. Parameters with
    ``requires_grad=False`` are skipped until that changes. Weights that are written
    between two steps, for instance by ``model.load_state_dict``, are detected by their
    version counter: training continues from them and the optimizer's state is kept.
    With replicas, the first replica's weights are used. With several processes, write
    them in all of them; rank 0's weights are used. On one device of one machine, a
    weight without gaps in its memory that overlaps with no other is the stored value
    (``KVStore.init(share=True)``): it takes no second memory, and no write is lost.
    Elsewhere, one through ``.data`` is: use ``with torch.no_grad(): p.clamp_(0)``.

    The tables of :class:`torchkv.nn.StoreEmbedding` modules are keys of the same store:
    pass it as `kvstore`. Each step pushes the rows that have gradients.

    If the optimizer accumulates, the gradients of each step are divided by that step's
    batch size, in a separate pass unless the batch size is 1.

    With ``torch.amp.GradScaler``, pass the trainer as the optimizer::

        trainer.zero_grad()  # a step that the scaler skipped has left its gradients
        scaler.scale(loss).backward()
        scaler.unscale_(trainer)  # only needed to inspect or clip gradients
        trainer.clip_grad_norm_(1.0)
        scaler.step(trainer)
        scaler.update()

    An infinity or NaN in a gradient of any replica skips the step of all parameters.
    ``torch.nn.utils.clip_grad_norm_`` would clip by the norms of single replicas;
    :meth:`clip_grad_norm_` uses the norm of the sum over replicas.
    """

    def __init__(
        self,
        params: Params,
        optimizer: str | StoreOptimizer | type[torch.optim.Optimizer],
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: str | KVStore | KVStoreBase | None = "device",
        compression_params: Compression = None,
        update_on_kvstore: bool | None = None,
        embeddings: Iterable[StoreEmbedding] | None = None,
    ) -> None:
        """Arguments in gluon's order, with gluon's defaults.

        Args:
            params: a module, its ``parameters()`` or ``named_parameters()``, a dict by
                name, or replicas: what :func:`torchkv.replicate` returned, or a list or
                tuple of modules with the same parameters. The first replica's values
                are copied to the others. A ``ModuleList`` is one module.
            optimizer: as in :meth:`torchkv.KVStore.set_optimizer`: one of
                :mod:`torchkv.optim`, MXNet's name of one, or a class of
                :mod:`torch.optim`.
            optimizer_params: options, if `optimizer` is a name or a class.
            kvstore: the type of a store to create, or an empty store, which no other
                trainer may use. None is only valid for one replica, and implies
                ``update_on_kvstore=False``; so does a store of a third party
                (:func:`torchkv.register`).
            compression_params: compresses each replica's gradients; as in
                :meth:`torchkv.KVStore.set_gradient_compression` of `kvstore`.
            update_on_kvstore: None or True: the optimizer runs on `kvstore`. False:
                `kvstore` only sums gradients, which :meth:`allreduce_grads` writes
                back. :meth:`update` then steps once, on a local store of the trainer,
                and copies the weights to all replicas.
            embeddings: the :class:`torchkv.nn.StoreEmbedding` modules to train, if
                `params` are parameters. Those in modules are found. Their tables are
                keys of `kvstore`, which may then have these keys.

        Raises:
            ValueError: no parameters, a parameter that is not a leaf or not
                initialised, a repeated name, replicas that differ or share a parameter,
                only some of several replicas, a store with keys or an optimizer, a
                StoreEmbedding of another store, with ``update_on_kvstore=False`` or
                with a parameter's key, or as ``set_optimizer``.
            KeyError: groups or multipliers of the optimizer, or groups of
                ``compression_params``, name unknown parameters.
            TypeError: an argument of the wrong type.
            NotImplementedError: a store type that is not supported yet, or does not
                support ``compression_params``.
        """
        if optimizer_params is not None and not isinstance(optimizer_params, Mapping):
            raise TypeError(
                "Trainer: expected a dict as optimizer_params, but got "
                f"{type(optimizer_params).__name__}; pass the store by keyword: "
                "Trainer(params, optimizer, kvstore=...)"
            )
        modules = modules_of(params)
        self._embeddings = Embeddings(modules, embeddings)
        self._parameters = collected(params, len(self._embeddings) > 0)
        self._num_replicas = max(len(modules), 1)
        if kvstore is None and (update_on_kvstore or self._num_replicas > 1):
            raise ValueError(
                "Trainer: update_on_kvstore=True and several replicas need a kvstore, "
                f"but got None ({self._num_replicas} replicas)"
            )
        self._embeddings.check_store(
            kvstore, update_on_kvstore is not False, self._parameters
        )
        self._kvstore = empty_store(kvstore, self._embeddings.keys())
        on_kvstore = None
        if update_on_kvstore is not False and isinstance(self._kvstore, KVStore):
            on_kvstore = self._kvstore
        elif update_on_kvstore and self._kvstore is not None:
            raise ValueError(
                "Trainer: update_on_kvstore=True needs a store of torchkv's, but got "
                f"{self._kvstore!r}, which sums gradients only"
            )
        self._update_on_kvstore = on_kvstore is not None
        names = dict.fromkeys([*self._parameters, *self._embeddings.keys()])
        # Then there is nothing to sum, and MXNet has no store.
        self._is_alone = (
            update_on_kvstore is None
            and self._num_replicas == 1
            and (on_kvstore is None or on_kvstore.num_workers == 1)
        )
        # Has the weights, and runs the optimizer.
        self._store = on_kvstore if on_kvstore is not None else create("device")
        configure(
            self._store,
            optimizer,
            optimizer_params or {},
            self._kvstore,
            compression_params,
            names.keys(),
        )
        self._rescale = Rescale(self.optimizer)
        reducing = None if self._update_on_kvstore else self._kvstore
        self._gradients = Gradients(self._parameters, self._embeddings, reducing)
        broadcast_frozen(self._kvstore, self._parameters)
        self._last_norm: Tensor | None = None
        self._weights = Weights(self._parameters, self._store)
        self._weights.store_changed(self._gradients.trained())
        self.optimizer._know(names, self.zero_grad)
        self._ownership = Ownership(self._parameters)

    # -- attributes

    @property
    def kvstore(self) -> KVStore | KVStoreBase | None:
        """The store between replicas, or None."""
        return self._kvstore

    @property
    def optimizer(self) -> StoreOptimizer:
        """The optimizer, which schedulers of ``torch.optim.lr_scheduler`` accept.

        Its ``set_param_groups``, ``set_lr_mult`` and ``set_wd_mult`` set options of
        individual parameters, by key. Each step sets its ``rescale_grad``; a later
        trainer with the same optimizer starts from the original value.
        """
        optimizer = self._store.optimizer
        if optimizer is None:
            raise RuntimeError(
                "Trainer: the store no longer has the trainer's optimizer, but another "
                "updater"
            )
        return optimizer

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        """All parameters of all replicas, for ``torch.amp.GradScaler``.

        And the rows of a StoreEmbedding that have gradients. Read-only: options are in
        ``trainer.optimizer.param_groups``.
        """
        return (MappingProxyType({"params": self._gradients.tensors()}),)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the optimizer's first group."""
        return self.optimizer.learning_rate

    def set_learning_rate(self, lr: float) -> None:
        """Sets :attr:`learning_rate`, from the next step on.

        Groups with a learning rate of their own keep it.

        Raises:
            ValueError: a value that is negative, infinite or NaN. Nothing has changed.
            TypeError: a value that is not a number.
            UserWarning: raised as an exception, as in MXNet: MXNet's optimizer has an
                ``lr_scheduler``.
        """
        self.optimizer.set_learning_rate(lr)

    # -- training

    def step(self, batch_size: float = 1, ignore_stale_grad: bool = False) -> None:
        """Sums the replicas' gradients and steps all parameters.

        Args:
            batch_size: the size of the batch of all replicas together, by which the
                gradients are divided; 1 if the loss is already a mean.
            ignore_stale_grad: skip parameters without a gradient. If only some replicas
                have one, these are summed.

        Raises:
            UserWarning: raised as an exception, as in MXNet: a parameter has no
                gradient since the last step. Nothing has changed.
            ValueError: a batch size that is not greater than 0 and finite.
            RuntimeError: a later Trainer has one of the parameters.
            NotImplementedError: a sparse gradient that the store does not take.
        """
        size = as_batch_size("step", batch_size)
        self._ownership.check("step")
        reduces = not self._update_on_kvstore
        self._step("step", size, ignore_stale_grad, reduces)

    def allreduce_grads(self) -> None:
        """Replaces each gradient by the sum over replicas, to inspect or modify it.

        Only with ``update_on_kvstore=False``, or with one replica in one process, and
        followed by :meth:`update`. Replicas without a gradient are skipped.

        Raises:
            RuntimeError: the optimizer runs on the store, or as :meth:`step`.
        """
        self._check_local("allreduce_grads")
        self._ownership.check("allreduce_grads")
        self._gradients.reduce(self._gradients.fresh("allreduce_grads", True))

    def update(self, batch_size: float = 1, ignore_stale_grad: bool = False) -> None:
        """Steps all parameters with the gradients from :meth:`allreduce_grads`.

        Uses the first replica's gradients, and copies the new weights to all replicas.

        Args:
            batch_size: as in :meth:`step`.
            ignore_stale_grad: as in :meth:`step`.

        Raises:
            RuntimeError: the optimizer runs on the store, or as :meth:`step`.
            UserWarning, ValueError: as :meth:`step`.
        """
        self._check_local("update")
        size = as_batch_size("update", batch_size)
        self._ownership.check("update")
        self._step("update", size, ignore_stale_grad, reduces=False)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Clips the gradients of the next step by their total norm.

        As :func:`torch.nn.utils.clip_grad_norm_`, for any number of replicas: the norm
        is that of the sum over replicas, over all parameters, and all replicas'
        gradients are multiplied in place by ``max_norm / (norm + 1e-6)`` if that is
        less than 1. The ``batch_size`` of :meth:`step` is applied afterwards. With
        ``torch.amp.GradScaler``, call ``scaler.unscale_(trainer)`` first.

        Args:
            max_norm: the maximum norm.
            norm_type: the p of the p-norm; ``inf`` for the largest absolute value.
            error_if_nonfinite: whether an infinite or NaN norm is an error.

        Returns:
            The norm before clipping, in fp64, on the first replica's device. See also
            :attr:`grad_norm`.

        Raises:
            RuntimeError: `error_if_nonfinite`, and the norm is infinite or NaN.
                Nothing has changed.
            ValueError: a `max_norm` that is negative or NaN.
        """
        return self._gradients.clip(max_norm, norm_type, error_if_nonfinite)

    @property
    def grad_norm(self) -> float | None:
        """The total norm of the last step's gradients before clipping.

        From :meth:`clip_grad_norm_` or, if it was not called, from the optimizer's
        :attr:`~torchkv.optim.StoreOptimizer.grad_norm`. None if neither was computed.
        Synchronizes with the norm's device.
        """
        if self._last_norm is not None:
            return float(self._last_norm)
        return self.optimizer.grad_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets the gradients of all replicas to None, or else fills them with zeros."""
        self._gradients.zero(self._parameters, set_to_none)

    def __repr__(self) -> str:
        """``Trainer(4 parameters, 2 replicas, AdamW(lr=0.001, ...))``."""
        counts = f"{len(self._parameters)} parameters, "
        counts += f"{len(self._embeddings)} embeddings, " * bool(self._embeddings)
        try:
            trained_by = repr(self.optimizer)
        except RuntimeError:  # of a closed store, or one with another updater
            trained_by = repr(self._store)
        return f"Trainer({counts}{self._num_replicas} replicas, {trained_by})"

    # -- the parts of a step

    def _check_local(self, op: str) -> None:
        if self._update_on_kvstore and not self._is_alone:
            raise RuntimeError(
                f"{op}: the optimizer runs on the store; call step(), or set "
                "update_on_kvstore=False when creating the trainer"
            )

    def _step(self, op: str, size: float, ignore_stale: bool, reduces: bool) -> None:
        """Pushes the gradients, between the step hooks, and forgets them."""
        stepped: list[StoreKey] = []

        def push() -> None:
            # Read here, as hooks before the step may replace them.
            gradients = self._gradients.fresh(op, ignore_stale)
            if reduces:
                self._gradients.reduce(gradients)
            if gradients:
                stepped.extend(self._push(gradients, size))

        self.optimizer.step(Push(push))
        self._weights.copy_written(stepped)
        self._gradients.zero(self._parameters)

    def _push(
        self, gradients: dict[StoreKey, list[Tensor]], size: float
    ) -> list[StoreKey]:
        """Steps with gradients; returns the keys of the parameters that got weights."""
        keys = [*gradients]
        dense = [key for key in keys if key not in self._embeddings]
        optimizer = self.optimizer
        self._weights.store_changed(dense)
        norm = self._gradients.norm_before_clipping(gradients)
        pushed = list(gradients.values())
        if not self._update_on_kvstore:
            pushed = [copies[:1] for copies in pushed]
        scale = self._rescale.by(optimizer, size)
        if scale != 1:
            pushed = [scaled(copies, scale) for copies in pushed]
        weights = [self._parameters[key] for key in dense]
        num_skipped = optimizer.num_skipped
        # All in one push, so that max_norm clips by the norm of all.
        if len(dense) == len(keys):
            self._store.pushpull(keys, pushed, weights)
        else:
            self._store.push(keys, pushed)
            if dense:
                self._store.pull(dense, weights)
        self._weights.note_written(dense)
        if optimizer.num_skipped == num_skipped:
            self._last_norm = norm
        return dense

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles without what other trainers have to do with it."""
        return {k: v for k, v in self.__dict__.items() if k != "_ownership"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Declares the parameters to the copy's optimizer, as the constructor does."""
        self.__dict__.update(state)
        names = dict.fromkeys([*self._parameters, *self._embeddings.keys()])
        self.optimizer._know(names, self.zero_grad)
        self._ownership = Ownership(self._parameters)
