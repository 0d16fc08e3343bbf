"""torchkv.Trainer: the weights of plain torch training, and gluon's API."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchkv
from helpers import add_input, assert_same
from training import (
    BATCH,
    assert_near,
    assert_same_weights,
    fill_gradients,
    make_batches,
    make_model,
    summed_loss,
    train_plainly,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_thread")


FORMS = [
    pytest.param(
        torchkv.optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
        None,
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        id="SGD",
    ),
    pytest.param(
        "sgd",
        {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01},
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        id="sgd",
    ),
    pytest.param(
        torchkv.optim.Adam, {"lr": 0.01}, torch.optim.Adam, {"lr": 0.01}, id="adam"
    ),
    pytest.param(
        torchkv.optim.AdamW,
        {"lr": 0.01},
        torch.optim.AdamW,
        {"lr": 0.01},
        id="class",
    ),
    pytest.param(
        torch.optim.NAdam, {"lr": 0.01}, torch.optim.NAdam, {"lr": 0.01}, id="torch"
    ),
]


@pytest.mark.parametrize("on_store", [None, True, False])
@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize(("optimizer", "options", "plain", "plain_options"), FORMS)
def test_it_trains_like_torch_optim(
    store_type, optimizer, options, plain, plain_options, replicas, on_store
):
    model = make_model()
    copies = torchkv.replicate(model, ["cpu"] * replicas)
    trainer = torchkv.Trainer(
        copies,
        copy.deepcopy(optimizer),
        options,
        kvstore=store_type,
        update_on_kvstore=on_store,
    )
    for x, y in make_batches():
        copies.backward(summed_loss, x, y)
        trainer.step(BATCH)
    assert copies[0] is model
    assert_near(weights(model), train_plainly(plain, plain_options))
    for replica in copies:
        assert_same_weights(weights(replica), weights(model))


@pytest.mark.cuda
@pytest.mark.parametrize("on_store", [True, False])
def test_it_trains_on_gpus(devices, on_store):
    model = make_model()
    copies = torchkv.replicate(model, devices)
    trainer = torchkv.Trainer(copies, "adamw", update_on_kvstore=on_store)
    for x, y in make_batches():
        copies.backward(summed_loss, x, y)
        trainer.step(BATCH)
    expected = train_plainly(torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.0})
    for replica in copies:
        moved = {name: p.cpu() for name, p in weights(replica).items()}
        assert_near(moved, expected, 1e-5)


def test_gluons_loop_works_without_zero_grad():
    """gluon.Trainer's arguments by position, losses that are not reduced."""
    model = make_model()
    trainer = torchkv.Trainer(
        dict(model.named_parameters()),
        "sgd",
        {"learning_rate": 0.1},
        "device",
        None,
        None,
    )
    for data, label in make_batches():
        loss = F.cross_entropy(model(data), label, reduction="none")
        loss.backward(torch.ones_like(loss))
        trainer.step(data.shape[0])
        assert all(p.grad is None for p in model.parameters())
    assert_near(weights(model), train_plainly(torch.optim.SGD, {"lr": 0.1}))


@pytest.mark.parametrize("on_store", [True, False])
def test_the_optimizers_own_rescale_grad_is_applied(on_store):
    parameter = nn.Parameter(torch.zeros(3))
    sgd = torchkv.optim.SGD(lr=1.0, rescale_grad=0.5)
    trainer = torchkv.Trainer([parameter], sgd, update_on_kvstore=on_store)
    for batch_size, total in [(2, -1.0), (2, -2.0), (8, -2.25)]:
        parameter.grad = torch.full((3,), 4.0)
        trainer.step(batch_size)
        assert parameter.tolist() == [total] * 3


