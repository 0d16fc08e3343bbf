"""KVModel: a reference implementation of KVStore as a dict and a loop."""

import functools

import torch

# The accumulation type of every dtype that does not sum in itself.
OPMATH = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}


def wide_sum(values, dtype):
    """The sum in the accumulation type of `values` and a stored value of `dtype`."""
    wide = functools.reduce(torch.promote_types, [v.dtype for v in values], dtype)
    wide = OPMATH.get(wide, wide)
    total = values[0].to(wide)
    for value in values[1:]:
        total = total + value.to(wide)
    return total


def left_to_right(values, dtype):
    """The sum of `values` as the store must make it, rounded once to `dtype`."""
    if len(values) == 1:
        return values[0].to(dtype)
    return wide_sum(values, dtype).to(dtype)


def scaled(tensor, number):
    """tensor * number, a complex number as two real ones."""
    if tensor.is_complex():
        return torch.view_as_complex(torch.view_as_real(tensor) * number)
    return tensor * number


def kept(value):
    """What an optimizer keeps of a value, which is stored rounded: its master."""
    return value.to(OPMATH.get(value.dtype, value.dtype))


def sgd_step(values, weight, learning_rate, wd=0.0):
    """The result of pushing `values` to a stored `weight` with SGD."""
    gradient = wide_sum(values, weight.dtype).to(weight.dtype)
    if wd != 0:
        gradient = gradient + scaled(weight, wd)
    return weight - scaled(gradient, learning_rate)


def group(key, tensors):
    """{key: [tensors]} in the order in which the keys first appear."""
    if not isinstance(key, (list, tuple)):
        key, tensors = [key], [tensors]
    groups = {}
    for k, member in zip(key, tensors, strict=True):
        members = member if isinstance(member, (list, tuple)) else [member]
        groups.setdefault(k, []).extend(members)
    return groups


class KVModel:
    """Takes the argument forms of KVStore; checks nothing."""

    def __init__(self):
        self.stored = {}
        self.updater = None

    def init(self, key, value):
        for k, (tensor,) in group(key, value).items():
            self.stored[k] = tensor.detach().clone()

    def push(self, key, value):
        for k, values in group(key, value).items():
            merged = left_to_right([v.detach() for v in values], self.stored[k].dtype)
            if self.updater is None:
                self.stored[k] = merged.clone()
            else:
                self.updater(k, merged.clone(), self.stored[k])

    def pull(self, key, out=None):
        if out is None and isinstance(key, (list, tuple)):
            return [self.stored[k].clone() for k in key]
        if out is None:
            return self.stored[key].clone()
        for k, outs in group(key, out).items():
            for tensor in outs:
                tensor.detach().copy_(self.stored[k])

    def pushpull(self, key, value, out=None):
        self.push(key, value)
        self.pull(key, value if out is None else out)

    def broadcast(self, key, value, out):
        self.init(key, value)
        self.pull(key, out)

    def assign(self, key, value):
        for k, (tensor,) in group(key, value).items():
            self.stored[k] = tensor.detach().to(self.stored[k].dtype, copy=True)

    def delete(self, key):
        for k in key if isinstance(key, (list, tuple)) else [key]:
            del self.stored[k]
