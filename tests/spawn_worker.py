"""What the processes run that test_spawn.py starts; they import it by its name."""

import torch

from helpers import full, outcome


def use(stores, queue):
    """Replies with the content of each store, and with the result of a push."""
    answers = []
    for kv in stores:
        before = [(key, kv.pull(key).tolist()) for key in kv.keys()]
        kv.push(kv.keys()[0], [full(1), full(2)])
        answers.append((kv.type, before, kv.pull(kv.keys()[0]).tolist()))
    queue.put(answers)


def read(kv, queue):
    queue.put(outcome(lambda: kv.pull(3)))


def make_and_send(queue, done):
    """Sends a store from the child; stays alive until it has arrived."""
    from torchkv import create

    kv = create("device")
    kv.init("w", torch.arange(6.0).reshape(2, 3))
    queue.put(kv)
    done.wait(60)