@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_each_batch_that_accumulates_is_divided_by_its_own_size(dtype, on_store):
    parameter = nn.Parameter(torch.zeros(3, dtype=dtype))
    sgd = torchkv.optim.SGD(lr=1.0, accumulate=2, rescale_grad=0.5)
    trainer = torchkv.Trainer([parameter], sgd, update_on_kvstore=on_store)
    for batch_size, total in [(8, 0.0), (4, -1.0), (1, -1.0), (3, -2.0)]:
        parameter.grad = torch.full_like(parameter, batch_size)
        trainer.step(batch_size)
        assert parameter.tolist() == [total] * 3
    assert trainer.optimizer.rescale_grad == 0.5


def test_accumulated_gradients_of_half_precision_are_rounded_once():
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    sgd = torchkv.optim.SGD(lr=1.0, accumulate=3)
    trainer = torchkv.Trainer([parameter], sgd)
    for _ in range(3):
        parameter.grad = torch.ones_like(parameter)
        trainer.step(3)
    master = trainer.optimizer.state_dict()["state"][0]["master"]
    assert_same(master, torch.full((3,), -1.0))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_reused_optimizer_starts_with_its_own_rescale_grad(accumulate):
    sgd = torchkv.optim.SGD(lr=1.0, accumulate=accumulate, rescale_grad=0.5)
    for rescale in (0.5, 0.5, 2.0):
        if rescale == 2.0:
            sgd.rescale_grad = 2.0
        parameter = nn.Parameter(torch.zeros(3))
        trainer = torchkv.Trainer([parameter], sgd)
        for _ in range(accumulate):
            parameter.grad = torch.full((3,), 8.0)
            trainer.step(8)
        assert parameter.tolist() == [-rescale * accumulate] * 3
        trainer.kvstore.set_updater(None)


@pytest.mark.parametrize("on_store", [True, False])
def test_stale_gradients_are_rejected_unless_ignored(on_store):
    model = make_model()
    trainer = torchkv.Trainer(
        model.named_parameters(),
        "sgd",
        {"learning_rate": 1.0},
        update_on_kvstore=on_store,
    )
    before = weights(model)
    fill_gradients(model)
    model[0].bias.grad = None
    with pytest.raises(
        UserWarning, match=r"step: expected a grad.*'0.bias', replica 0"
    ):
        trainer.step(1)
    assert_same_weights(weights(model), before)
    trainer.step(1, ignore_stale_grad=True)
    for name, value in weights(model).items():
        assert_same(value, before[name] - (0.0 if name == "0.bias" else 1.0), name)
    with pytest.raises(UserWarning):  # used up
        trainer.step(1)
    trainer.step(1, ignore_stale_grad=True)  # nothing to do


def test_all_stale_gradients_are_named():
    model = make_model()
    trainer = torchkv.Trainer(model, "sgd")
    fill_gradients(model)
    model[0].weight.grad = model[2].bias.grad = None
    with pytest.raises(
        UserWarning,
        match=r"none for 2 of 4 \(key '0.weight', replica 0; key '2.bias', replica 0\)"
        ".*ignore_stale_grad=True",
    ):
        trainer.step()


def test_one_replica_without_a_gradient():
    copies = torchkv.replicate(make_model(), ["cpu"] * 2)
    trainer = torchkv.Trainer(copies, "sgd", {"learning_rate": 1.0})
    before = weights(copies[0])
    fill_gradients(copies[1])
    with pytest.raises(UserWarning, match=r"key '0.weight', replica 0"):
        trainer.step()
    trainer.step(ignore_stale_grad=True)
    for replica in copies:
        assert_same_weights(
            weights(replica), {name: value - 1 for name, value in before.items()}
        )


def test_frozen_parameters_are_skipped_until_they_are_not():
    model = make_model()
    model[0].requires_grad_(False)
    trainer = torchkv.Trainer(model.named_parameters(), "sgd", {"learning_rate": 1.0})
    assert trainer.kvstore.keys() == ["2.weight", "2.bias"]
    before = weights(model)
    fill_gradients(model[2])
    trainer.step()
    model.requires_grad_(True)
    fill_gradients(model)
    trainer.step()
    for name, value in weights(model).items():
        steps = 1 if name.startswith("0") else 2
        assert_same(value, before[name] - 1 - (steps - 1), name)


