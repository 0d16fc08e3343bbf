"""A store inside a TorchScript module, which runs, saves and loads without Python.

The module below keeps the mean of every vector it has seen, label by label. The
means live in a torchkv store that the module holds; the updater that computes them is
one of its submodules. Python and TorchScript see the same store:

    python examples/torchscript_store.py
"""

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import torchkv


class RunningMean(nn.Module):
    """An updater that keeps the mean of all that was pushed to a key."""

    counts: dict[int, int]  # pushes per key; state of the updater, saved with it

    def __init__(self) -> None:
        """Start with no pushes seen."""
        super().__init__()
        self.counts = {}

    def forward(self, key: int, input: Tensor, stored: Tensor) -> None:
        """Move `stored`, the mean so far, towards `input`, in place."""
        count = self.counts.get(key, 0) + 1
        self.counts[key] = count
        stored.add_((input - stored) / count)


class LabelMeans(nn.Module):
    """Keeps the mean vector of every label in a store that it holds."""

    def __init__(self, store: torch.ScriptObject) -> None:
        """Hold `store`; the updater becomes its own in `prepare`."""
        super().__init__()
        self.store = store
        self.updater = RunningMean()

    @torch.jit.export
    def prepare(self, labels: list[int], size: int) -> None:
        """Make a key for every label, and the submodule the store's updater."""
        self.store.init(labels, [torch.zeros(size) for _ in labels])
        self.store.set_updater(self.updater)

    def forward(self, label: int, vector: Tensor) -> Tensor:
        """Take in a vector; return the mean of its label."""
        self.store.push(label, vector)
        mean = self.store.pull(label)
        # One pull serves one key and many, so TorchScript must be told which it was.
        assert isinstance(mean, Tensor)
        return mean


@contextmanager
def torchscript() -> Iterator[None]:
    """Silence torch's advice to move from TorchScript to torch.compile.

    That compiles for a Python caller; here the point is to need no Python.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*`torch\.jit\.\w+` is deprecated")
        yield


def main() -> None:
    """Script a module with a store, save it, load it, and go on."""
    # TorchScript holds a store by its script object: the same store, not a copy.
    store = torchkv.create("local")
    with torchscript():
        model = torch.jit.script(LabelMeans(store.script_object))

    model.prepare([3, 5], 2)
    print("label 3:", model(3, torch.tensor([1.0, 2.0])).tolist())
    print("label 3:", model(3, torch.tensor([3.0, 6.0])).tolist())
    print("label 5:", model(5, torch.tensor([7.0, 7.0])).tolist())
    print("seen from Python:", store, [mean.tolist() for mean in store.pull([3, 5])])

    # The file has the code, the values and the updater with its counts.
    with tempfile.TemporaryDirectory() as folder, torchscript():
        path = os.path.join(folder, "label_means.pt")
        torch.jit.save(model, path)
        loaded = torch.jit.load(path)

    # The loaded module goes on where the saved one was: this is its third vector.
    print("label 3, loaded:", loaded(3, torch.tensor([8.0, 10.0])).tolist())

    # It has a store of its own, which from_script_object gives to Python.
    loaded_store = torchkv.KVStore.from_script_object(loaded.store)
    print("in the loaded store:", loaded_store.pull(3).tolist())
    print("in the first store:", store.pull(3).tolist())

    # What Python pushes, the module sees, and the same updater takes it in.
    loaded_store.push(5, torch.tensor([1.0, 3.0]))
    print("label 5, loaded:", loaded(5, torch.tensor([10.0, 2.0])).tolist())

    # The first module goes on as well, to the same value as the loaded one.
    print("label 3, first:", model(3, torch.tensor([8.0, 10.0])).tolist())


if __name__ == "__main__":
    main()
