"""Any class of torch.optim as the updater of a store.

Each key has its own instance with one parameter, whose data is the stored value while
an update runs. So the results are those of the class itself.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import math
import pickle
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from torchkv import _C
from torchkv.arguments import StoreKey, as_number, near, shown
from torchkv.gathering import gather, others_told
from torchkv.optim.base import StoreOptimizer
from torchkv.optim.groups import Group, Settings


class TorchOptimizer(StoreOptimizer):
    """Runs a class of torch.optim on a store; ``set_optimizer`` makes it.

    It runs in Python, in the stored dtype, one key at a time, and never in two
    threads at once. A store that has one cannot be copied or pickled.
    """

    def __init__(self, optimizer: type[torch.optim.Optimizer], **options: Any) -> None:
        """Wraps a class.

        Args:
            optimizer: a subclass of :class:`torch.optim.Optimizer` whose ``step`` needs
                no closure.
            **options: its arguments, except the parameters.

        Raises:
            ValueError: it needs a closure or sparse gradients, or an invalid option.
            TypeError: an unknown option.
        """
        step = inspect.signature(optimizer.step).parameters
        closure = step.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                "set_optimizer: expected an optimizer that steps from gradients alone, "
                f"but got {optimizer.__name__}, which needs a closure"
            )
        if issubclass(optimizer, torch.optim.SparseAdam):
            raise ValueError(
                "set_optimizer: expected an optimizer of dense gradients, but got "
                f"{optimizer.__name__}, which only supports sparse ones"
            )
        self._class = optimizer
        signature = inspect.signature(optimizer.__init__).parameters
        self._arguments = [name for name in signature if name not in ("self", "params")]
        if not any(x.kind is x.VAR_KEYWORD for x in signature.values()):
            for name in options:
                if name not in self._arguments:
                    raise TypeError(
                        f"set_optimizer: unexpected option {name!r} for "
                        f"{optimizer.__name__}{near(name, self._arguments)}"
                    )
        _check_numbers("set_optimizer", options)
        self._options = options
        # A push acquires it while its key's entry is locked, so nothing that waits for
        # an entry may be called while it is held.
        self._step_lock = threading.Lock()
        self._of_key: dict[StoreKey, torch.optim.Optimizer] = {}  # guarded by it
        super().__init__(self._instance(_model(), {}).defaults)
        self._in_effect = self._settings()  # replaced as a whole, as pushes read it

    def _name(self) -> str:
        return self._class.__name__

    def _instance(
        self, parameter: torch.Tensor, options: Mapping[str, Any]
    ) -> torch.optim.Optimizer:
        """An instance for one parameter; raises what the class raises."""
        make: Any = self._class
        known = {name: options[name] for name in self._arguments if name in options}
        with _cpu_by_default():
            result: torch.optim.Optimizer = make(
                [parameter], **{**self._options, **known}
            )
        result.param_groups[0].update(options)
        return result

    # -- the store

    def _is_set(self, current: Any) -> bool:
        return current is self

    def _enter(self, impl: _C.KVStore, settings: Settings) -> None:
        self._in_effect = settings
        impl.set_updater(self)
        self._impl = impl.weak()
        with self._step_lock:
            self._of_key = {}

    def _apply(self, settings: Settings) -> None:
        self._check_options(settings)
        self._in_effect = settings

    def _check_options(self, settings: Settings) -> None:
        for group in settings.groups:
            options = {name: group[name] for name in self.defaults}
            _check_numbers(self._name(), options)
            self._instance(_model(), options)  # raises what the class raises

    # A push of a store on several machines that has returned may not have been stepped:
    # it has the options of before.

    def _change(self, group: Group, changes: Mapping[str, Any]) -> None:
        self._settle()
        super()._change(group, changes)

    def _adopt(
        self, op: str, settings: Settings, names: Iterable[StoreKey] = ()
    ) -> None:
        self._settle()
        super()._adopt(op, settings, names)

    def _settle(self) -> None:
        if (impl := self._store()) is not None:
            impl.flush()

    def _options_of(self, key: StoreKey, settings: Settings) -> dict[str, Any]:
        groups, lr_mult, wd_mult = settings
        group = next((g for g in groups[1:] if key in g["keys"]), groups[0])
        options = {name: group[name] for name in self.defaults}
        for name, multipliers in (("lr", lr_mult), ("weight_decay", wd_mult)):
            if key in multipliers and name in options:
                options[name] = options[name] * multipliers[key]
        return options

    def __call__(
        self, key: StoreKey, input: torch.Tensor, stored: torch.Tensor
    ) -> None:
        """Steps a key; called by the store."""
        with self._step_lock:
            options = self._options_of(key, self._in_effect)
            instance = self._of_key.get(key)
            if instance is None:
                instance = self._instance(torch.nn.Parameter(stored), options)
                self._of_key[key] = instance
            parameter = instance.param_groups[0]["params"][0]
            instance.param_groups[0].update(options)
            try:
                parameter.data = stored
                parameter.grad = input
                with _cpu_by_default():
                    instance.step()
                is_same = instance.param_groups[0]["params"][0] is parameter
                if not (is_same and _memory_of(parameter) == _memory_of(stored)):
                    raise RuntimeError(
                        f"push: expected {self._name()}.step() to write the weight in "
                        "place, but it replaced the parameter or its data; write "
                        f"p.copy_(new) instead of p.data = new (key {shown(key)})"
                    )
            finally:
                # The memory is the store's: keep no reference to it.
                parameter.grad = None
                parameter.data = stored.new_empty(0)
                instance.param_groups[0]["params"] = [parameter]

    def forget(self, keys: Sequence[StoreKey]) -> None:
        """Drops the state of deleted keys."""
        with self._step_lock:
            for key in keys:
                self._of_key.pop(key, None)

    # -- state

    def _parts(self) -> dict[str, Any]:
        states: dict[StoreKey, dict[str, Any]] = {}
        impl = self._store()
        if impl is None:
            return {"state_names": (), "state": states}
        keys = impl.keys()
        own = self._begun_states(impl)
        states = {key: own.get(key, {}) for key in keys}
        names = tuple((key, tuple(state)) for key, state in states.items() if state)
        settings = self._settings()
        for key, state in states.items():
            if not state and not impl.is_row_sparse(key):  # whose rows it cannot step
                options = self._options_of(key, settings)
                states[key] = self._first_state(impl.pull(key, None, 0), options)
        return {"state_names": names, "state": states}

    def _begun_states(self, impl: _C.KVStore) -> dict[StoreKey, dict[str, Any]]:
        """Of the keys that have made a step, on any process."""
        if not impl.type.startswith("dist"):
            return self._own_states(impl)
        data = io.BytesIO()
        op = "state_dict"
        with others_told(impl):
            impl.begin_gather(op)
            try:
                torch.save(self._own_states(impl), data)
            except (AttributeError, pickle.PicklingError, TypeError) as error:
                raise self._no_plain_state(error) from error
            gathered = gather(impl, op, 0, data.getvalue(), to_all=True)
        parts = [self._unpacked(part) for part in gathered]
        return {key: state for part in parts for key, state in part.items()}

    def _own_states(self, impl: _C.KVStore) -> dict[StoreKey, dict[str, Any]]:
        """Of the keys that have made a step on this process."""
        held = {key for key in impl.keys() if impl.holds(key)}
        with self._step_lock:
            # state_dict() returns references.
            return {
                key: copy.deepcopy(instance.state_dict()["state"].get(0, {}))
                for key, instance in self._of_key.items()
                if key in held
            }

    def _unpacked(self, data: bytes) -> dict[StoreKey, dict[str, Any]]:
        try:
            part = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise self._no_plain_state(error) from error
        return dict(part)

    def _no_plain_state(self, error: Exception) -> TypeError:
        return TypeError(
            f"state_dict: expected a state of {self._name()} of tensors, numbers and "
            f"strings, which ranks give each other, but got another: {error}"
        )

    def _first_state(
        self, value: torch.Tensor, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The state that a first step creates; overwrites `value`."""
        try:
            model = torch.nn.Parameter(value)
            instance = self._instance(model, options)
            model.grad = torch.zeros_like(value)
            with _cpu_by_default():
                instance.step()
        except Exception:  # such values are not supported, which a push reports
            return {}
        state: dict[str, Any] = instance.state_dict()["state"].get(0, {})
        return state

    def _load(
        self, op: str, impl: _C.KVStore, settings: Settings, parts: Mapping[str, Any]
    ) -> Callable[[], None]:
        try:
            names_of = {key: {*names} for key, names in parts["state_names"]}
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                f"{op}: expected pairs of key and names as 'state_names', but got "
                f"{parts.get('state_names')!r}"
            ) from None
        settings.renamed(op, self._find_key(impl)).check(op, impl)
        self._check_options(settings)
        made: dict[StoreKey, torch.optim.Optimizer] = {}
        for key, state in parts["state"].items():
            if key not in names_of:
                continue
            if {*state} != names_of[key]:
                raise ValueError(
                    f"{op}: expected the state {_listed(names_of[key])} of "
                    f"{self._name()}, but got {_listed(state)} (key {shown(key)})"
                )
            if impl.type.startswith("dist"):
                shape, dtype = impl.shape(key), impl.dtype(key)
                value = torch.zeros(shape, dtype=dtype, device="cpu")
            else:
                value = impl.pull(key, None, 0)  # on its device
            loaded = self._loaded(op, key, value, settings, state)
            if impl.holds(key):
                made[key] = loaded

        def load() -> None:
            with self._step_lock:
                super(TorchOptimizer, self)._adopt(op, settings)
                for key in parts["state"]:
                    self._of_key.pop(key, None)
                self._of_key.update(made)
            impl.barrier()  # no push comes before

        return load

    def _loaded(
        self,
        op: str,
        key: StoreKey,
        value: torch.Tensor,
        settings: Settings,
        state: Mapping[str, Any],
    ) -> torch.optim.Optimizer:
        """An instance with a saved state, whose shapes must be those of a new state.

        The names may differ, as an option may have changed after the first step.
        """
        options = self._options_of(key, settings)
        parameter = torch.nn.Parameter(value)
        instance = self._instance(parameter, options)
        expected = self._first_state(value.clone(), options)
        for name in expected.keys() & state.keys():
            shapes = [getattr(x[name], "shape", None) for x in (expected, state)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"{op}: expected {name!r} of shape {shapes[0]}, but got shape "
                    f"{shapes[1]} (key {shown(key)})"
                )
        packed = instance.state_dict()
        packed["state"] = {0: copy.deepcopy(dict(state))}
        instance.load_state_dict(packed)
        # It casts states to the parameter's dtype. Some, as NAdam's mu_product, have
        # another.
        loaded = instance.state[parameter]
        for name in expected.keys() & state.keys():
            first, saved = expected[name], state[name]
            if isinstance(saved, torch.Tensor) and saved.dtype == first.dtype:
                loaded[name] = saved.to(loaded[name].device, copy=True)
        parameter.data = value.new_empty(0)
        return instance

    def __reduce__(self) -> NoReturn:
        """Not supported, as for any Python updater."""
        raise TypeError(
            "save: only optimizers of torchkv.optim can be copied, but got "
            f"{self._class.__module__}.{self._name()}; save its state_dict()"
        )


def _check_numbers(op: str, options: Mapping[str, Any]) -> None:
    """Rejects numbers that the classes accept, but fail on or step to NaN with."""
    for name, value in options.items():
        if name == "lr" and not isinstance(value, torch.Tensor):
            if not math.isfinite(as_number(op, name, value)):
                raise ValueError(f"{op}: expected a finite lr, but got {value!r}")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            if math.isnan(as_number(op, name, value)):
                raise ValueError(f"{op}: expected a number as {name}, but got nan")


def _model() -> torch.nn.Parameter:
    # Some classes only support matrices.
    return torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))


def _cpu_by_default() -> contextlib.AbstractContextManager[Any]:
    """Makes optimizers create counters on the CPU: the default may be ``meta``."""
    if torch.get_default_device().type == "cpu":
        return contextlib.nullcontext()
    return torch.device("cpu")


def _memory_of(x: torch.Tensor) -> tuple[Any, ...]:
    place = x.untyped_storage().data_ptr(), x.storage_offset(), x.shape, x.stride()
    return *place, x.dtype, x.is_neg(), x.is_conj()


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(map(repr, names))) or "nothing"
