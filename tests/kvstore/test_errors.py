"""Every refusal: a table of calls, each of which must change nothing at all.

A row is (id, call, exception, message). The call gets a Scene; after it, every stored
value, every key and every tensor of the caller must have the bits it had before.
"""

import functools
import unittest.mock

import numpy as np
import pytest
import torch

import torchkv
from error_scene import (
    BadIndex,
    Coroutine,
    Scene,
    Wrapper,
    async_generator,
    coroutine,
    fake,
    generator,
    nested,
    overlapping,
    quantized,
    shrunk,
    shrunk_columns,
    shrunk_view,
    sparse,
    without_key,
    without_memory,
    zero_tensor,
)
from helpers import (
    AddStr,
    add_input,
    bits,
    check_in_child,
    full,
    in_child,
    outcome,
    script,
)

BOTH_KINDS = "(?s)(int.*str|str.*int)"

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


def expected(op, key=None):
    """The form of every message: op, what was expected, what came, and the key."""
    tail = "" if key is None else rf".*\(key {key}\)"
    return rf"(?s)^{op}: expected .+, but got .+{tail}"


# fmt: off
KEYS = [
    ("float key", lambda s: s.kv.push(3.0, s.good), TypeError, expected("push")),
    ("bool key", lambda s: s.kv.init(True, s.good), TypeError, expected("init")),
    ("numpy bool key", lambda s: s.kv.pull(np.True_), TypeError, expected("pull")),
    ("None key", lambda s: s.kv.init(None, s.good), TypeError, expected("init")),
    ("bytes key", lambda s: s.named.pull(b"w"), TypeError, expected("pull")),
    ("dict key", lambda s: s.kv.push({}, s.good), TypeError, expected("push")),
    ("set of keys", lambda s: s.kv.pull({3, 5}), TypeError, expected("pull")),
    ("object key", lambda s: s.kv.pull(object()), TypeError, expected("pull")),
    ("numpy float key", lambda s: s.kv.pull(np.float64(3)), TypeError,
     expected("pull")),
    ("range of keys", lambda s: s.kv.pull(range(3, 5)), TypeError, expected("pull")),
    ("array of keys", lambda s: s.kv.pull(np.array([3, 5])), TypeError, None),
    ("__index__ raises", lambda s: s.kv.pull(BadIndex()), ZeroDivisionError, "boom"),
    ("key in a key", lambda s: s.kv.pull([3, [5]]), (TypeError, ValueError),
     expected("pull")),
    ("last key is a float", lambda s: s.kv.push([3, 5.0], [s.good] * 2), TypeError,
     expected("push")),
    ("key over 64 bits", lambda s: s.kv.push(2**63, s.good), ValueError,
     expected("push")),
    ("key under 64 bits", lambda s: s.kv.init(-(2**63) - 1, s.good), ValueError,
     expected("init")),
    ("huge key", lambda s: s.kv.pull([3, 10**100]), ValueError, expected("pull")),
    ("huge numpy key", lambda s: s.kv.pull(np.uint64(2**63)), ValueError,
     expected("pull")),
    ("key of more digits than Python prints", lambda s: s.kv.push(10**5000, s.good),
     ValueError, expected("push")),
    ("key far under 64 bits", lambda s: s.kv.delete([3, -(10**5000)]), ValueError,
     expected("delete")),
    ("key with a lone surrogate", lambda s: s.named.pull("\ud800"), ValueError,
     expected("pull")),
    ("lone surrogate in a list", lambda s: s.named.init(["v", "a\udfff"], [s.good] * 2),
     ValueError, expected("init")),
    ("is a lone surrogate a key", lambda s: "\ud800" in s.named, ValueError,
     expected("in")),
    ("tensor of several keys", lambda s: s.kv.pull(torch.tensor([3, 5])), TypeError,
     expected("pull")),
    ("empty tensor as key", lambda s: s.kv.shape(torch.tensor([], dtype=torch.int64)),
     TypeError, expected("shape")),
    ("float tensor as key", lambda s: s.kv.push(torch.tensor(3.0), s.good), TypeError,
     expected("push")),
    ("bool tensor as key", lambda s: s.kv.push(torch.tensor(True), s.good), TypeError,
     expected("push")),
    ("uint64 tensor as key, too large",
     lambda s: s.kv.push(torch.tensor(2**63, dtype=torch.uint64), s.good), ValueError,
     "^push.*64 bits.*larger"),
    ("async_op=None", lambda s: s.kv.push(3, s.good, async_op=None), TypeError,
     "^push: expected True or False as async_op, but got NoneType"),
    ("async_op=1", lambda s: s.kv.pull(3, out=s.out, async_op=1), TypeError,
     "^pull: expected True or False as async_op, but got int"),
    ("async_op of pushpull", lambda s: s.kv.pushpull(3, s.good, async_op="no"),
     TypeError, "^pushpull: .*async_op, but got str"),
    ("async_op of broadcast",
     lambda s: s.kv.broadcast(9, s.good, s.out, async_op=None), TypeError,
     "^broadcast: .*async_op"),
    ("ignore_sparse=None", lambda s: s.kv.pull(3, out=s.out, ignore_sparse=None),
     TypeError, "^pull: .*ignore_sparse, but got NoneType"),
    ("priority=None", lambda s: s.kv.push(3, s.good, priority=None), TypeError,
     "^push: expected an int as priority, but got NoneType"),
    ("priority=1.5", lambda s: s.kv.push(3, s.good, priority=1.5), TypeError,
     "^push: .*priority, but got float"),
    ("priority=True", lambda s: s.kv.push(3, s.good, priority=True), TypeError,
     "^push: .*priority, but got bool"),
    ("priority of 65 bits", lambda s: s.kv.push(3, s.good, priority=2**64), ValueError,
     "^push: expected priority to fit in 64 bits, but got 18446744073709551616"),
    ("a key with NUL", lambda s: s.named.pull("a\0b"), KeyError,
     r"'a\\+x00b', which was never initialised.*\(key 'a\\+x00b'\)"),
    ("a key of 300 characters", lambda s: s.named.pull("x" * 300), KeyError,
     r"\(key 'x{98}\.\.\.x{99}'\)"),
    ("init of a long key, twice", lambda s: s.named.init(["k" * 500] * 2, [s.good] * 2),
     ValueError, r"\(key 'k{98}\.\.\.k{99}'\)$"),
    ("a store type with NUL", lambda s: torchkv.create("lo\0cal"), ValueError,
     r"but got 'lo\\x00cal'"),
    ("a store type with a lone surrogate", lambda s: torchkv.create("\ud800"),
     ValueError, "^create: expected a str that UTF-8 can encode"),
    ("str in a store of ints", lambda s: s.kv.push("w", s.good), TypeError,
     BOTH_KINDS),
    ("int in a store of strs", lambda s: s.named.pull(3), TypeError, BOTH_KINDS),
    ("init of the other kind", lambda s: s.named.init(3, s.good), TypeError,
     BOTH_KINDS),
    ("kinds mixed in a call", lambda s: s.kv.push([3, "w"], [s.good] * 2), TypeError,
     BOTH_KINDS),
    ("kinds mixed in an init", lambda s: s.kv.init([1, "w"], [s.good] * 2), TypeError,
     BOTH_KINDS),
    ("delete of the other kind", lambda s: s.kv.delete("w"), TypeError, BOTH_KINDS),
    ("init twice", lambda s: s.kv.init(3, s.good), ValueError, "^init.*3"),
    ("init of a str twice", lambda s: s.named.init("w", s.good), ValueError,
     "^init.*'w'"),
    ("init, last key known", lambda s: s.kv.init([1, 2, 3], [s.good] * 3), ValueError,
     "^init.*3"),
    ("key twice in an init", lambda s: s.kv.init([1, 1], [s.good] * 2), ValueError,
     "^init.*1"),
    ("push of an unknown key", lambda s: s.kv.push(9, s.good), KeyError,
     r"push.*9.*init\(9"),
    ("pull of an unknown key", lambda s: s.kv.pull(9, out=s.out), KeyError,
     r"pull.*9.*init\(9"),
    ("unknown str key", lambda s: s.named.pull("v"), KeyError, r"pull.*'v'.*init\('v'"),
    ("push, last key unknown", lambda s: s.kv.push([3, 5, 9], [s.good] * 3), KeyError,
     "9.*init"),
    ("pull, last key unknown", lambda s: s.kv.pull([3, 9], out=[s.out, s.out2]),
     KeyError, "9.*init"),
    ("pushpull, last key unknown",
     lambda s: s.kv.pushpull([3, 9], [s.good, s.other], out=[s.out, s.out2]),
     KeyError, "9.*init"),
    ("delete of an unknown key", lambda s: s.kv.delete([3, 9]), KeyError, "9"),
    ("shape of an unknown key", lambda s: s.kv.shape(9), KeyError, "9"),
    ("dtype of an unknown key", lambda s: s.kv.dtype(9), KeyError, "9"),
    ("shape of a float key", lambda s: s.kv.shape(3.0), TypeError, None),
    ("broadcast of a known key", lambda s: s.kv.broadcast(3, s.good, s.out),
     ValueError, "3"),
]

