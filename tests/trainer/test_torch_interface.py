"""What a Trainer's optimizer does for programs that are written for torch.optim."""

import copy
import gc
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import torchkv
from training import (
    assert_near,
    fill_gradients,
    make_batches,
    make_model,
    train_plainly,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def make_trainer(model, **options):
    return torchkv.Trainer(model, "sgd", {"learning_rate": 0.5}, **options)


def test_step_hooks_run_in_torchs_order():
    model = make_model()
    trainer = make_trainer(model)
    optimizer = trainer.optimizer
    before = weights(model)
    seen = []

    def note(name):
        def hook(of, args, kwargs):
            changed = not torch.equal(model[0].weight, before["0.weight"])
            seen.append((name, of is optimizer, changed))

        return hook

    handles = [
        optimizer.register_step_pre_hook(note("pre")),
        optimizer.register_step_post_hook(note("post")),
        register_optimizer_step_pre_hook(note("global pre")),
        register_optimizer_step_post_hook(note("global post")),
    ]
    try:
        fill_gradients(model, 1.0)
        trainer.step(1)
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [
        ("global pre", True, False),
        ("pre", True, False),
        ("post", True, True),
        ("global post", True, True),
    ]
    fill_gradients(model, 1.0)
    trainer.step(1)
    assert len(seen) == 4


@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_hook_before_the_step_may_replace_gradients(num_replicas, on_store):
    replicas = torchkv.replicate(make_model(), ["cpu"] * num_replicas)
    trainer = make_trainer(replicas, update_on_kvstore=on_store)
    before = weights(replicas.module)

    def replace(optimizer, args, kwargs):
        for module in replicas:
            fill_gradients(module, 3.0)

    trainer.optimizer.register_step_pre_hook(replace)
    for missing in (False, True):  # also gradients that there were not
        for module in replicas:
            fill_gradients(module, 1.0)
        if missing:
            replicas.module[0].weight.grad = None
        trainer.clip_grad_norm_(1.0)
        trainer.step(num_replicas)
    for module in replicas:
        assert_near(weights(module), {k: x - 2 * 0.5 * 3 for k, x in before.items()})
        assert all(p.grad is None for p in module.parameters())
    assert trainer.grad_norm is None  # of what the hook has replaced


def test_a_hook_after_the_step_may_write_weights():
    model = make_model().bfloat16()
    trainer = make_trainer(model)

    @torch.no_grad()
    def clamp(optimizer, args, kwargs):
        model[0].weight.clamp_(-0.1, 0.1)

    handle = trainer.optimizer.register_step_post_hook(clamp)
    for value in (4.0, 0.0):
        for parameter in trainer.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, value)
        trainer.step(1)
        handle.remove()
    assert model[0].weight.abs().max() <= 0.1


def test_a_program_may_wrap_the_optimizers_step():
    model = make_model()
    trainer = make_trainer(model)
    before = weights(model)
    inner, calls = trainer.optimizer.step, []

    def step(*args):
        calls.append(len(args))
        inner(*args)

    trainer.optimizer.step = step
    fill_gradients(model, 1.0)
    trainer.step(1)
    assert calls == [1] and all(p.grad is None for p in model.parameters())
    assert torch.equal(model[0].bias, before["0.bias"] - 0.5)


def test_hooks_run_where_no_parameter_has_a_gradient():
    trainer = make_trainer(make_model())
    seen = []
    trainer.optimizer.register_step_pre_hook(lambda *args: seen.append("pre"))
    trainer.optimizer.register_step_post_hook(lambda *args: seen.append("post"))
    trainer.step(1, ignore_stale_grad=True)
    assert seen == ["pre", "post"]


@pytest.mark.parametrize("optimizer", ["adamw", torch.optim.Adam])
def test_hooks_of_state_dicts_run_in_torchs_order(optimizer):
    trainer = torchkv.Trainer(make_model(), optimizer)
    optimizer = trainer.optimizer
    seen = []

    def note(name, result=None):
        def hook(of, *args):
            assert of is optimizer
            seen.append((name, *("note" in each for each in args)))
            if name.startswith("before loading"):
                args[0].pop("note", None)  # of a copy
            return result and result(*args)

        return hook

    optimizer.register_state_dict_pre_hook(note("before"))
    optimizer.register_state_dict_post_hook(note("after", lambda x: {**x, "note": 1}))
    optimizer.register_load_state_dict_pre_hook(note("before loading"))
    optimizer.register_load_state_dict_post_hook(note("after loading"))
    state = optimizer.state_dict()
    assert state["note"] == 1
    optimizer.load_state_dict(state)
    assert state["note"] == 1
    assert seen == [
        ("before",),
        ("after", False),
        ("before loading", True),
        ("after loading",),
    ]
    assert optimizer.state["0.bias"] and len(seen) == 4  # without them


def test_an_error_of_a_hook_changes_nothing():
    model = make_model()
    trainer = make_trainer(model)

    def refuse(*args):
        raise KeyError("no")

    handle = trainer.optimizer.register_step_pre_hook(refuse)
    before = weights(model)
    fill_gradients(model, 1.0)
    with pytest.raises(KeyError, match="no"):
        trainer.step(1)
    for name, value in weights(model).items():
        assert torch.equal(value, before[name])
    handle.remove()
    trainer.step(1)
    assert torch.equal(model[0].weight, before["0.weight"] - 0.5)


