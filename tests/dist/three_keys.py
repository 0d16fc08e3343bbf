"""A store of three keys, steps of it, and what tests ask about their outcome."""

import torch

import torchkv

SIZES = {"a": (3,), "b": (40, 50), "c": (300, 301)}


def make(type="dist_sync", whole=False, **options):
    kv = torchkv.create(type, **options)
    generator = torch.Generator().manual_seed(0)
    for key, size in SIZES.items():
        kv.init(key, torch.randn(size, generator=generator), whole=whole)
    return kv


def step(kv, number, rank):
    generator = torch.Generator()
    gradients = []
    for size in SIZES.values():
        generator.manual_seed(100 * number + rank)
        gradients.append(torch.randn(size, generator=generator))
    out = [torch.empty(size) for size in SIZES.values()]
    kv.pushpull(list(SIZES), gradients, out=out)
    return out


def equal(values, others):
    return all(torch.equal(a, b) for a, b in zip(values, others, strict=True))