VALUES = [
    ("None value", lambda s: s.kv.push(3, None), TypeError, expected("push", 3)),
    ("numpy value", lambda s: s.kv.push(3, np.ones((2, 3))), TypeError,
     expected("push", 3)),
    ("number as value", lambda s: s.kv.push(3, 1.0), TypeError, expected("push", 3)),
    ("str as value", lambda s: s.kv.push(3, "ab"), TypeError, expected("push", 3)),
    ("dict as value", lambda s: s.kv.push(3, {0: s.good}), TypeError,
     expected("push", 3)),
    ("generator as value", lambda s: s.kv.push(3, (x for x in [s.good])), TypeError,
     expected("push", 3)),
    ("None among replicas", lambda s: s.kv.push(3, [s.good, None]), TypeError,
     expected("push", 3)),
    ("numpy for the last key", lambda s: s.kv.push([3, 5], [s.good, np.ones((2, 3))]),
     TypeError, expected("push", 5)),
    ("init with None", lambda s: s.kv.init(1, None), TypeError, expected("init", 1)),
    ("init with numpy", lambda s: s.named.init("v", np.ones(3)), TypeError,
     expected("init", "'v'")),
    ("wrong shape", lambda s: s.kv.push(3, s.wide), ValueError, expected("push", 3)),
    ("shape that would broadcast", lambda s: s.kv.push(3, torch.ones(3)), ValueError,
     expected("push", 3)),
    ("shape of equal size", lambda s: s.kv.push(3, s.flat), ValueError,
     expected("push", 3)),
    ("scalar for a matrix", lambda s: s.kv.push(3, torch.tensor(1.0)), ValueError,
     expected("push", 3)),
    ("wrong shape of a replica", lambda s: s.kv.push(3, [s.good, s.wide]), ValueError,
     expected("push", 3)),
    ("wrong shape of a str key", lambda s: s.named.push("w", s.wide), ValueError,
     expected("push", "'w'")),
    ("wrong shape of the last key",
     lambda s: s.kv.push([3, 5], [[s.good, s.good], [s.good, s.wide]]), ValueError,
     expected("push", 5)),
    ("wrong shape at a repeated key", lambda s: s.kv.push([3, 3], [s.good, s.wide]),
     ValueError, expected("push", 3)),
    ("float into int", lambda s: s.kv.push(7, s.good), TypeError, expected("push", 7)),
    ("complex into float", lambda s: s.kv.push(3, s.good + 1j), TypeError,
     expected("push", 3)),
    ("one replica of a wrong dtype", lambda s: s.kv.push(7, [s.ints, s.good]),
     TypeError, expected("push", 7)),
    ("wrong dtype of the last key", lambda s: s.kv.push([3, 7], [s.good, s.other]),
     TypeError, expected("push", 7)),
    ("no keys", lambda s: s.kv.push([], []), ValueError, expected("push")),
    ("no keys in init", lambda s: s.kv.init((), ()), ValueError, expected("init")),
    ("no keys in pull", lambda s: s.kv.pull([]), ValueError, expected("pull")),
    ("no keys in delete", lambda s: s.kv.delete([]), ValueError, expected("delete")),
    ("no values", lambda s: s.kv.push(3, []), ValueError, expected("push")),
    ("no values for a list", lambda s: s.kv.push([3, 5], []), ValueError,
     expected("push")),
    ("no replicas for the last key", lambda s: s.kv.push([3, 5], [[s.good], []]),
     ValueError, expected("push", 5)),
    ("too few values", lambda s: s.kv.push([3, 5], [s.good]), ValueError,
     expected("push")),
    ("too many values", lambda s: s.kv.push([3, 5], [s.good] * 3), ValueError,
     expected("push")),
    ("one tensor for two keys", lambda s: s.kv.push([3, 5], s.good),
     (TypeError, ValueError), expected("push")),
    ("two values in an init", lambda s: s.kv.init(1, [s.good, s.other]), ValueError,
     expected("init", 1)),
    ("two values for a key of init",
     lambda s: s.kv.init([1, 2], [[s.good], [s.good, s.other]]), ValueError,
     expected("init", 2)),
    ("empty list in an init", lambda s: s.kv.init(1, []), ValueError,
     expected("init")),
    ("too few values in init", lambda s: s.kv.init([1, 2], [s.good]), ValueError,
     expected("init")),
    ("last value of init is bad", lambda s: s.kv.init([1, 2], [s.good, 5]), TypeError,
     expected("init", 2)),
    ("unequal kinds", lambda s: s.kv.push([3, 5], [s.good, [s.good]]), ValueError,
     expected("push")),
    ("unequal kinds, list first", lambda s: s.kv.push([3, 5], [[s.good], s.good]),
     ValueError, expected("push")),
    ("nested for one key", lambda s: s.kv.push(3, [[s.good]]), ValueError,
     expected("push")),
    ("nested too deep", lambda s: s.kv.push([3, 5], [[[s.good]], [[s.good]]]),
     ValueError, expected("push")),
    ("value without memory", lambda s: s.kv.push(3, without_memory()), ValueError,
     expected("push", 3)),
    ("value whose storage was shrunk", lambda s: s.kv.push(3, shrunk()), ValueError,
     "^push: .*at least 24 bytes.*resized to 20 bytes .*key 3"),
    ("replica whose storage was shrunk",
     lambda s: s.kv.push([5, 3], [[s.good], [s.good, shrunk()]]), ValueError,
     "^push: .*at least 24 bytes"),
    ("view whose storage was shrunk", lambda s: s.kv.push(3, shrunk_view()), ValueError,
     "^push: .*at least 48 bytes.*resized to 24 bytes"),
    ("columns whose storage was shrunk", lambda s: s.kv.push(3, shrunk_columns()),
     ValueError, "^push: .*at least 40 bytes"),
    ("init of a shrunk storage", lambda s: s.kv.init(1, shrunk()), ValueError,
     "^init: .*at least 24 bytes.*key 1"),
    ("out whose storage was shrunk", lambda s: s.kv.pull(3, out=[s.out, shrunk()]),
     ValueError, "^pull: .*at least 24 bytes.*key 3"),
    ("pushpull into a shrunk storage",
     lambda s: s.kv.pushpull(3, s.good, out=shrunk()), ValueError,
     "^pushpull: .*at least 24 bytes"),
    ("init without memory", lambda s: s.kv.init(1, without_memory()), ValueError,
     expected("init", 1)),
    ("sparse value", lambda s: s.kv.push(3, sparse()), NotImplementedError,
     "(?i)sparse"),
    ("sparse init", lambda s: s.kv.init(1, sparse()), NotImplementedError,
     "(?i)sparse"),
    ("csr value", lambda s: s.kv.push(3, full(1).to_sparse_csr()),
     NotImplementedError, "(?i)sparse"),
    ("last value sparse", lambda s: s.kv.push([3, 5], [s.good, sparse()]),
     NotImplementedError, "(?i)sparse"),
    ("meta value", lambda s: s.kv.push(3, s.good.to("meta")), NotImplementedError,
     "meta"),
    ("meta init", lambda s: s.kv.init(1, s.good.to("meta")), NotImplementedError,
     "meta"),
    ("fake value", lambda s: s.kv.push(3, fake()), NotImplementedError, None),
    ("wrapper value", lambda s: s.kv.push(3, Wrapper(s.good)), NotImplementedError,
     None),
    ("wrapper init", lambda s: s.kv.init(1, Wrapper(s.good)), NotImplementedError,
     None),
    ("quantized value", lambda s: s.kv.push(3, quantized()), NotImplementedError,
     "(?i)quantized|qint8"),
    ("nested value", lambda s: s.kv.push(3, nested()), NotImplementedError, None),
    ("value under vmap",
     lambda s: torch.vmap(lambda x: s.kv.push(3, x))(torch.ones(4, 2, 3)),
     NotImplementedError, None),
    ("out under vmap",
     lambda s: torch.vmap(lambda x: s.kv.pull(3, out=[s.out, x]))(torch.ones(4, 2, 3)),
     NotImplementedError, None),
    ("value under torch.func.grad",
     lambda s: torch.func.grad(lambda x: s.kv.push(3, x))(s.good),
     NotImplementedError, None),
    ("mkldnn value", lambda s: s.kv.push(3, s.good.to_mkldnn()), NotImplementedError,
     "(?i)mkldnn"),
]