def test_the_optimizers_zero_grad_is_the_trainers():
    model = make_model()
    trainer = make_trainer(model)
    optimizer = trainer.optimizer
    fill_gradients(model, 1.0)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad.eq(0).all() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    other = copy.deepcopy(trainer)
    fill_gradients(model, 1.0)
    other.optimizer.zero_grad()
    assert all(p.grad is not None for p in model.parameters())
    del trainer
    gc.collect()
    with pytest.raises(RuntimeError, match=r"call model\.zero_grad\(\)"):
        optimizer.zero_grad()


def test_state_shows_what_the_optimizer_has_by_key():
    model = make_model()
    trainer = torchkv.Trainer(model, "adamw", {"learning_rate": 0.1})
    fill_gradients(model, 1.0)
    trainer.step(1)
    state = trainer.optimizer.state
    assert list(state) == list(weights(model))
    assert state["0.bias"]["step"] == 1
    assert state["0.bias"]["exp_avg"].shape == model[0].bias.shape
    state["0.bias"]["exp_avg"].fill_(9)  # a copy
    assert trainer.optimizer.state["0.bias"]["exp_avg"].lt(9).all()
    with pytest.raises(ValueError, match="call load_state_dict"):
        trainer.optimizer.state = state
    assert torchkv.optim.SGD().state == {}


def test_a_scaler_that_gets_the_optimizer_is_told_to_take_the_trainer():
    model = make_model()
    trainer = make_trainer(model)
    scaler = torch.amp.GradScaler("cpu")
    x, y = make_batches()[0]
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    with pytest.raises(RuntimeError, match=r"call scaler\.step\(trainer\)"):
        scaler.step(trainer.optimizer)
    scaler.step(trainer, 1)


def test_one_device_has_separate_updates_by_default():
    model = make_model()
    trainer = torchkv.Trainer(model, "sgd", {"learning_rate": 0.1})
    for x, y in make_batches():
        F.cross_entropy(model(x), y).backward()
        trainer.allreduce_grads()
        trainer.update(1)
    assert_near(weights(model), train_plainly(torch.optim.SGD, {"lr": 0.1}))
    trainer = make_trainer(model, update_on_kvstore=True)
    with pytest.raises(RuntimeError, match="update: the optimizer runs on the store"):
        trainer.update(1)


def test_a_parameter_has_one_trainer_that_steps_it():
    model = make_model()
    first = make_trainer(model)
    second = make_trainer(model[2])
    fill_gradients(model, 1.0)
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"no later Trainer has.*key '2\.(w|b)"):
        first.step(1)
    assert torch.equal(model[2].bias, before["2.bias"])
    copied_model, copied = pickle.loads(pickle.dumps((model, first)))
    fill_gradients(copied_model, 1.0)
    copied.step(1)
    second.step(1)
    assert torch.equal(model[2].bias, before["2.bias"] - 0.5)
    del second
    gc.collect()
    fill_gradients(model, 1.0)
    first.step(1)
    assert torch.equal(model[2].bias, before["2.bias"] - 0.5 - 0.5)


def test_each_parameter_is_stepped_by_its_latest_trainer():
    model = make_model()
    first = make_trainer(model, update_on_kvstore=False)
    second = make_trainer(model[2])
    third = make_trainer(model[0])
    fill_gradients(model, 1.0)
    before = weights(model)
    del third
    gc.collect()
    for call in (first.step, first.update, first.allreduce_grads):
        with pytest.raises(RuntimeError, match=r"no later Trainer has.*key '2\.(w|b)"):
            call()
    for name, weight in weights(model).items():
        assert torch.equal(weight, before[name])
    second.step()


def test_a_trainer_knows_all_later_trainers():
    model = make_model()
    first = make_trainer(model)
    second = make_trainer(model)
    del second
    gc.collect()
    third = make_trainer(model)
    fourth = make_trainer(model[2])
    del fourth
    gc.collect()
    fill_gradients(model, 1.0)
    with pytest.raises(RuntimeError, match="no later Trainer has"):
        first.step()
    third.step()


def test_a_trainer_may_replace_another():
    model = make_model()
    trainer = make_trainer(model)
    trainer = make_trainer(model)
    copied = copy.deepcopy((model, trainer))
    for model_of, trainer_of in (copied, (model, trainer)):
        fill_gradients(model_of, 1.0)
        before = weights(model_of)
        trainer_of.step(1)
        assert torch.equal(model_of[0].bias, before["0.bias"] - 0.5)


def test_params_are_the_names_also_before_the_first_step():
    model = make_model()
    trainer = make_trainer(model)
    names = [name for name, _ in model.named_parameters()]
    first = trainer.optimizer.param_groups[0]
    assert first["params"] == names
    trainer.optimizer.set_param_groups([{"keys": names[:2], "lr": 0.1}])
    in_groups = [group["params"] for group in trainer.optimizer.param_groups]
    assert in_groups[0] + in_groups[1] == names[2:] + names[:2]
    fill_gradients(model, 1.0)
    trainer.step(1)
    assert sorted(first["params"]) == sorted(names[2:])
