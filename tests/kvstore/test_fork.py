"""A store used in a forked child raises a clear error there; it never deadlocks."""

import copy
import os
import pickle
import threading

import pytest
import torch

import torchkv
from helpers import (
    Add,
    add_input,
    assert_same,
    full,
    in_child,
    outcome,
    run_program,
    script,
    stored,
)

# Later Pythons warn about any fork beside threads; that is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

TIMEOUT_S = 30

SCRIPTED = script(Add())

CALLS = {
    "init": lambda kv: kv.init(5, full(1)),
    "push": lambda kv: kv.push(3, full(1)),
    "push a list": lambda kv: kv.push([3], [[full(1), full(1)]]),
    "pull": lambda kv: kv.pull(3, out=full(0)),
    "pull without out": lambda kv: kv.pull(3),
    "pushpull": lambda kv: kv.pushpull(3, full(1)),
    "broadcast": lambda kv: kv.broadcast(5, full(1), full(0)),
    "assign": lambda kv: kv.assign(3, full(1)),
    "delete": lambda kv: kv.delete(3),
    "keys": lambda kv: kv.keys(),
    "len": len,
    "in": lambda kv: 3 in kv,
    "shape": lambda kv: kv.shape(3),
    "dtype": lambda kv: kv.dtype(3),
    "set_updater(None)": lambda kv: kv.set_updater(None),
    "set_updater": lambda kv: kv.set_updater(add_input),
    "script updater": lambda kv: kv.set_updater(SCRIPTED),
    "set_optimizer": lambda kv: kv.set_optimizer("sgd"),
    "barrier": lambda kv: kv.barrier(),
    "num_dead_node": lambda kv: kv.num_dead_node(),
    "repr": repr,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "script object deepcopy": lambda kv: copy.deepcopy(kv.script_object),
    "script_object": lambda kv: kv.script_object.push(3, full(1)),
}


def test_every_call_raises_in_the_child(kv):
    kv.init(3, full(1))
    kv.push(3, [full(1)] * 2)
    outcomes = in_child(
        lambda: {name: outcome(lambda c=c: c(kv)) for name, c in CALLS.items()}
    )
    for name, text in outcomes.items():
        assert text.startswith("RuntimeError: "), f"{name}: {text}"
        assert "fork" in text, f"{name}: {text}"
    assert_same(stored(kv, 3), full(2), "the parent goes on")
    kv.push(3, full(7))
    assert_same(stored(kv, 3), full(7))


def test_the_child_may_drop_print_and_close_the_store(store_type):
    held = [torchkv.create(store_type)]
    held[0].set_updater(script(Add()))
    held[0].init(3, full(1))

    def drop():
        outcome(lambda: repr(held[0]))
        outcome(lambda: held[0].close())
        held.clear()
        return "alive"

    assert in_child(drop) == "alive"
    assert_same(stored(held[0], 3), full(1))


def test_closing_in_the_child_does_nothing(kv):
    kv.init(3, full(1))
    kv.set_updater(add_input)

    def close():
        with kv:
            pass
        with pytest.raises(ZeroDivisionError), kv:
            raise ZeroDivisionError
        kv.close()
        kv.script_object.close()
        return outcome(lambda: kv.pull(3))

    text = in_child(close)
    assert text.startswith("RuntimeError: ") and "fork" in text, text
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(2), "the parent goes on")


def test_a_store_made_in_the_child_works_there(store_type):
    torchkv.create(store_type).init(3, full(1))

    def use():
        with torchkv.create(store_type) as store:
            store.init(3, full(1))
            store.push(3, [full(1)] * 4)
            return store.pull(3)[0, 0].item()

    assert in_child(use) == 4.0


@pytest.mark.parametrize("layout", ["dense", "strided"])
def test_large_sums_in_a_child(store_type, layout):
    """OpenMP deadlocks in the child of a process that has used it."""
    values = [torch.ones(500_000, 2)[:, 1] for _ in range(4)]
    if layout == "dense":
        values = [value.contiguous() for value in values]
    zeros, outs = torch.zeros(500_000), [torch.zeros(500_000) for _ in range(2)]
    assert torch.get_num_threads() > 1 or os.cpu_count() == 1

    def use():
        with torchkv.create(store_type) as store:
            store.init([3, 5], [zeros] * 2)
            store.push([3, 5], [values, values])
            store.set_optimizer("sgd", learning_rate=1)
            store.push([3, 5], [values, values])
            store.pull([3, 5], out=outs)
            return [out[::1000].sum().item() for out in outs]

    assert use() == [0, 0]
    assert in_child(use) == [0, 0]