OUTS = [
    ("None among outs", lambda s: s.kv.pull(3, out=[s.out, None]), TypeError,
     expected("pull", 3)),
    ("numpy out", lambda s: s.kv.pull(3, out=np.ones((2, 3))), TypeError,
     expected("pull", 3)),
    ("no outs", lambda s: s.kv.pull(3, out=[]), ValueError, expected("pull")),
    ("too few outs", lambda s: s.kv.pull([3, 5], out=[s.out]), ValueError,
     expected("pull")),
    ("out of a wrong shape", lambda s: s.kv.pull(3, out=s.wide), ValueError,
     expected("pull", 3)),
    ("last out of a wrong shape", lambda s: s.kv.pull(3, out=[s.out, s.flat]),
     ValueError, expected("pull", 3)),
    ("out of the last key wrong", lambda s: s.kv.pull([3, 5], out=[s.out, s.wide]),
     ValueError, expected("pull", 5)),
    ("float into an int out", lambda s: s.kv.pull([3, 5], out=[s.out, s.ints]),
     TypeError, expected("pull", 5)),
    ("int into a bool out", lambda s: s.kv.pull(7, out=s.booleans), TypeError,
     expected("pull", 7)),
    ("unequal outs", lambda s: s.kv.pull([3, 5], out=[s.out, [s.out2]]), ValueError,
     expected("pull")),
    ("outs nested too deep", lambda s: s.kv.pull(3, out=[[s.out]]), ValueError,
     expected("pull")),
    ("overlapping out", lambda s: s.kv.pull([3, 5], out=[s.out, overlapping()]),
     ValueError, expected("pull", 5)),
    ("out without memory", lambda s: s.kv.pull(3, out=[s.out, without_memory()]),
     ValueError, expected("pull", 3)),
    ("zero tensor as out", lambda s: s.kv.pull(3, out=[s.out, zero_tensor()]),
     ValueError, expected("pull", 3)),
    ("pushpull over a zero tensor",
     lambda s: s.kv.pushpull([3, 5], [s.good, zero_tensor()]), ValueError,
     expected("pushpull", 5)),
    ("sparse out", lambda s: s.kv.pull(3, out=[s.out, sparse()]),
     NotImplementedError, "(?i)sparse"),
    ("sparse out, not ignored",
     lambda s: s.kv.pull(3, out=[s.out, sparse()], ignore_sparse=False),
     NotImplementedError, "(?i)sparse"),
    ("meta out", lambda s: s.kv.pull(3, out=[s.out, s.out2.to("meta")]),
     NotImplementedError, "meta"),
    ("wrapper out", lambda s: s.kv.pull(3, out=[s.out, Wrapper(s.out2)]),
     NotImplementedError, None),
    ("pushpull, bad value", lambda s: s.kv.pushpull(3, s.wide, out=s.out), ValueError,
     expected("pushpull", 3)),
    ("pushpull, bad out", lambda s: s.kv.pushpull(3, s.good, out=s.wide), ValueError,
     expected("pushpull", 3)),
    ("pushpull, last out bad",
     lambda s: s.kv.pushpull([3, 5], [s.good, s.other], out=[s.out, s.ints]),
     TypeError, expected("pushpull", 5)),
    ("pushpull over a value too narrow", lambda s: s.kv.pushpull(7, s.booleans),
     TypeError, expected("pushpull", 7)),
    ("pushpull over an overlapping value",
     lambda s: s.kv.pushpull([3, 5], [s.good, overlapping()]), ValueError,
     expected("pushpull", 5)),
    ("broadcast, bad out", lambda s: s.kv.broadcast(1, s.good, s.wide), ValueError,
     expected("broadcast", 1)),
    ("broadcast, last out bad",
     lambda s: s.kv.broadcast([1, 2], [s.good] * 2, [s.out, s.ints]), TypeError,
     expected("broadcast", 2)),
    ("broadcast without out", lambda s: s.kv.broadcast(1, s.good, None), TypeError,
     "broadcast"),
]

