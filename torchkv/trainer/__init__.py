"""Data-parallel training in one process: gluon's Trainer, and replicas of a module."""

from torchkv.trainer.replicas import Replicas, replicate
from torchkv.trainer.trainer import Trainer

__all__ = ["Replicas", "Trainer", "replicate"]
