"""What the tables "The Trainer" and "Parameters" of from_mxnet.md say, row by row."""

import hashlib
import os

import pytest
import torch

import torchkv
from tables import RowTests

row = RowTests("The Trainer", "Parameters")


def one_weight(value=1.0):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return model


def trainer_of(model, **options):
    return torchkv.Trainer(model, "sgd", {"learning_rate": 0.5}, **options)


def give_gradients(model, value=1.0):
    model.weight.grad = torch.full((1, 1), value)


@row(
    "`gluon.Trainer(params, optimizer, optimizer_params, kvstore, compression_params, "
    "update_on_kvstore)`"
)
@pytest.mark.parametrize("of", ["module", "parameters", "replicas"])
def test_what_a_trainer_trains(of):
    model = one_weight()
    params = {
        "module": model,
        "parameters": model.parameters(),
        "replicas": torchkv.replicate(model, ["cpu", "cpu"]),
    }[of]
    compression = {"type": "2bit", "threshold": 0.25}
    options = {"learning_rate": 0.5}
    trainer = torchkv.Trainer(params, "sgd", options, "device", compression, True)
    for replica in params if of == "replicas" else [model]:
        give_gradients(replica)
    trainer.step()
    steps = 2 if of == "replicas" else 1
    assert model.weight.item() == 1 - 0.5 * 0.25 * steps
    assert trainer.kvstore.gradient_compression.threshold == 0.25
    with pytest.raises(ValueError, match="2bits"):
        trainer_of(one_weight(), compression_params={"type": "2bits"})


@row("`trainer.step(batch_size, ignore_stale_grad)`")
@row("`trainer.update(batch_size, ignore_stale_grad)`")
@row("`trainer.allreduce_grads()`")
@pytest.mark.parametrize("how", ["step", "update"])
def test_the_batch_size_has_the_default_1(how):
    replicas = torchkv.replicate(one_weight(), ["cpu", "cpu"])
    trainer = trainer_of(replicas, update_on_kvstore=False)
    for arguments, scale in (((), 1), ((1,), 1), ((2, True), 2)):
        before = replicas[0].weight.item()
        for replica in replicas:
            give_gradients(replica)
        if how == "update":
            trainer.allreduce_grads()
            assert [replica.weight.grad.item() for replica in replicas] == [2, 2]
        getattr(trainer, how)(*arguments)
        for replica in replicas:
            assert replica.weight.item() == before - 0.5 * 2 / scale
    with pytest.raises(UserWarning, match="gradient"):
        trainer.step()


@row("`trainer.save_states(fname)`", "`trainer.load_states(fname)`")
def test_files_of_a_trainer(tmp_path):
    trainer = trainer_of(one_weight())
    trainer.save_states(tmp_path / "states")
    assert "param_groups" in torch.load(tmp_path / "states")
    other = torchkv.Trainer(one_weight(), "sgd", {"learning_rate": 0.25})
    other.load_states(tmp_path / "states")
    assert other.learning_rate == 0.5


@row("`trainer.learning_rate`, `trainer.set_learning_rate(lr)`")
@row("`trainer.optimizer`")
def test_the_learning_rate_of_a_trainer():
    trainer = trainer_of(one_weight())
    assert trainer.learning_rate == 0.5
    trainer.set_learning_rate(0.25)
    assert trainer.learning_rate == trainer.optimizer.lr == 0.25
    schedule = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1, 0.5)
    schedule.step()
    assert trainer.learning_rate == 0.125
    halves = torchkv.lr_scheduler.FactorScheduler(1, 0.5, base_lr=1.0)
    trainer = torchkv.Trainer(one_weight(), "sgd", {"lr_scheduler": halves})
    assert trainer.learning_rate == 1
    with pytest.raises(UserWarning, match="lr_scheduler"):  # as in MXNet
        trainer.set_learning_rate(0.25)


@row("`gluon.utils.split_and_load(data, ctx_list, batch_axis, even_split)`")
def test_replicas_split_a_batch():
    shapes = []
    model = one_weight()
    replicas = torchkv.replicate(model, ["cpu", "cpu"])
    for replica in replicas:
        replica.register_forward_pre_hook(
            lambda module, args: shapes.append(args[0].shape)
        )
    batch = torch.arange(5.0).reshape(5, 1)
    shards = [shard for (shard,) in replicas.scatter(batch)]
    assert torch.cat(shards).equal(batch)
    replicas(batch)
    assert [s.shape for s in shards] == shapes == [(3, 1), (2, 1)]


@row("`gluon.utils.split_data(data, num_slice, batch_axis, even_split)`")
def test_tensor_split():
    data = torch.arange(10).reshape(2, 5)
    assert [x.shape for x in torch.tensor_split(data, 2, 1)] == [(2, 3), (2, 2)]
    assert [x.shape for x in torch.tensor_split(data, 2)] == [(1, 5), (1, 5)]