def test_large_copies_in_a_child(store_type):
    """PyTorch's own operators use OpenMP, too."""
    size = 500_000
    half, double = torch.ones(size).half(), torch.ones(size, dtype=torch.float64)
    strided, transposed = torch.ones(size, 2)[:, 1], torch.ones(500, 1000).t()
    zeros, outs = torch.zeros(1000, 500), [double.clone(), torch.zeros(1000, 500)]

    def use():
        with torchkv.create(store_type) as store:
            store.init(["half", "strided", "dense"], [half, strided, zeros])
            store.set_optimizer("sgd", learning_rate=1)
            store.push(["half", "dense"], [double, transposed])
            store.assign("half", half)  # compared with the optimizer's copy
            store.pull(["half", "dense"], out=outs)
            store.pull("strided", out=strided)
            return [out[:9].sum().item() for out in (outs[0], outs[1][0], strided)]

    assert use() == [9, -9, 9]
    assert in_child(use) == [9, -9, 9]


def test_a_child_of_a_process_without_stores(tmp_path):
    """As a DataLoader's worker: the parent has used OpenMP, but no store."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, torch, torchkv, warnings\n"
        "warnings.simplefilter('ignore', DeprecationWarning)\n"  # Python 3.12's
        "zeros, ones = torch.zeros(2_000_000), torch.ones(2_000_000).mul_(1)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        f"    signal.alarm({TIMEOUT_S})\n"
        "    store = torchkv.create()\n"
        "    store.init(3, zeros)\n"
        "    store.push(3, [ones, ones])\n"
        "    os._exit(int(store.pull(3)[-1]))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = run_program(program)
    assert (done.stdout, done.stderr) == ("2\n", "")


@pytest.mark.parametrize("updater", ["assign", "sgd", "python", "script"])
def test_fork_while_other_threads_push(kv, updater):
    kv.init([3, 5], [torch.zeros(50000)] * 2)
    if updater == "sgd":
        kv.set_optimizer("sgd")
    elif updater != "assign":
        kv.set_updater(add_input if updater == "python" else script(Add()))
    done = threading.Event()
    values = [[torch.ones(50000)] * 4] * 2

    def pusher():
        while not done.is_set():
            kv.push([3, 5], values)
            kv.pull([3, 5])

    threads = [threading.Thread(target=pusher, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(8):
            outcomes = in_child(
                lambda: [outcome(lambda c=c: c(kv)) for c in CALLS.values()]
            )
            assert all("fork" in text for text in outcomes), outcomes
    finally:
        done.set()
        for thread in threads:
            thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)
    kv.set_updater(None)
    kv.push(3, values[0])
    assert_same(stored(kv, 3), torch.full((50000,), 4.0))


class Setter(torch.nn.Module):
    """Sets one updater after another, without the GIL."""

    def __init__(self, kv):
        super().__init__()
        self.kv = kv.script_object
        self.one, self.two = Add(), Add()

    def forward(self) -> None:
        for _ in range(20):
            self.kv.set_updater(self.one)
            self.kv.set_updater(self.two)


SETTERS = {
    "python": lambda kv: lambda: kv.set_updater(lambda *args: None),
    "script": lambda kv: lambda: kv.set_updater(SCRIPTED),
    "from TorchScript": lambda kv: script(Setter(kv)),
}


@pytest.mark.parametrize("setter", SETTERS.values(), ids=SETTERS)
def test_fork_while_another_thread_sets_updaters(setter):
    """The child uses the state that all updaters of a process share."""
    kept = [torchkv.create() for _ in range(400)]
    for store in kept:
        store.set_updater(Add().forward)
    kv, done = torchkv.create(), threading.Event()
    set_updater, updater = setter(kv), script(Add())
    for _ in range(3):
        set_updater()

    def set_them():
        while not done.is_set():
            set_updater()

    def use():
        with torchkv.create() as store:
            store.init(3, full(1))
            for thing in (add_input, updater):
                store.set_updater(thing)
                store.push(3, full(1))
            return store.pull(3)[0, 0].item()

    thread = threading.Thread(target=set_them, daemon=True)
    thread.start()
    try:
        assert [in_child(use, TIMEOUT_S) for _ in range(20)] == [3.0] * 20
    finally:
        done.set()
        thread.join(TIMEOUT_S)
    assert not thread.is_alive()


class Items(torch.utils.data.Dataset):
    """A data set that (wrongly) uses its parent's store and returns the outcome."""

    def __init__(self, kv):
        self.kv = kv

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return outcome(lambda: self.kv.pull(3))


@pytest.mark.parametrize("pushing", [False, True])
def test_data_loader_worker(kv, pushing):
    kv.init(3, full(1))
    done = threading.Event()

    def pusher():
        while not done.is_set():
            kv.push(3, [full(1)] * 4)

    thread = threading.Thread(target=pusher, daemon=True)
    loader = torch.utils.data.DataLoader(
        Items(kv), num_workers=1, multiprocessing_context="fork", timeout=TIMEOUT_S
    )
    if pushing:
        thread.start()
    try:
        outcomes = [text for batch in loader for text in batch]
    finally:
        done.set()
    if pushing:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    assert len(outcomes) == 4
    for text in outcomes:
        assert text.startswith("RuntimeError: ") and "fork" in text, text
    kv.push(3, full(5))
    assert_same(stored(kv, 3), full(5))
