"""In the programs for torchkv, what mx.metric and mx.callback are in the others."""

import logging
import time

import torch


class Metric:
    """Accuracy and cross-entropy, as ``mx.metric.create(["accuracy", "ce"])``."""

    def __init__(self):
        """Begins with no batches."""
        self.batches = []

    def update(self, labels, probabilities):
        """Adds a batch, of which each device has a part."""
        for label, probability in zip(labels, probabilities, strict=True):
            right = probability.argmax(1) == label
            losses = -probability.detach().gather(1, label[:, None]).log()
            # Tensors: a number would wait for the device.
            self.batches.append((right.sum(), losses.sum(), len(label)))

    def get_name_value(self, begin=0):
        """Names and means, without what came before the update `begin`."""
        right, loss, size = torch.tensor(self.batches[begin:]).sum(0).tolist()
        return [("accuracy", right / size), ("cross-entropy", loss / size)]


def log_metric(epoch, part, metric):
    """Logs a metric of a part of the data, as Module.fit does."""
    for name, value in metric.get_name_value():
        logging.info(f"Epoch[{epoch}] {part}-{name}={value:.6f}")


class Speedometer:
    """Logs the speed and the metric of every `frequent` batches."""

    def __init__(self, batch_size, frequent):
        """Takes the arguments of ``mx.callback.Speedometer``."""
        self.batch_size = batch_size
        self.frequent = frequent

    def __call__(self, epoch, i, metric):
        """Counts batch `i`."""
        if i % self.frequent:
            return
        if i > 0:
            speed = self.frequent * self.batch_size / (time.time() - self.begin)
            # The first line has one batch more, as MXNet's.
            values = metric.get_name_value(i - self.frequent + (i > self.frequent))
            text = "\t".join(f"{name}={value:.6f}" for name, value in values)
            logging.info(
                f"Epoch[{epoch}] Batch [{i - self.frequent}-{i}]\t"
                f"Speed: {speed:.2f} samples/sec\t{text}"
            )
        self.begin = time.time()
