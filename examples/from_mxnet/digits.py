"""The data and first weights of the programs: scikit-learn's 8x8 digits, in NumPy."""

import numpy as np
from sklearn.datasets import load_digits

BATCH_SIZE = 40
NUM_TEST = 357


def load():
    """Images from 0 to 1, of shape (N, 1, 8, 8), and labels; then those of the test."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(labels))
    images = (pixels[order] / 16).reshape(-1, 1, 8, 8).astype(np.float32)
    labels = labels[order].astype(np.int64)
    train = images[NUM_TEST:], labels[NUM_TEST:]
    return train, (images[:NUM_TEST], labels[:NUM_TEST])


def batches(data, epoch, rank=0, num_workers=1):
    """One epoch of a worker's part of the data, in another order each epoch."""
    images, labels = (part[rank::num_workers] for part in data)
    order = np.random.RandomState(1 + epoch).permutation(len(labels))
    for begin in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
        batch = order[begin : begin + BATCH_SIZE]
        yield images[batch], labels[batch]


def first_weights(shapes):
    """Weights of these shapes, as Xavier; zeros for biases."""
    random = np.random.RandomState(2)
    return [
        random.uniform(-1, 1, shape).astype(np.float32)
        * np.sqrt(6 / (shape[0] + np.prod(shape[1:])), dtype=np.float32)
        if len(shape) > 1
        else np.zeros(shape, np.float32)
        for shape in shapes
    ]


def report(epoch, losses, outputs, labels):
    """Prints the mean loss of an epoch, and how many of the test are right."""
    accuracy = (outputs.argmax(axis=1) == labels).mean()
    print(f"epoch {epoch}: loss {np.mean(losses):.4f}, accuracy {accuracy:.3f}")
