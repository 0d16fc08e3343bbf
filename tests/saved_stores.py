"""What the tests of saved stores share."""

import json
import zlib
from pathlib import Path

import torch

import torchkv
from helpers import full

NUMBERS = {
    "sgd": {"lr": 0.5, "momentum": 0.5},
    "adam": {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8},
    "adagrad": {"lr": 0.1, "eps": 1e-10, "initial_accumulator_value": 0.5},
    "rmsprop": {"lr": 0.1, "alpha": 0.9, "eps": 1e-8, "centered": 1, "momentum": 0.5},
    "lion": {"lr": 0.1, "beta1": 0.9, "beta2": 0.99},
    "lamb": {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6},
}


def set_optimizer(store, name, options=None, gradient=None):
    # Below the Python class: what is saved is the C++ store's.
    groups = [NUMBERS[name], {**NUMBERS[name], "lr": 0.25}]
    gradient = {"accumulate": 1.0} if gradient is None else gradient
    store._impl.set_optimizer(name, groups, options or {}, gradient, False)


def everything(store):
    """A store as plain data; equal exactly when all of it is."""
    state = store.state_dict()
    for item in state["keys"].values():
        item["value"] = (item["value"].stride(), *_bits(item["value"]))
        item["state"] = {
            name: (tensor.stride(), *_bits(tensor))
            for name, tensor in item["state"].items()
        }
    del state["updater"]
    return list(state["keys"]), state


def _bits(tensor):
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), bytes(flat.tolist())


def trained(store_type="local", optimizer="adam", keys=(3, -5, 2**40), gradient=None):
    """A store whose keys have seen different numbers of steps."""
    store = torchkv.create(store_type)
    keys = list(keys)
    store.init(keys, [full(1), torch.arange(24.0).reshape(1, 2, 3, 4), full(2)])
    set_optimizer(store, optimizer, {keys[0]: (1, 2.0, 0.5)}, gradient)
    store.push(keys[:2], [full(3), torch.ones(1, 2, 3, 4)])
    store.push(keys[0], [full(1), full(2)])
    return store


def data_files(folder):
    return sorted(Path(folder).glob("data-*.safetensors"))


def rewritten(folder, change):
    """Changes the manifest and seals it again."""
    path = Path(folder, "manifest.json")
    manifest = json.loads(path.read_text())
    del manifest["crc32"]
    changed = change(manifest)
    rest = json.dumps(manifest if changed is None else changed).encode()[1:]
    path.write_bytes(b'{"crc32": "%08x",\n' % zlib.crc32(rest) + rest)
