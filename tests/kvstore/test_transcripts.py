"""The scripts of the contract, line by line: stored values and printed lines."""

import pytest
import torch

from helpers import SHAPE, assert_same, full


def double_and_print(key, input, stored):
    print(f"update on key: {key}")
    stored += input * 2


def pulled(kv, key, device):
    out = torch.zeros(SHAPE, device=device)
    kv.pull(key, out=out)
    return out


def everywhere(value, devices):
    return [full(value, device) for device in devices]


def printed(capsys):
    return capsys.readouterr().out.splitlines()


def test_one_key(kv, devices, capsys):
    first = devices[0]
    kv.init(3, full(2, first))
    assert_same(pulled(kv, 3, first), full(2))

    kv.push(3, full(8, first))
    assert_same(pulled(kv, 3, first), full(8), "the default updater is ASSIGN")

    kv.push(3, everywhere(1, devices))
    assert_same(pulled(kv, 3, first), full(4), "a list is summed")

    kv._set_updater(double_and_print)
    assert_same(pulled(kv, 3, first), full(4), "setting an updater changes no value")
    assert printed(capsys) == []

    kv.push(3, full(1, first))
    assert printed(capsys) == ["update on key: 3"]
    assert_same(pulled(kv, 3, first), full(6))

    outs = everywhere(1, devices)
    kv.pull(3, out=outs)
    for out in outs:
        assert_same(out, full(6), "one pull fills several devices")
    assert printed(capsys) == []


def test_list_is_summed_and_updated_once(kv, devices, capsys):
    kv.init(3, full(0, devices[0]))
    kv.set_updater(double_and_print)
    kv.push(3, everywhere(1, devices))
    assert printed(capsys) == ["update on key: 3"]
    assert_same(pulled(kv, 3, devices[0]), full(8))


def test_a_list_of_one_is_not_summed(kv, devices, capsys):
    kv.init(3, full(0, devices[0]))
    kv.push(3, [full(5, devices[0])])
    assert_same(pulled(kv, 3, devices[0]), full(5))
    kv.set_updater(double_and_print)
    kv.push(3, [full(5, devices[0])])
    assert printed(capsys) == ["update on key: 3"]
    assert_same(pulled(kv, 3, devices[0]), full(15))


def test_list_of_keys(kv, devices, capsys):
    first = devices[0]
    kv.init(3, full(6, first))
    kv._set_updater(double_and_print)
    keys = [5, 7, 9]
    kv.init(keys, [full(1, first)] * 3)
    assert printed(capsys) == []
    kv.push(keys, [full(1, first)] * 3)
    assert printed(capsys) == [f"update on key: {key}" for key in keys]

    b = [full(0, first)] * 3
    kv.pull(keys, out=b)
    assert_same(b[1], full(3))

    b = [everywhere(1, devices)] * 3
    kv.push(keys, b)
    assert printed(capsys) == [f"update on key: {key}" for key in keys]
    kv.pull(keys, out=b)
    assert_same(b[1][1], full(11))
    assert_same(pulled(kv, 3, first), full(6), "the other key is as it was")


def test_type_device(kv, devices):
    first, three = devices[0], devices[:3]
    kv.init(3, full(-2, first))
    assert_same(pulled(kv, 3, first), full(-2))

    kv.push(3, full(-7, first))
    assert_same(pulled(kv, 3, first), full(-7))

    kv.push(3, everywhere(1, three))
    assert_same(pulled(kv, 3, first), full(3))

    keys = [7, 11, 13, 17]
    kv.init(keys, [full(-3, first)] * 4)
    shared = full(0, first)
    kv.pull(keys, out=[shared] * 4)
    assert_same(shared, full(-3))

    kv.push(keys, [everywhere(-0.1, three)] * 4)
    for key in keys:
        out = pulled(kv, key, first)
        assert_same(out, full(-0.1) + full(-0.1) + full(-0.1))
        assert out.cpu().numpy() == pytest.approx(-0.3)

    def hundredth(key, input, stored):
        stored += input * 0.01

    kv.set_updater(hundredth)
    assert_same(pulled(kv, 3, first), full(3), "a pull runs no updater")

    kv.push(3, full(5, first))
    assert_same(pulled(kv, 3, first), full(3) + full(5) * 0.01)
    assert pulled(kv, 3, first).cpu().numpy() == pytest.approx(3.05)
