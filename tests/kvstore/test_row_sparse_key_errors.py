"""What row-sparse keys refuse, which changes nothing."""

import gc

import pytest
import torch

from helpers import assert_same, bits
from row_values import dense_of, row_ids_of, sparse
from torchkv import initializers, optim

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


@pytest.fixture
def kv(each_kv):
    return each_kv


SHAPE = (4, 3)


def scene(kv):
    kv.init([3, 5], [sparse([1, 2], torch.ones(2, 3), SHAPE), torch.ones(SHAPE)])
    kv.init_rows(7, (3,))


def content_of(kv):
    return bits(dense_of(kv)), row_ids_of(kv), bits(kv.pull(5)), kv.num_rows(7)


CALLS = {
    "init of two sparse dimensions": (
        lambda kv: kv.init(9, torch.ones(SHAPE).to_sparse()), ValueError,
        r"^init: expected .*one sparse dimension.* 2.*\(key 9\)"),
    "init with an id out of range": (
        lambda kv: kv.init(9, sparse([4], torch.ones(1, 3), SHAPE)), IndexError,
        r"^init: expected row ids from 0 to 3, but got 4 .*\(key 9\)"),
    "init of a shared sparse value": (
        lambda kv: kv.init(9, sparse([1], torch.ones(1, 3), SHAPE), share=True),
        NotImplementedError, r"^init: expected a dense tensor.*\(key 9\)"),
    "init without data": (
        lambda kv: kv.init(9, sparse([1], torch.ones(1, 3), SHAPE).to("meta")),
        NotImplementedError, r"^init: .*meta.*\(key 9\)"),
    "init again": (
        lambda kv: kv.init(3, sparse([1], torch.ones(1, 3), SHAPE)), ValueError,
        r"\(key 3\)"),
    "init_rows again": (lambda kv: kv.init_rows(3, (3,)), ValueError, r"\(key 3\)"),
    "init_rows with a str key": (
        lambda kv: kv.init_rows("a", (3,)), TypeError, "str"),
    "negative number of rows": (
        lambda kv: kv.init_rows(9, (3,), num_rows=-1), ValueError,
        r"^init_rows: expected sizes of at least 0.*\(key 9\)"),
    "negative size": (
        lambda kv: kv.init_rows(9, (3, -2)), ValueError, r"at least 0.*\(key 9\)"),
    "too many elements": (
        lambda kv: kv.init_rows(9, (3,), num_rows=2**62), ValueError,
        r"less than 2\^63 elements.*\(key 9\)"),
    "normal integers": (
        lambda kv: kv.init_rows(9, (3,), torch.int32, init=initializers.Normal()),
        ValueError, r"^init_rows: expected rows of dtype .*int32 \(key 9\)"),
    "a quantized dtype": (
        lambda kv: kv.init_rows(9, (3,), torch.qint8), NotImplementedError, "qint8"),
    "a number as row_shape": (
        lambda kv: kv.init_rows(9, 2), TypeError,
        "^init_rows: expected a shape, .* as row_shape, but got int"),
    "a float in row_shape": (
        lambda kv: kv.init_rows(9, (2.5,)), TypeError,
        "^init_rows: expected an int in row_shape, but got float"),
    "a bool as num_rows": (
        lambda kv: kv.init_rows(9, (2,), num_rows=True), TypeError,
        "^init_rows: expected an int in num_rows, but got bool"),
    "more rows than 64 bits count": (
        lambda kv: kv.init_rows(9, (2,), num_rows=2**63), ValueError,
        "^init_rows: expected num_rows to fit in 64 bits"),
    "a str as dtype": (
        lambda kv: kv.init_rows(9, (2,), "float32"), TypeError,
        "^init_rows: expected a torch.dtype as dtype, but got str"),
    "a str as init": (
        lambda kv: kv.init_rows(9, (3,), init="zeros"), TypeError,
        "^init_rows: expected one of torchkv.initializers as init, but got str"),
    "push of another shape": (
        lambda kv: kv.push([5, 3], [torch.zeros(SHAPE), torch.ones(5, 3)]), ValueError,
        r"^push: expected shape \[4, 3\], but got \[5, 3\] \(key 3\)"),
    "push of another sparse shape": (
        lambda kv: kv.push(3, sparse([1], torch.ones(1, 3), (5, 3))), ValueError,
        r"^push: expected shape \[4, 3\], but got \[5, 3\] \(key 3\)"),
    "push of other rows": (
        lambda kv: kv.push(7, sparse([1], torch.ones(1, 4), (5, 4))), ValueError,
        r"^push: expected rows of shape \[3\], .*\[5, 4\] \(key 7\)"),
    "dense push to unlimited rows": (
        lambda kv: kv.push(7, torch.ones(5, 3)), ValueError, r"expected shape .*key 7"),
    "push with an id out of range": (
        lambda kv: kv.push([5, 3], [torch.zeros(SHAPE),
                                    sparse([1, 4], torch.ones(2, 3), SHAPE)]),
        IndexError, r"^push: expected row ids from 0 to 3, but got 4 .*\(key 3\)"),
    "push of complex numbers": (
        lambda kv: kv.push(3, torch.ones(SHAPE, dtype=torch.cfloat)), TypeError,
        "complex64"),
    "push without data": (
        lambda kv: kv.push(3, torch.ones(SHAPE, device="meta")), NotImplementedError,
        r"meta .*key 3"),
    "delete with an id out of range": (
        lambda kv: kv.delete([3, 7], row_ids=[torch.tensor([1, -1]), torch.tensor(0)]),
        IndexError, r"^delete: expected row ids from 0 to 3, .*-1 \(key 3\)"),
    "delete with float ids": (
        lambda kv: kv.delete(3, row_ids=torch.tensor([1.0])), TypeError,
        r"^delete: expected row ids of dtype .*float32 \(key 3\)"),
    "delete of dense rows": (
        lambda kv: kv.delete([3, 5], row_ids=[torch.tensor([1])] * 2), ValueError,
        r"^delete: expected a row-sparse key.*\(key 5\)"),
    "delete with two lists": (
        lambda kv: kv.delete(3, row_ids=[torch.tensor([1])] * 2), ValueError,
        r"^delete: expected one tensor of row ids, .* 2 \(key 3\)"),
    "delete of an unknown key": (
        lambda kv: kv.delete(9, row_ids=torch.tensor([1])), KeyError, "key 9"),
    "assign of a sparse tensor to a dense key": (
        lambda kv: kv.assign([3, 5], [sparse([1], torch.zeros(1, 3), SHAPE)] * 2),
        NotImplementedError, r"^assign: expected a dense tensor.*\(key 5\)"),
    "assign of a shared value": (
        lambda kv: kv.assign(3, torch.ones(SHAPE), share=True), ValueError,
        r"^assign: expected a dense key.*\(key 3\)"),
    "pull into another shape": (
        lambda kv: kv.pull(3, out=torch.ones(5, 3)), ValueError, "expected shape"),
    "pull of unlimited rows": (
        lambda kv: kv.pull(7, out=torch.ones(5, 3)), ValueError, "expected shape"),
    "pushpull into its sparse value": (
        lambda kv: kv.pushpull(3, sparse([1], torch.ones(1, 3), SHAPE)),
        NotImplementedError, r"^pushpull: expected a dense tensor.*\(key 3\)"),
    "num_rows of a scalar": (
        lambda kv: (kv.init(9, torch.ones(())), kv.num_rows(9)), ValueError,
        r"^num_rows: .*without dimensions \(key 9\)"),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_refused_call_changes_nothing(kv, call):
    scene(kv)
    before = content_of(kv)
    act, kind, message = CALLS[call]
    with pytest.raises(kind, match=message):
        act(kv)
    assert (
        bits(dense_of(kv)),
        row_ids_of(kv),
        bits(kv.pull(5)),
        kv.num_rows(7),
    ) == before
    assert [key for key in kv.keys() if key != 9] == [3, 5, 7]


UPDATERS = {
    "python": lambda kv: kv.set_updater(lambda key, input, stored: stored.add_(input)),
    "torch.optim": lambda kv: kv.set_optimizer(torch.optim.SGD, lr=0.1),
    "lamb": lambda kv: kv.set_optimizer(optim.LAMB(lr=0.1)),
    "mxnet": lambda kv: kv.set_optimizer(optim.mxnet.LARS()),
}


@pytest.mark.parametrize("updater", UPDATERS)
def test_updaters_of_whole_values_are_refused(kv, updater):
    scene(kv)
    UPDATERS[updater](kv)
    before = bits(dense_of(kv)), bits(kv.pull(5))
    with pytest.raises(NotImplementedError, match=r"^push: .*row-sparse.*\(key 3\)"):
        kv.push([5, 3], [torch.ones(SHAPE), sparse([1], torch.ones(1, 3), SHAPE)])
    assert (bits(dense_of(kv)), bits(kv.pull(5))) == before
    kv.push(5, torch.ones(SHAPE))  # a dense key takes it


def test_integers_have_no_optimizer(kv):
    kv.init_rows(3, (3,), torch.int32, num_rows=4)
    kv.set_optimizer(optim.SGD(lr=0.1))
    with pytest.raises(TypeError, match="floating-point"):
        kv.push(3, sparse([1], torch.ones(1, 3, dtype=torch.int32), SHAPE))
    assert kv.num_rows(3) == 0


def test_nothing_is_kept_of_what_was_pushed(kv):
    kv.init_rows(3, (4,), num_rows=9)
    rows = torch.ones(2, 4)
    kv.push(3, sparse([1, 2], rows, (9, 4)))
    rows.zero_()
    gc.collect()
    assert dense_of(kv).sum() == 8
    pulled = kv.pull(3)
    pulled.values().zero_()
    kv.optimizer  # noqa: B018
    assert dense_of(kv).sum() == 8


@pytest.mark.cuda
def test_values_on_gpus(kv):
    kv.init_rows(3, (3,), num_rows=4)
    kv.push(3, sparse([1], torch.ones(1, 3), SHAPE).cuda())
    kv.push(3, [sparse([2], torch.ones(1, 3), SHAPE).cuda(), torch.ones(SHAPE)])
    assert_same(dense_of(kv)[:, 0], torch.tensor([1.0, 1, 2, 1]))
    assert kv.pull(3).device.type == "cpu"
    out = torch.ones(SHAPE, device="cuda")
    kv.pull(3, out=out)
    assert_same(out.cpu(), dense_of(kv))
    rows = kv.row_sparse_pull(3, row_ids=torch.tensor([1, 0], device="cuda"))
    assert_same(rows.cpu(), dense_of(kv)[[1, 0]])