def with_optimizer(scene):
    """The scene's store of int keys, one of them of an int dtype."""
    scene.kv.set_optimizer("sgd", learning_rate=0.5, wd=0.5)
    return scene.kv


OPTIMIZER = [
    *((f"optimizer {name!r}", lambda s, name=name: s.kv.set_optimizer(name),
       ValueError, r"^set_optimizer: expected .*'sgd'.*, but got '" + name + "'")
      for name in ("", "SGDD", "sgd ", "adamm", "größe")),
    *((f"{option} of {number}",
       lambda s, option=option, number=number: s.kv.set_optimizer(
           "sgd", **{option: number}),
       ValueError, rf"^SGD: expected .*{text}.*, but got {number}")
      for option, text in (("learning_rate", "learning rate"), ("wd", "weight decay"))
      for number in (-0.5, -1e-300, float("nan"), float("inf"), float("-inf"))),
    ("optimizer that is no str", lambda s: s.kv.set_optimizer(None), TypeError, None),
    ("learning rate that is no number",
     lambda s: s.kv.set_optimizer("sgd", learning_rate="fast"), TypeError, None),
    ("learning rate without its name", lambda s: s.kv.set_optimizer("sgd", 0.1),
     TypeError, "positional"),
    ("no such option of an optimizer",
     lambda s: s.kv.set_optimizer("sgd", beta1=0.9), ValueError, "beta1"),
    ("optimizer and an int key",
     lambda s: with_optimizer(s).push(7, s.ints), TypeError, expected("push", 7)),
    ("optimizer and an int key, last",
     lambda s: with_optimizer(s).push([3, 7, 5], [s.good, s.ints, s.good]), TypeError,
     expected("push", 7)),
    ("optimizer and an int key, in a pushpull",
     lambda s: with_optimizer(s).pushpull(
         [3, 7], [s.good, s.ints], out=[s.out, s.ints]), TypeError,
     expected("pushpull", 7)),
    ("optimizer and an int key, pushpull over the value",
     lambda s: with_optimizer(s).pushpull([3, 7], [s.good, s.ints]), TypeError,
     expected("pushpull", 7)),
    ("TorchScript: optimizer and an int key",
     lambda s: with_optimizer(s).script_object.push([3, 7], [s.good, s.ints]),
     TypeError, expected("push", 7)),
    ("TorchScript: unknown optimizer",
     lambda s: s.kv.script_object.set_optimizer("adamm", {}), ValueError,
     "set_optimizer: unknown optimizer 'adamm'; expected one of .*did you mean 'adam"),
    ("TorchScript: negative weight decay",
     lambda s: s.kv.script_object.set_optimizer("sgd", {"weight_decay": -1.0}),
     ValueError,
     expected("set_optimizer")),
]