def test_zero_grad():
    model = make_model()
    trainer = torchkv.Trainer(model, "sgd")
    fill_gradients(model)
    trainer.zero_grad(set_to_none=False)
    assert all((p.grad == 0).all() for p in model.parameters())
    trainer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


# -- update_on_kvstore=False


def test_gradients_are_summed_and_may_be_changed_before_the_update():
    copies = torchkv.replicate(make_model(), ["cpu"] * 3)
    trainer = torchkv.Trainer(
        copies, "sgd", {"learning_rate": 1.0}, update_on_kvstore=False
    )
    before = weights(copies[0])
    for i, replica in enumerate(copies):
        fill_gradients(replica, 2.0**i)
    trainer.allreduce_grads()
    for replica in copies:
        for parameter in replica.parameters():
            assert_same(parameter.grad, torch.full_like(parameter, 7.0))
            parameter.grad.clamp_(max=4)
    trainer.update(2)
    for replica in copies:
        assert_same_weights(
            weights(replica), {name: value - 2 for name, value in before.items()}
        )
    with pytest.raises(UserWarning, match="update: expected a gradient"):
        trainer.update(2)


def test_a_trainer_without_a_store_between_replicas():
    model = make_model()
    trainer = torchkv.Trainer(model, "sgd", {"learning_rate": 0.1}, kvstore=None)
    assert trainer.kvstore is None
    for x, y in make_batches():
        F.cross_entropy(model(x), y).backward()
        trainer.allreduce_grads()
        trainer.update()
    assert_near(weights(model), train_plainly(torch.optim.SGD, {"lr": 0.1}))


def test_separate_updates_are_rejected_if_the_optimizer_is_on_the_store():
    copies = torchkv.replicate(make_model(), ["cpu"] * 2)
    trainer = torchkv.Trainer(copies, "sgd")
    for call in (trainer.allreduce_grads, lambda: trainer.update(1)):
        with pytest.raises(RuntimeError, match="update_on_kvstore=False when creating"):
            call()


# -- errors


def sgd_with_multipliers(*names):
    sgd = torchkv.optim.SGD(lr=0.1)
    sgd.set_lr_mult(dict.fromkeys(names, 2.0))
    return sgd


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (
            ValueError,
            lambda: {"optimizer": sgd_with_multipliers("0.bias", "_orig_mod.0.bias")},
        ),
        (KeyError, lambda: {"optimizer": sgd_with_multipliers("missing")}),
        (ValueError, lambda: {"compression_params": {"type": "2bt"}}),
        (
            ValueError,
            lambda: {
                "optimizer_params": {"rate": 1},
                "compression_params": {"type": "fp16"},
            },
        ),
    ],
)
def test_a_refused_trainer_leaves_its_store_as_it_was(error, arguments):
    store = torchkv.create("device")
    with pytest.raises(error):
        torchkv.Trainer(
            make_model(), **{"optimizer": "sgd", "kvstore": store, **arguments()}
        )
    assert store.optimizer is None and store.gradient_compression is None
    assert len(store) == 0
    torchkv.Trainer(make_model(), "sgd", kvstore=store)


def a_store_with(change):
    store = torchkv.create()
    change(store)
    return store


