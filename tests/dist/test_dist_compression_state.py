"""Compression and residuals of several processes: saved, loaded, resumed bit by bit."""

import pytest
import torch

import ranks
import torchkv
from compression_model import ALL
from ranks import outcome
from test_dist_compression import gradient
from torchkv import optim
from torchkv.compression import FP16, Int4, OneBit, TopK, TwoBit

KEYS = ["split", "small", "plain"]
SHAPES = [(1025, 31), (5, 7), (3,)]
GROUPS = [
    TwoBit(0.5),
    {"keys": ["small"], "type": Int4()},
    {"keys": ["plain"], "type": "none"},
]


def begin(kv, compression):
    kv.init(KEYS, [torch.zeros(shape) for shape in SHAPES])
    kv.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)
    kv.set_gradient_compression(compression)


def go_on(kv, steps, positions):
    for step in steps:
        kv.push(
            KEYS,
            [
                [gradient(shape, torch.float32, step, i) for i in positions]
                for shape in SHAPES
            ],
        )
    return kv.pull(KEYS)


def by_folder(kv, rank, path):
    kv.save(path / "store")
    other = torchkv.create("dist_sync")
    other.load(path / "store")
    return other


def by_state_dict(kv, rank, path):
    state = kv.state_dict()
    if rank == 0:
        torch.save(state, path / "state.pt")
    kv.barrier()
    other = torchkv.create("dist_sync")
    other.load_state_dict(torch.load(path / "state.pt", weights_only=True))
    return other


WAYS = {"folder": by_folder, "state_dict": by_state_dict}


def resume(rank, way, codecs, path):
    for number, codec in enumerate(codecs):
        folder = path / str(number)
        folder.mkdir(exist_ok=True)
        with torchkv.create("dist_sync") as kv:
            begin(kv, codec)
            go_on(kv, range(3), [rank])
            with WAYS[way](kv, rank, folder) as other:
                assert other.gradient_compression == kv.gradient_compression
                expected = go_on(kv, range(3, 6), [rank])
                found = go_on(other, range(3, 6), [rank])
                for one, two in zip(found, expected, strict=True):
                    assert torch.equal(one, two)
                other.barrier()
            kv.barrier()
    return True


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_training_continues_with_the_same_bits(way, num_ranks, tmp_path):
    assert all(ranks.run(resume, num_ranks, way, [*ALL, GROUPS], tmp_path))


def load(rank, path, steps):
    with torchkv.create("dist_sync") as kv:
        kv.load(path)
        found = go_on(kv, steps, [rank])
        kv.save(path)
        return found


@pytest.mark.parametrize("codec", [TwoBit(), TopK(ratio=0.1), Int4()], ids=str)
def test_between_one_machine_and_several(codec, tmp_path):
    """The residual of position i is that of rank i."""
    kv = torchkv.create("device")
    begin(kv, codec)
    go_on(kv, range(3), range(2))
    kv.save(tmp_path)
    on_ranks = ranks.run(load, 2, tmp_path, range(3, 6))
    expected = go_on(kv, range(3, 6), range(2))
    back = torchkv.load(tmp_path, type="device")
    assert back.gradient_compression == codec
    for found in [*on_ranks, back.pull(KEYS)]:
        for one, two in zip(found, expected, strict=True):
            assert torch.equal(one, two)
    expected = go_on(kv, range(6, 8), range(2))
    for one, two in zip(go_on(back, range(6, 8), range(2)), expected, strict=True):
        assert torch.equal(one, two)


def load_or_not(rank, path):
    with torchkv.create("dist_sync") as kv:
        kv.init("other", torch.ones(2))
        kv.set_gradient_compression(FP16())
        error = outcome(lambda: kv.load(path))
        return error, kv.keys(), kv.gradient_compression


@pytest.mark.parametrize(
    ("num_ranks", "fits"), [(1, False), (2, False), (3, True), (4, True)]
)
def test_more_ranks_load_but_not_fewer(num_ranks, fits, tmp_path):
    kv = torchkv.create("device")
    begin(kv, OneBit())
    go_on(kv, range(2), range(3))
    kv.save(tmp_path)
    for error, keys, compression in ranks.run(load_or_not, num_ranks, tmp_path):
        if fits:
            assert (error, keys, compression) == (None, KEYS, OneBit())
        else:
            assert error[0] in ("ValueError", "RemoteError")
            assert f"residuals of compression, 3, but got {num_ranks}" in error[1]
            assert (keys, compression) == (["other"], FP16())


def save_mixed(rank, path):
    """Rank 1 alone does not compress."""
    with torchkv.create("dist_sync") as kv:
        begin(kv, None if rank == 1 else TwoBit(0.5))
        go_on(kv, range(2), [rank])
        kv.save(path)
        state = kv.state_dict()
        return {key: item["residuals"] for key, item in state["keys"].items()}