REST = [
    ("updater is no callable", lambda s: s.kv.set_updater(5), TypeError, "updater"),
    ("updater with a wrong signature",
     lambda s: s.kv.set_updater(script(without_key())), TypeError,
     r"forward\(key: int, input: Tensor, stored: Tensor\)"),
    ("updater for the other kind of key",
     lambda s: s.kv.set_updater(script(AddStr())), TypeError,
     r"forward\(key: int, input: Tensor, stored: Tensor\)"),
    ("row_sparse_pull",
     lambda s: s.kv.row_sparse_pull(3, out=s.out, row_ids=torch.tensor([0])),
     NotImplementedError, "row_sparse_pull"),
    ("compression", lambda s: s.kv.set_gradient_compression({"type": "2bit"}),
     NotImplementedError, "compression"),
    ("priority of a wrong type", lambda s: s.kv.push(3, s.good, priority="high"),
     TypeError, None),
    ("unknown capability", lambda s: s.kv.is_capable("Optimizer"), ValueError,
     "optimizer"),
    ("no such argument", lambda s: s.kv.push(3, s.good, nonsense=1), TypeError,
     "nonsense"),
    ("foreign script object", lambda s: torchkv.KVStore.from_script_object(s.good),
     TypeError, None),
    ("coroutine function as updater", lambda s: s.kv.set_updater(coroutine),
     TypeError, expected("set_updater")),
    ("generator function as updater", lambda s: s.kv.set_updater(generator),
     TypeError, expected("set_updater")),
    ("async generator function as updater",
     lambda s: s.kv.set_updater(async_generator), TypeError, expected("set_updater")),
    ("coroutine method as updater", lambda s: s.kv.set_updater(Coroutine().update),
     TypeError, expected("set_updater")),
    ("partial coroutine function as updater",
     lambda s: s.kv.set_updater(functools.partial(coroutine)), TypeError,
     expected("set_updater")),
    ("TorchScript: unknown key", lambda s: s.kv.script_object.push(9, s.good),
     IndexError, "9.*init"),
    ("TorchScript: last key bad",
     lambda s: s.kv.script_object.push([3, 5], [s.good, s.wide]), ValueError,
     expected("push", 5)),
    ("TorchScript: other kind", lambda s: s.kv.script_object.pull("w"), TypeError,
     BOTH_KINDS),
    ("TorchScript: bad out", lambda s: s.kv.script_object.pull(3, s.ints), TypeError,
     expected("pull", 3)),
]
# fmt: on

