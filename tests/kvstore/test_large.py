"""Values of more than 2**31 elements: sizes and offsets are 64-bit."""

import os

import pytest
import torch

COUNT = 2_200_000_000


def free_bytes():
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(free_bytes() < 10 * 2**30, reason="needs 10 GiB of free memory")
@pytest.mark.parametrize(
    ("store_type", "replicas"),
    [
        ("local", 2),
        pytest.param("local", 1, marks=pytest.mark.slow),
        pytest.param("device", 1, marks=pytest.mark.slow),
        pytest.param("device", 2, marks=pytest.mark.slow),
    ],
)
def test_more_than_2_to_the_31_elements(kv, replicas):
    value = torch.zeros(COUNT, dtype=torch.int8)
    marks = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, COUNT - 2, COUNT - 1]
    for number, place in enumerate(marks, start=1):
        value[place] = number
    kv.init(3, torch.zeros(1, dtype=torch.int8).expand(COUNT))
    assert kv.shape(3) == (COUNT,)
    assert f"bytes={COUNT}" in repr(kv)

    kv.push(3, value if replicas == 1 else [value] * replicas)
    out = torch.full((COUNT,), -1, dtype=torch.int8)
    kv.pull(3, out=out)
    for number, place in enumerate(marks, start=1):
        assert out[place].item() == number * replicas
    del value
    # Clearing the marks must leave only zeros: no other element was written.
    out[torch.tensor(marks)] = 0
    assert torch.count_nonzero(out).item() == 0
