"""What the error table uses: a store, and arguments that it refuses."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torchkv
from helpers import bits, full, snapshot


class Wrapper(torch.Tensor):
    """A tensor whose data only its own __torch_dispatch__ knows."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("never called")


class BadIndex:
    def __index__(self):
        raise ZeroDivisionError("boom")


def without_memory():
    tensor = full(1)
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk(num_bytes=20, tensor=None):
    """A tensor whose storage was shrunk below what its sizes need."""
    tensor = full(1) if tensor is None else tensor
    tensor.untyped_storage().resize_(num_bytes)
    return tensor


def shrunk_view():
    """Its 24 bytes would fit, but at an offset past the end of the storage."""
    return shrunk(24, torch.zeros(4, 3)[2:])


def shrunk_columns():
    return shrunk(24, torch.zeros(3, 4).t()[:2])


def zero_tensor():
    """All zeros, without memory, as autograd makes them."""
    return torch._efficientzerotensor(2, 3)


def fake():
    with FakeTensorMode():
        return torch.ones(2, 3)


def overlapping():
    return torch.zeros(3).expand(2, 3)


class Scene:
    """A store of int keys, one of str keys, and valid and invalid arguments."""

    def __init__(self, store_type):
        self.kv = torchkv.create(store_type)
        self.kv.init([3, 5], [full(3), full(5)])
        self.kv.init(7, full(7, dtype=torch.int32))
        self.named = torchkv.create(store_type)
        self.named.init(["w", "b"], [full(1), full(2)])
        self.calls = []
        self.good, self.other = full(11), full(13)
        self.out, self.out2 = full(17), full(19)
        self.ints = full(23, dtype=torch.int32)
        self.wide = torch.ones(2, 4)
        self.flat = torch.ones(6)
        self.booleans = full(True, dtype=torch.bool)

    def update(self, key, input, stored):
        """Records the call: no refused call may reach an updater."""
        self.calls.append(key)

    def everything(self):
        mine = [t for t in vars(self).values() if isinstance(t, torch.Tensor)]
        return (
            snapshot(self.kv),
            snapshot(self.named),
            [(bits(tensor), tensor._version) for tensor in mine],
            list(self.calls),
        )


def sparse():
    return full(1).to_sparse()


def quantized():
    return torch.quantize_per_tensor(full(1), 0.1, 0, torch.qint8)


async def coroutine(key, input, stored):
    stored += input


def generator(key, input, stored):
    yield stored.add_(input)


async def async_generator(key, input, stored):
    yield stored.add_(input)


class Coroutine:
    async def update(self, key, input, stored):
        stored += input


def without_key():
    def update(input: torch.Tensor, stored: torch.Tensor):
        stored.add_(input)

    return update


def nested():
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
