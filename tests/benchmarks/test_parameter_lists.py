"""The parameter lists match the models that they are named after."""

from collections import Counter

import pytest

from parameter_lists import (
    OPT_LAYERS,
    num_parameters,
    opt_1_3b,
    opt_that_fits,
    resnet50,
    shrunk,
)


def test_resnet50_is_torchvisions():
    shapes = resnet50()
    assert len(shapes) == 161
    assert num_parameters(shapes) == 25_557_032
    assert shapes[:3] == [(64, 3, 7, 7), (64,), (64,)]
    # The first block's three convolutions and its shortcut, without their norms.
    assert [shape for shape in shapes[3:15] if len(shape) == 4] == [
        (64, 64, 1, 1),
        (64, 64, 3, 3),
        (256, 64, 1, 1),
        (256, 64, 1, 1),
    ]
    assert shapes[-2:] == [(1000, 2048), (1000,)]
    assert Counter(map(len, shapes)) == {4: 53, 2: 1, 1: 107}


def test_opt_has_the_size_of_its_name():
    shapes = opt_1_3b()
    assert num_parameters(shapes) == 1_315_758_080
    assert len(shapes) == 4 + OPT_LAYERS * 16
    assert shapes[:4] == [(50272, 2048), (2050, 2048), (2048,), (2048,)]
    assert Counter(shapes[4:20]) == {
        (2048, 2048): 4,
        (2048,): 4 + 2 + 1 + 2,
        (8192, 2048): 1,
        (8192,): 1,
        (2048, 8192): 1,
    }
    assert shapes[4:20] * OPT_LAYERS == shapes[4:]


@pytest.mark.parametrize("layers", [1, 5, 24])
def test_opt_keeps_the_layers_that_fit(layers):
    needed = 20 * num_parameters(opt_1_3b(layers))
    assert opt_that_fits(needed, 20) == layers
    assert opt_that_fits(needed - 1, 20) == max(1, layers - 1)


def test_opt_keeps_one_layer_at_least_and_all_at_most():
    assert opt_that_fits(0, 20) == 1
    assert opt_that_fits(1e15, 20) == OPT_LAYERS


def test_shrunk_lists_have_as_many_tensors():
    shapes = shrunk(resnet50(), 100)
    assert len(shapes) == 161
    assert max(shapes) == (100,)
    assert min(shapes) == (64,)