def cases():
    def options(**given):
        return lambda: torchkv.Trainer(make_model(), "sgd", **given)

    model = make_model()
    return [
        (options(optimizer_params="device"), TypeError, "kvstore=..."),
        (options(optimizer_params={"rate": 1}), ValueError, "'rate'"),
        (options(compression_params={}), ValueError, "missing 'type'"),
        (options(compression_params="2bit"), TypeError, "but got str"),
        (
            options(compression_params={"type": "2bit"}, kvstore="local"),
            ValueError,
            "'device' or 'nccl', but got 'local'",
        ),
        (
            options(compression_params={"type": "2bit"}, kvstore=None),
            ValueError,
            "need a store of torchkv's, but got None",
        ),
        (
            options(compression_params=[{"keys": "0.weights", "type": "2bit"}]),
            KeyError,
            "'0.weights'.*mean '0.weight'",
        ),
        (options(kvstore=3), TypeError, "as kvstore, but got int"),
        (options(kvstore="LOCAL"), ValueError, "local"),
        (
            options(kvstore=None, update_on_kvstore=True),
            ValueError,
            "need a kvstore",
        ),
        (
            options(kvstore=a_store_with(lambda s: s.init(1, torch.zeros(1)))),
            ValueError,
            "create one for each trainer",
        ),
        (
            options(kvstore=a_store_with(lambda s: s.set_optimizer("sgd"))),
            ValueError,
            "create one for each trainer",
        ),
        (lambda: torchkv.Trainer(model, "SGDD"), ValueError, "'sgd'"),
        (
            lambda: torchkv.Trainer(model, torch.optim.SGD(model.parameters(), lr=1)),
            TypeError,
            "pass its class",
        ),
        (
            lambda: torchkv.Trainer(
                torchkv.replicate(model, ["cpu"] * 2), "sgd", None, None
            ),
            ValueError,
            "2 replicas",
        ),
        (lambda: torchkv.Trainer(model, "sgd").step(0), ValueError, "batch_size"),
        (
            lambda: torchkv.Trainer(model, "sgd").step(lambda: 1),
            TypeError,
            "batch_size",
        ),
    ]


@pytest.mark.parametrize("index", range(len(cases())))
def test_errors(index):
    call, kind, message = cases()[index]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("on_store", [True, False])
def test_two_trainers_need_two_stores(kv, on_store):
    trainer = torchkv.Trainer(
        make_model(), "sgd", kvstore=kv, update_on_kvstore=on_store
    )
    assert trainer.kvstore is kv
    with pytest.raises(ValueError, match="create one for each trainer"):
        torchkv.Trainer(make_model(), "sgd", kvstore=kv, update_on_kvstore=on_store)


def embed(model, rows):
    return (model(rows) * torch.arange(8.0).reshape(4, 2)).sum()


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("clip", [False, True])
def test_sparse_gradients_step_their_rows(num_replicas, clip):
    """As the dense gradients of a plain SGD, which moves no other row."""
    torch.manual_seed(0)
    dense = nn.Embedding(6, 2)
    model = nn.Embedding(6, 2, sparse=True)
    model.load_state_dict(dense.state_dict())
    replicas = torchkv.replicate(model, ["cpu"] * num_replicas)
    trainer = torchkv.Trainer(replicas, "sgd", {"learning_rate": 0.1})
    plain = torch.optim.SGD(dense.parameters(), lr=0.1)
    for _ in range(3):
        batches = torch.randint(6, (num_replicas, 4))
        plain.zero_grad()
        for replica, rows in zip(replicas, batches, strict=True):
            embed(replica, rows).backward()
            embed(dense, rows).backward()
        if clip:
            norm = torch.nn.utils.clip_grad_norm_(dense.parameters(), 2.0)
            torch.testing.assert_close(trainer.clip_grad_norm_(2.0).float(), norm)
        assert model.weight.grad.is_sparse
        trainer.step()
        plain.step()
        for replica in replicas:
            assert_near(weights(replica), weights(dense))
            assert replica.weight.grad is None


def test_sparse_gradients_without_the_update_on_the_store():
    model = nn.Embedding(4, 2, sparse=True)
    replicas = torchkv.replicate(model, ["cpu"] * 2)
    trainer = torchkv.Trainer(replicas, "sgd", update_on_kvstore=False)
    before = weights(model)
    for replica in replicas:
        embed(replica, torch.tensor([1, 2, 1, 0])).backward()
    with pytest.raises(NotImplementedError, match="pushpull: expected a dense.*weight"):
        trainer.step()
    assert_same_weights(weights(model), before)


def test_a_store_whose_optimizer_was_replaced():
    model = make_model()
    trainer = torchkv.Trainer(model, "sgd")
    trainer.kvstore.set_updater(add_input)
    fill_gradients(model)
    with pytest.raises(RuntimeError, match="no longer has the trainer"):
        trainer.step()