ROWS = KEYS + VALUES + OUTS + OPTIMIZER + REST
UPDATERS = ["assign", "python"]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [row[1:] for row in ROWS],
    ids=[row[0] for row in ROWS],
)
def test_a_refused_call_changes_nothing(store_type, call, error, message):
    for updater in UPDATERS:
        scene = Scene(store_type)
        if updater == "python":
            scene.kv.set_updater(scene.update)
        before = scene.everything()
        with pytest.raises(error, match=message):
            call(scene)
        assert scene.everything() == before
        scene.kv.set_updater(add_input)
        scene.kv.push([3, 5], [[full(1), full(2)]] * 2)
        assert bits(scene.kv.pull(5)) == bits(full(8)), "the store is usable"


def test_the_table_is_long_enough_and_has_no_two_rows_of_one_name():
    names = [row[0] for row in ROWS]
    assert len(names) >= 50 and len(set(names)) == len(names)


@pytest.mark.parametrize("op", ["init", "push", "pull"])
def test_a_tensor_under_functionalization_is_refused(store_type, op):
    def attempt():
        scene = Scene(store_type)
        wrapped = torch._to_functional_tensor(full(1))
        calls = {
            "init": lambda: scene.kv.init(1, wrapped),
            "push": lambda: scene.kv.push(3, wrapped),
            "pull": lambda: scene.kv.pull(3, out=wrapped),
        }
        return outcome(calls[op])

    # In a child, so that a crash is one failed test.
    assert in_child(attempt).startswith("NotImplementedError")


