"""The Trainer's benchmark runs, tiny, and both contestants make the same step."""

import trainer
from smoke import assert_rounds, run_smoke


def test_measures_both_lists(tmp_path):
    output, written = run_smoke("trainer", tmp_path, "--rounds=4")
    assert [each["weights"] for each in written["trainer"]] == [
        "one of 64 MiB",
        "ResNet-50",
    ]
    for each in written["trainer"]:
        assert_rounds(each["seconds"], [trainer.OURS, trainer.TORCH])
    assert trainer.TORCH in output
    assert [target["limit"] for target in written["targets"]] == [1.1, 1.1]


def test_a_wrong_step_is_not_timed():
    for way in trainer.contestants([(3, 4), (5,)]).values():
        assert not way.agrees()  # no step has been made
        way.run(1)
        assert way.agrees()
        way.run(1)
        assert not way.agrees()