def test_ranks_that_do_not_compress_have_zeros(tmp_path):
    found = ranks.run(save_mixed, 3, tmp_path)
    saved = torchkv.load(tmp_path, type="device").state_dict()["keys"]
    for key in KEYS:
        residuals = saved[key]["residuals"]
        assert [residual.any().item() for residual in residuals] == [True, False, True]
        for one, other in zip(found[0][key], residuals, strict=True):
            assert torch.equal(one, other)


def without_compression(rank, path):
    """A state without compression leaves that of the store; a folder replaces it."""
    with torchkv.create("dist_sync") as kv, torchkv.create("dist_sync") as plain:
        begin(kv, TwoBit(0.5))
        begin(plain, None)
        go_on(kv, range(2), [rank])
        go_on(plain, range(2), [rank])
        state = plain.state_dict()
        if rank == 0:
            torch.save(state, path / "state.pt")
        plain.save(path / "store")
        kv.load_state_dict(torch.load(path / "state.pt", weights_only=True))
        kept = kv.gradient_compression
        residuals = [item["residuals"] for item in kv.state_dict()["keys"].values()]
        kv.load(path / "store")
        return kept, kv.gradient_compression, residuals


def test_a_state_without_compression(tmp_path):
    for kept, replaced, residuals in ranks.run(without_compression, 2, tmp_path):
        assert (kept, replaced) == (TwoBit(0.5), None)
        assert not any(residuals)  # of no key


def resume_a_class_of_torch_optim(rank, path):
    def make():
        kv = torchkv.create("dist_sync")
        kv.set_optimizer(torch.optim.SGD, lr=0.5, momentum=0.5)
        kv.init(KEYS, [torch.zeros(shape) for shape in SHAPES])
        kv.set_gradient_compression(FP16())
        return kv

    with make() as kv, make() as other:
        kv.set_gradient_compression(TwoBit(0.5))
        go_on(kv, range(3), [rank])
        state = kv.state_dict()
        if rank == 0:
            item = state["keys"]["split"]  # the layout does not matter
            item["residuals"] = [x.mT.contiguous().mT for x in item["residuals"]]
            torch.save(state, path / "state.pt")
        expected = go_on(kv, range(3, 6), [rank])
        go_on(other, range(2), [rank])  # which the state replaces
        for loading in (kv, other):
            loading.load_state_dict(torch.load(path / "state.pt", weights_only=True))
            assert loading.gradient_compression == TwoBit(0.5)
            found = go_on(loading, range(3, 6), [rank])
            for one, two in zip(found, expected, strict=True):
                assert torch.equal(one, two)
    return True


def test_a_class_of_torch_optim(tmp_path):
    assert ranks.run(resume_a_class_of_torch_optim, 2, tmp_path) == [True, True]


def push_on_rank_1(rank, path):
    with torchkv.create("dist_async") as kv:
        kv.init("w", torch.zeros(3))
        kv.set_gradient_compression(TwoBit(0.5))
        if rank == 1:
            kv.push("w", torch.full((3,), 0.375))
        kv.barrier()
        kv.save(path)
        kv.load(path)
        if rank == 1:
            kv.push("w", torch.full((3,), 0.125))
        kv.barrier()
        return kv.pull("w").tolist()


def test_ranks_may_push_differently_often(tmp_path):
    assert ranks.run(push_on_rank_1, 2, tmp_path) == [[0.5] * 3] * 2


def skip(rank, path):
    with torchkv.create("dist_sync") as kv:
        kv.set_optimizer(optim.SGD(lr=1.0, skip_nonfinite=True))
        error = outcome(lambda: kv.load(path))
        return error


def test_what_dist_does_not_combine_does_not_load(tmp_path):
    kv = torchkv.create("device")
    begin(kv, OneBit())
    kv.set_optimizer(optim.SGD(lr=1.0, skip_nonfinite=True))
    kv.save(tmp_path)
    for error in ranks.run(skip, 2, tmp_path):
        assert "skip_nonfinite" in error[1]


def train_by_trainer(rank, path):
    def make():
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 32)
        return model, torchkv.Trainer(
            model,
            "adamw",
            {"learning_rate": 0.125},
            kvstore=torchkv.create("dist_sync"),
            compression_params={"type": "2bit", "threshold": 0.0025},
        )

    def steps(model, trainer, which):
        for step in which:
            inputs = gradient((16, 64), torch.float32, step, rank)
            model(inputs).square().mean().backward()
            trainer.step(1)
        return [parameter.detach().clone() for parameter in model.parameters()]

    model, trainer = make()
    other_model, other = make()
    steps(model, trainer, range(4))
    state = trainer.state_dict()
    if rank == 0:
        torch.save(state, path / "state.pt")
    trainer.kvstore.barrier()
    other.load_state_dict(torch.load(path / "state.pt", weights_only=True))
    pairs = zip(
        steps(model, trainer, range(4, 8)),
        steps(other_model, other, range(4, 8)),
        strict=True,
    )
    return all(torch.equal(one, two) for one, two in pairs)


def test_the_trainer(tmp_path):
    assert ranks.run(train_by_trainer, 2, tmp_path) == [True, True]
