"""A store inside a TorchScript module that runs, saves and loads without Python.

The module below keeps the mean of the vectors it has seen for each label. The means are
kept in a torchkv store, an attribute of the module; the updater that computes them is
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
    """An updater that keeps the mean of all values pushed to a key."""

    counts: dict[int, int]  # pushes per key; state of the updater, saved with it

    def __init__(self) -> None:
        """Start without any pushes."""
        super().__init__()
        self.counts = {}

    def forward(self, key: int, input: Tensor, stored: Tensor) -> None:
        """Update `stored`, the mean so far, with `input`, in place."""
        count = self.counts.get(key, 0) + 1
        self.counts[key] = count
        stored.add_((input - stored) / count)


class LabelMeans(nn.Module):
    """Keeps the mean vector of every label in a store."""

    def __init__(self, store: torch.ScriptObject) -> None:
        """Keep `store`; `prepare` sets its updater."""
        super().__init__()
        self.store = store
        self.updater = RunningMean()

    @torch.jit.export
    def prepare(self, labels: list[int], size: int) -> None:
        """Create a key per label, and set the submodule as the store's updater."""
        self.store.init(labels, [torch.zeros(size) for _ in labels])
        self.store.set_updater(self.updater)

    def forward(self, label: int, vector: Tensor) -> Tensor:
        """Add a vector; return the mean of its label."""
        self.store.push(label, vector)
        mean = self.store.pull(label)
        # pull returns a tensor or a list, so TorchScript needs a type refinement.
        assert isinstance(mean, Tensor)
        return mean


@contextmanager
def torchscript() -> Iterator[None]:
    """Ignore the deprecation warning of TorchScript, which recommends torch.compile.

    torch.compile needs Python at run time; this example does not.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*`torch\.jit\.\w+` is deprecated")
        yield


def main() -> None:
    """Script a module with a store, save it, load it, and continue."""
    # TorchScript accesses a store by its script object: the same store, not a copy.
    store = torchkv.create("local")
    with torchscript():
        model = torch.jit.script(LabelMeans(store.script_object))

    model.prepare([3, 5], 2)
    print("label 3:", model(3, torch.tensor([1.0, 2.0])).tolist())
    print("label 3:", model(3, torch.tensor([3.0, 6.0])).tolist())
    print("label 5:", model(5, torch.tensor([7.0, 7.0])).tolist())
    print("seen from Python:", [mean.tolist() for mean in store.pull([3, 5])])

    # The file contains the code, the values and the updater with its counts.
    with tempfile.TemporaryDirectory() as folder, torchscript():
        path = os.path.join(folder, "label_means.pt")
        torch.jit.save(model, path)
        loaded = torch.jit.load(path)

    # The loaded module continues from the saved state: this is its third vector.
    print("label 3, loaded:", loaded(3, torch.tensor([8.0, 10.0])).tolist())

    # It has its own store, which from_script_object makes available in Python.
    loaded_store = torchkv.KVStore.from_script_object(loaded.store)
    print("in the loaded store:", loaded_store.pull(3).tolist())
    print("in the first store:", store.pull(3).tolist())

    # A push from Python uses the same updater, and the module sees the result.
    loaded_store.push(5, torch.tensor([1.0, 3.0]))
    print("label 5, loaded:", loaded(5, torch.tensor([10.0, 2.0])).tolist())

    # The first module reaches the same value as the loaded one.
    print("label 3, first:", model(3, torch.tensor([8.0, 10.0])).tolist())


if __name__ == "__main__":
    main()
