"""A tour of the store in three parts: one key, a list of keys, type "device".

A torchkv store keeps tensors under keys. `push` passes it new values, an *updater*
applies them to the stored value, and `pull` copies the result out. Compare the output
with the code:

    python examples/local_push_pull.py
"""

import torch
from torch import Tensor

import torchkv

# Devices of the replicas. With GPUs use "cuda:0", "cuda:1" and so on; nothing else
# changes. Devices may be repeated, so this runs on any machine.
DEVICES = ["cpu", "cpu", "cpu", "cpu"]


def full(value: float, device: str = DEVICES[0]) -> Tensor:
    """Return a small tensor filled with `value`."""
    return torch.full((2, 3), float(value), device=device)


def show(what: str, tensor: Tensor) -> None:
    """Print a tensor with a caption."""
    print(f"{what}:\n{tensor}")


def add_twice(key: int, input: Tensor, stored: Tensor) -> None:
    """Apply `input`, the pushed value, to `stored` in place: an updater."""
    print(f"update on key: {key}")
    stored += input * 2


def one_key(store: torchkv.KVStore) -> None:
    """Part A: init, push and pull of one key, and what an updater does."""
    print("--- A. One key ---")
    a = torch.zeros(2, 3)

    # init stores the first value of a key; pull copies it into `out`.
    store.init(3, full(2))
    store.pull(3, out=a)
    show("after init with 2", a)

    # Without an updater, a push replaces the value.
    store.push(3, full(8))
    store.pull(3, out=a)
    show("after a push of 8", a)

    # Values from several devices are pushed together: they are summed first.
    store.push(3, [full(1, device) for device in DEVICES])
    store.pull(3, out=a)
    show("after a push of 1 from each of 4 devices", a)

    # From now on pushes call the updater. Setting it changes no value.
    store.set_updater(add_twice)
    store.pull(3, out=a)
    show("with the updater stored += input * 2", a)

    store.push(3, full(1))
    store.pull(3, out=a)
    show("after a push of 1", a)

    # One pull fills tensors on several devices.
    b = [full(1, device) for device in DEVICES]
    store.pull(3, out=b)
    for device, tensor in enumerate(b):
        show(f"pulled to device {device}", tensor)


def list_of_keys(store: torchkv.KVStore) -> None:
    """Part B: one call for many keys, such as all parameters of a model."""
    print("--- B. A list of keys ---")
    # One value per key. The updater of part A runs once per key, in this order.
    keys = [5, 7, 9]
    store.init(keys, [full(1)] * 3)
    store.push(keys, [full(1)] * 3)

    # The same tensor may receive several values; it keeps the last one.
    b = [full(0)] * 3
    store.pull(keys, out=b)
    show("b[1] after a push of 1 to every key", b[1])

    # With several devices, each key has a list of values, one per device.
    b = [[full(1, device) for device in DEVICES]] * 3
    store.push(keys, b)
    store.pull(keys, out=b)
    show("b[1][1] after a push of 1 from 4 devices to every key", b[1][1])


def add_hundredth(key: int, input: Tensor, stored: Tensor) -> None:
    """Take a small step, as an optimizer does: an updater."""
    stored += input * 0.01


def device_type(store: torchkv.KVStore) -> None:
    """Part C: the same calls on a store that sums on the devices."""
    print('--- C. Type "device" ---')
    a = torch.zeros(2, 3)
    store.init(3, full(-2))
    store.pull(3, out=a)
    show("after init with -2", a)

    store.push(3, full(-7))
    store.pull(3, out=a)
    show("after a push of -7", a)

    store.push(3, [full(1, device) for device in DEVICES[:3]])
    store.pull(3, out=a)
    show("after a push of 1 from each of 3 devices", a)

    # All four are pulled into one tensor, which keeps the last key's value.
    keys = [7, 11, 13, 17]
    store.init(keys, [full(-3)] * 4)
    store.pull(keys, out=[a] * 4)
    show("the last of four keys after init with -3", a)

    store.push(keys, [[full(-0.1, device) for device in DEVICES[:3]]] * 4)
    store.pull(keys, out=[a] * 4)
    show("the last of four keys after a push of -0.1 from 3 devices", a)

    # A pull never runs the updater; a push runs it once, on the sum.
    store.set_updater(add_hundredth)
    store.pull(3, out=a)
    show("key 3 with the updater stored += input * 0.01", a)

    store.push(3, full(5))
    store.pull(3, out=a)
    show("key 3 after a push of 5", a)


def main() -> None:
    """Run the parts in order."""
    with torchkv.create("local") as store:
        one_key(store)
        list_of_keys(store)
    with torchkv.create("device") as store:
        device_type(store)


if __name__ == "__main__":
    main()