@row("`gluon.utils.clip_global_norm(arrays, max_norm, check_isfinite)`")
def test_clipping():
    model = one_weight()
    trainer = trainer_of(model)
    give_gradients(model, 4.0)
    norm = trainer.clip_grad_norm_(1.0)
    assert isinstance(norm, torch.Tensor) and norm == 4
    trainer.step()
    assert model.weight.item() == pytest.approx(0.5)
    give_gradients(model, float("inf"))
    assert trainer.clip_grad_norm_(1.0).isinf()
    with pytest.raises(RuntimeError):
        trainer.clip_grad_norm_(1.0, error_if_nonfinite=True)


@row(
    "`gluon.utils.download(url, path, overwrite, sha1_hash, retries, verify_ssl)`, "
    "`gluon.utils.check_sha1(filename, sha1_hash)`, "
    "`gluon.utils.replace_file(src, dst)`"
)
def test_downloads(tmp_path):
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.write_bytes(b"content")
    prefix = hashlib.sha256(b"content").hexdigest()[:8]
    load = torch.hub.download_url_to_file
    load(source.as_uri(), str(copy), prefix, progress=False)
    os.replace(copy, source)
    assert source.read_bytes() == b"content" and not copy.exists()
    with pytest.raises(RuntimeError, match="hash"):
        load(source.as_uri(), str(copy), "00000000", progress=False)


# --- Parameters -----------------------------------------------------------------


@row(
    "`p.data(ctx)`, `p.grad(ctx)`, `p.shape`, `p.dtype`, `p.name`",
    "`p.zero_grad()`",
    "`p.grad_req`",
)
def test_gradients_of_parameters():
    model = one_weight()
    trainer = trainer_of(model)
    assert dict(model.named_parameters())["weight"] is model.weight
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward()
    assert model.weight.grad.item() == 2  # added up, as with MXNet's "add"
    trainer.zero_grad()
    assert model.weight.grad is None
    model(torch.ones(1, 1)).sum().backward()
    trainer.step()
    assert model.weight.grad is None and model.weight.data.item() == 0.5
    model.weight.requires_grad = False
    trainer.step()  # without a gradient, as with MXNet's "null"
    assert model.weight.item() == 0.5


@row(
    "`p.list_data()`, `p.list_grad()`, `p.list_ctx()`",
    "`p.set_data(data)`",
    "`p.initialize(init, ctx, default_init, force_reinit)`, `p.init`, "
    "`p.reset_ctx(ctx)`",
)
def test_parameters_of_replicas():
    replicas = torchkv.replicate(one_weight(), ["cpu", "cpu"])
    assert replicas.devices == [torch.device("cpu")] * 2
    assert len({module.weight.data_ptr() for module in replicas}) == 2
    assert [module.weight.item() for module in replicas] == [1, 1]  # the module's
    assert replicas.to("cpu") is replicas
    trainer = trainer_of(replicas)
    with torch.no_grad():
        replicas[0].weight.copy_(torch.full((1, 1), 5.0))
    for replica in replicas:
        give_gradients(replica)
    trainer.step()
    assert [module.weight.item() for module in replicas] == [4, 4]


@row("`p.lr_mult`, `p.wd_mult`")
def test_multipliers_of_parameters():
    model = one_weight()
    trainer = torchkv.Trainer(model, "sgd", {"learning_rate": 0.5, "wd": 1.0})
    trainer.optimizer.set_lr_mult({"weight": 0.5})
    trainer.optimizer.set_wd_mult({"weight": 2.0})
    give_gradients(model)
    trainer.step()
    assert model.weight.item() == 1 - 0.25 * (1 + 2)


@row("`p.cast(dtype)`")
def test_casts():
    model = one_weight().to(torch.bfloat16)
    trainer = trainer_of(model)
    model.weight.grad = torch.ones_like(model.weight)
    trainer.step()
    assert model.weight.dtype == torch.bfloat16 and model.weight.item() == 0.5


@row("`p.row_sparse_data(row_id)`, `p.list_row_sparse_data(row_id)`")
def test_lookups_pull_rows():
    with torchkv.create() as store:
        table = torch.arange(6.0).reshape(3, 2)
        store.init("table", table)
        embedding = torchkv.nn.StoreEmbedding(None, 2, store, "table")
        ids = torch.tensor([2, 0])
        assert embedding(ids).equal(table[ids])


@row("`p.var()`")
def test_var_is_the_variance():
    assert torch.nn.Parameter(torch.tensor([1.0, 3.0])).var() == 2


def test_every_row_has_a_test():
    row.check()
