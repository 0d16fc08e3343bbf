"""torchkv.Trainer: the weights of plain torch training, and gluon's manners."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchkv
from helpers import add_input, assert_same

BATCH = 12


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small work starves where threads must wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def make_batches(count=10):
    torch.manual_seed(8)
    return [
        (torch.randn(BATCH, 5), torch.randint(0, 3, (BATCH,))) for _ in range(count)
    ]


def summed_loss(model, x, y):
    return F.cross_entropy(model(x), y, reduction="sum")


def weights(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def train_plainly(optimizer, options, batches=None, model=None):
    model = model or make_model()
    plain = optimizer(model.parameters(), **options)
    for x, y in batches or make_batches():
        plain.zero_grad()
        F.cross_entropy(model(x), y).backward()
        plain.step()
    return weights(model)


def assert_near(actual, expected, atol=1e-6):
    assert list(actual) == list(expected)
    for name in expected:
        difference = (actual[name] - expected[name]).abs().max().item()
        assert difference <= atol, name


def assert_same_weights(actual, expected):
    assert list(actual) == list(expected)
    for name in expected:
        assert_same(actual[name], expected[name], name)


def fill_gradients(module, value=1.0):
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, value)


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
        "adam", {"learning_rate": 0.01}, torch.optim.Adam, {"lr": 0.01}, id="adam"
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
def test_it_trains_as_one_process_with_torch_optim(
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


@pytest.mark.parametrize(
    "form",
    [
        lambda m: m,
        lambda m: m.parameters(),
        lambda m: list(m.parameters()),
        lambda m: m.named_parameters(),
        lambda m: dict(m.named_parameters()),
        lambda m: [m],
        lambda m: nn.ModuleList([m]),
    ],
    ids=["module", "parameters", "list", "named", "dict", "modules", "ModuleList"],
)
def test_forms_of_params(form):
    model = make_model()
    trainer = torchkv.Trainer(form(model), "sgd", {"learning_rate": 0.1})
    for x, y in make_batches():
        F.cross_entropy(model(x), y).backward()
        trainer.step()
    assert_near(weights(model), train_plainly(torch.optim.SGD, {"lr": 0.1}))
    assert repr(trainer).startswith("Trainer(4 parameters, 1 replicas, SGD(lr=0.1,")


def test_keys_are_names_or_positions():
    model = make_model()
    named = torchkv.Trainer(model.named_parameters(), "sgd")
    assert named.kvstore.keys() == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert torchkv.Trainer(model.parameters(), "sgd").kvstore.keys() == [0, 1, 2, 3]
    named.optimizer.set_lr_mult({"0.weight": 0.0})
    before = weights(model)
    fill_gradients(model)
    named.step()
    for name, value in weights(model).items():
        assert torch.equal(value, before[name]) == (name == "0.weight")


def test_gluons_loop_needs_no_zero_grad():
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
def test_the_optimizers_own_rescale_grad_counts(on_store):
    parameter = nn.Parameter(torch.zeros(3))
    sgd = torchkv.optim.SGD(lr=1.0, rescale_grad=0.5)
    trainer = torchkv.Trainer([parameter], sgd, update_on_kvstore=on_store)
    for batch_size, total in [(2, -1.0), (2, -2.0), (8, -2.25)]:
        parameter.grad = torch.full((3,), 4.0)
        trainer.step(batch_size)
        assert parameter.tolist() == [total] * 3


@pytest.mark.parametrize("on_store", [True, False])
def test_stale_gradients_are_refused_unless_ignored(on_store):
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


def test_tied_parameters_have_one_key():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    copies = torchkv.replicate(model, ["cpu"] * 2)
    plain = copy.deepcopy(model)
    trainer = torchkv.Trainer(copies, "sgd", {"learning_rate": 0.1})
    assert trainer.kvstore.keys() == ["0.weight", "0.bias", "1.bias"]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    x = torch.randn(6, 4)
    copies.backward(lambda m, x: m(x).pow(2).sum(), x)
    trainer.step()
    plain(x).pow(2).sum().backward()
    optimizer.step()
    assert copies[1][0].weight is copies[1][1].weight
    assert_near(weights(copies[1]), weights(plain), 1e-5)
    weight = model[0].weight
    assert len(torchkv.Trainer([weight, weight], "sgd").kvstore) == 1


def test_replicas_begin_with_the_values_of_the_first():
    first, second = (
        make_model(),
        nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)),
    )
    second[0].requires_grad_(False)
    torchkv.Trainer([first, second], "sgd")
    assert_same_weights(weights(second), weights(first))


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


def test_gradients_and_updates_apart_are_refused_on_the_store():
    trainer = torchkv.Trainer(make_model(), "sgd")
    for call in (trainer.allreduce_grads, lambda: trainer.update(1)):
        with pytest.raises(RuntimeError, match="update_on_kvstore=False when creating"):
            call()


# -- learning rates, schedulers, states


def test_learning_rate():
    trainer = torchkv.Trainer(make_model(), "adam", {"learning_rate": 0.5})
    assert trainer.learning_rate == 0.5
    trainer.set_learning_rate(0.25)
    assert trainer.learning_rate == trainer.optimizer.lr == 0.25
    with pytest.raises(ValueError, match="learning rate"):
        trainer.set_learning_rate(-1)
    assert trainer.learning_rate == 0.25


@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=10),
        lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(
            o, max_lr=0.1, total_steps=12, cycle_momentum=False
        ),
    ],
    ids=["cosine", "step", "one cycle"],
)
def test_schedulers(make, on_store):
    model, plain_model = make_model(), make_model()
    trainer = torchkv.Trainer(
        model, "adam", {"learning_rate": 0.1}, update_on_kvstore=on_store
    )
    plain = torch.optim.Adam(plain_model.parameters(), lr=0.1)
    schedule, plain_schedule = make(trainer.optimizer), make(plain)
    for x, y in make_batches():
        F.cross_entropy(model(x), y).backward()
        trainer.step()
        schedule.step()
        plain.zero_grad()
        F.cross_entropy(plain_model(x), y).backward()
        plain.step()
        plain_schedule.step()
        assert trainer.learning_rate == plain.param_groups[0]["lr"]
    assert_near(weights(model), weights(plain_model), 2e-6)


@pytest.mark.parametrize("weights_first", [True, False])
@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["adamw", torch.optim.AdamW])
def test_saved_states_bring_the_bits_back(
    tmp_path, optimizer, dtype, on_store, weights_first
):
    def start():
        model = make_model().to(dtype)
        return model, torchkv.Trainer(model, optimizer, update_on_kvstore=on_store)

    def train(model, trainer, batches):
        for x, y in batches:
            F.cross_entropy(model(x.to(dtype)), y).backward()
            trainer.step()

    batches = make_batches()
    model, trainer = start()
    trainer.set_learning_rate(0.05)
    train(model, trainer, batches[:5])
    trainer.save_states(tmp_path / "states")
    state = copy.deepcopy(model.state_dict())
    train(model, trainer, batches[5:])

    other, resumed = start()
    if weights_first:
        other.load_state_dict(state)
    resumed.load_states(tmp_path / "states")
    if not weights_first:
        other.load_state_dict(state)
    assert resumed.learning_rate == 0.05
    train(other, resumed, batches[5:])
    assert_same_weights(weights(other), weights(model))


def test_states_of_other_parameters_are_refused(tmp_path):
    torchkv.Trainer(nn.Linear(2, 2), "adam").save_states(tmp_path / "states")
    with pytest.raises(ValueError, match="load_state_dict"):
        torchkv.Trainer(make_model(), "adam").load_states(tmp_path / "states")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("optimizer", ["sgd", torch.optim.SGD])
def test_weights_written_between_steps_are_trained_on(optimizer, dtype):
    """Momentum stays, as with torch.optim; so does the new weight."""
    parameter = nn.Parameter(torch.zeros(3, dtype=dtype))
    word = "learning_rate" if optimizer == "sgd" else "lr"
    trainer = torchkv.Trainer([parameter], optimizer, {word: 1.0, "momentum": 0.5})
    parameter.grad = torch.full_like(parameter, 4.0)
    trainer.step()
    assert parameter.tolist() == [-4.0] * 3
    with torch.no_grad():
        parameter.fill_(100.0)
    parameter.grad = torch.full_like(parameter, 4.0)
    trainer.step()
    assert parameter.tolist() == [94.0] * 3  # 100 - (4 + 4 / 2)
    parameter.data = torch.zeros(3, dtype=dtype)
    parameter.grad = torch.full_like(parameter, 1.0)
    trainer.step()
    assert parameter.tolist() == [-4.0] * 3  # -(1 + 6 / 2)


def test_a_module_may_change_its_dtype():
    model = nn.Linear(2, 2)
    trainer = torchkv.Trainer(model, "adamw")
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        fill_gradients(model)
        trainer.step()
        model.to(dtype)
        fill_gradients(model)
        trainer.step()
        assert trainer.kvstore.dtype("weight") == model.weight.dtype == dtype
    assert trainer.optimizer.state_dict()["state"]["weight"]["step"] == 6


# -- GradScaler


@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler_skips_infinities_and_changes_nothing_else(on_store, unscale):
    copies = torchkv.replicate(make_model(), ["cpu"] * 2)
    trainer = torchkv.Trainer(
        copies, "sgd", {"learning_rate": 0.1}, update_on_kvstore=on_store
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10**6)
    batches = make_batches()
    for i, (x, y) in enumerate(batches):
        trainer.zero_grad()
        scaler.scale(F.cross_entropy(copies(x), y)).backward()
        if i in (2, 5):
            next(copies[i % 2].parameters()).grad[0, 0] = float("inf")
        if unscale:
            scaler.unscale_(trainer)
        before = weights(copies[0])
        scale = scaler.get_scale()
        scaler.step(trainer)
        scaler.update()
        if i in (2, 5):
            assert scaler.get_scale() == scale / 2
            assert_same_weights(weights(copies[0]), before)
        else:
            assert scaler.get_scale() == scale
    kept = [batch for i, batch in enumerate(batches) if i not in (2, 5)]
    expected = train_plainly(torch.optim.SGD, {"lr": 0.1}, kept)
    assert_near(weights(copies[0]), expected)
    assert_same_weights(weights(copies[1]), weights(copies[0]))


def test_grad_scaler_hands_the_batch_size_on():
    parameter = nn.Parameter(torch.zeros(3))
    trainer = torchkv.Trainer([parameter], "sgd", {"learning_rate": 1.0})
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(parameter.sum() * 8).backward()
    scaler.step(trainer, 2)
    assert parameter.tolist() == [-4.0] * 3


def test_param_groups_are_only_for_reading():
    trainer = torchkv.Trainer(make_model(), "sgd")
    assert len(trainer.param_groups[0]["params"]) == 4
    with pytest.raises(TypeError):
        trainer.param_groups[0]["lr"] = 0.1


def test_zero_grad():
    model = make_model()
    trainer = torchkv.Trainer(model, "sgd")
    fill_gradients(model)
    trainer.zero_grad(set_to_none=False)
    assert all((p.grad == 0).all() for p in model.parameters())
    trainer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


# -- errors


def a_store_with(change):
    store = torchkv.create()
    change(store)
    return store


def cases():
    def params(value):
        return lambda: torchkv.Trainer(value, "sgd")

    def options(**given):
        return lambda: torchkv.Trainer(make_model(), "sgd", **given)

    model = make_model()
    other = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
    weight = nn.Parameter(torch.zeros(2))
    return [
        (params([]), ValueError, "at least one parameter, but got none"),
        (params([nn.Tanh()]), ValueError, "at least one parameter, but got none"),
        (params(3), TypeError, "expected a module, parameters().*but got int"),
        (params(weight), TypeError, "expected a module.*but got Parameter"),
        (params([weight, 3]), TypeError, "one with an item of type"),
        (params([weight * 2]), ValueError, r"result of an operation \(key 0\)"),
        (params([("w", weight), ("w", weight.detach())]), ValueError, "got one twice"),
        (params(nn.LazyLinear(3)), ValueError, r"lazy module; run .*\(key 'weight'\)"),
        (params([model, model]), ValueError, "two that share one .key '0.weight'"),
        (params([model, other]), ValueError, r"\[9, 5\] beside .*\[8, 5\].*replica 1"),
        (params([model, other[:2]]), ValueError, "replicas of the same"),
        (options(optimizer_params="device"), TypeError, "kvstore=..."),
        (options(optimizer_params={"rate": 1}), ValueError, "'rate'"),
        (options(compression_params={}), NotImplementedError, "compression_params"),
        (options(kvstore=3), TypeError, "as kvstore, but got int"),
        (options(kvstore="LOCAL"), ValueError, "local"),
        (
            options(kvstore=None, update_on_kvstore=True),
            ValueError,
            "expected a kvstore",
        ),
        (
            options(kvstore=a_store_with(lambda s: s.init(1, torch.zeros(1)))),
            ValueError,
            "make one for each trainer",
        ),
        (
            options(kvstore=a_store_with(lambda s: s.set_optimizer("sgd"))),
            ValueError,
            "make one for each trainer",
        ),
        (lambda: torchkv.Trainer(model, "SGD"), ValueError, "'sgd'"),
        (
            lambda: torchkv.Trainer(model, torch.optim.SGD(model.parameters(), lr=1)),
            TypeError,
            "hand over its class",
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
    with pytest.raises(ValueError, match="make one for each trainer"):
        torchkv.Trainer(make_model(), "sgd", kvstore=kv, update_on_kvstore=on_store)


def test_sparse_gradients_are_refused_and_nothing_changes():
    model = nn.Embedding(4, 2, sparse=True)
    trainer = torchkv.Trainer(model, "sgd")
    before = weights(model)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(NotImplementedError, match="weight"):
        trainer.step()
    assert_same_weights(weights(model), before)


def test_a_store_whose_optimizer_was_replaced():
    model = make_model()
    trainer = torchkv.Trainer(model, "sgd")
    trainer.kvstore.set_updater(add_input)
    fill_gradients(model)
    with pytest.raises(RuntimeError, match="has another updater now"):
        trainer.step()
