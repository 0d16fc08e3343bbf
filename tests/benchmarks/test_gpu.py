"""Shared by the GPU benchmarks: rotation, clocks, and the error without a GPU."""

import pytest
import torch

import cuda_model
import cuda_optimizers
import cuda_reduce
import gpu


@pytest.mark.parametrize("program", [cuda_model, cuda_optimizers, cuda_reduce])
def test_without_a_gpu_they_end_with_one_line(program, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        program.main(["--smoke"])
    assert "can use no GPU here; --device cpu makes" in end.value.code
    assert "\n" not in end.value.code
    assert capsys.readouterr().out == ""


def test_the_first_run_makes_every_call_once():
    made = []
    run = gpu.timed([lambda i=i: made.append(i) for i in range(5)], "cpu")
    run(1)
    assert made == [0, 1, 2, 3, 4]
    run(7)
    assert made[5:] == [0, 1, 2, 3, 4, 0, 1]


class FakeGpu:
    """Events of a GPU that takes a second for each call, and sleeps when told to."""

    def __init__(self, monkeypatch):
        self.log = []
        self.cycles_per_s = 1e9
        now = 0.0

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = now

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return (end.at - self.at) * 1e3

        def sleep(cycles):
            nonlocal now
            now += cycles / self.cycles_per_s
            self.log.append("sleep")

        def call():
            nonlocal now
            now += 1.0
            self.log.append("call")

        self.call = call
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", sleep)
        gpu.clock_rate.cache_clear()


@pytest.fixture
def fake_gpu(monkeypatch):
    yield FakeGpu(monkeypatch)
    gpu.clock_rate.cache_clear()


def test_the_gpus_clock_leaves_out_that_it_waits_for_the_host(fake_gpu):
    assert gpu.clock_rate() == pytest.approx(fake_gpu.cycles_per_s)
    run = gpu.timed([fake_gpu.call] * 3, "cuda")
    assert run(1) == pytest.approx(1)
    fake_gpu.log.clear()
    assert run(gpu.BATCH + 2) == pytest.approx(gpu.BATCH + 2)
    batches = "".join({"sleep": "s", "call": "c"}[each] for each in fake_gpu.log)
    assert batches == "s" + "c" * gpu.BATCH + "scc"


def test_the_delay_has_a_limit(fake_gpu, monkeypatch):
    assert gpu.clock_rate() == pytest.approx(1e9)
    slept = []
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(gpu, "MAX_DELAY_S", 3)
    clock = iter([0, 2, 10, 10 + 1000, 2000, 2000]).__next__
    monkeypatch.setattr(gpu.time, "perf_counter", clock)
    run = gpu.timed([fake_gpu.call], "cuda")
    for _ in range(3):
        run(1)
    # A millisecond; then 1.5 times two seconds; then not 1500.
    assert slept == pytest.approx([1e6, 3e9, 3e9])


def test_memory_in_turn_is_as_large_as_is_asked():
    assert gpu.num_turns(30, 100) == 4
    assert gpu.num_turns(100, 100) == gpu.num_turns(1000, 100) == 1


def test_copy_moves_the_bytes():
    copy = gpu.copy_of(8000, 20_000, "cpu")
    assert not copy.agrees()
    copy.run(1)
    assert copy.agrees()