MOCKED = {
    "value": lambda s, mock: s.kv.push(3, mock),
    "replica": lambda s, mock: s.kv.push(3, [s.good, mock]),
    "value of a key": lambda s, mock: s.kv.push([3, 5], [s.good, mock]),
    "replica of a key": lambda s, mock: s.kv.push([3, 5], [[s.good], [mock]]),
    "first value": lambda s, mock: s.kv.init(1, mock),
    "out": lambda s, mock: s.kv.pull(3, out=mock),
    "one of the outs": lambda s, mock: s.kv.pull(3, out=[s.out, mock]),
    "out of a key": lambda s, mock: s.kv.pull([3, 5], out=[s.out, mock]),
    "pushpull": lambda s, mock: s.kv.pushpull(3, mock),
    "broadcast": lambda s, mock: s.kv.broadcast(1, s.good, mock),
    "key": lambda s, mock: s.kv.pull(mock),
}


@pytest.mark.parametrize("place", MOCKED)
def test_a_mock_of_a_tensor_is_no_tensor(store_type, place):
    """Even where isinstance says that it is one."""

    def body():
        scene = Scene(store_type)
        before = scene.everything()
        for subclass in (torch.Tensor, torch.nn.Parameter):
            mock = unittest.mock.Mock(spec=subclass)
            assert isinstance(mock, subclass)
            with pytest.raises(TypeError, match="expected a"):
                MOCKED[place](scene, mock)
        assert scene.everything() == before

    # In a child, so that a crash is one failed test.
    check_in_child(body)
