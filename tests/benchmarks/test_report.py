"""Tables for terminals and for the documentation; targets, met and missed."""

import argparse
import json

import pytest

import report
from report import Table, Target, collect, contestants_table, duration, targets_table

TABLE = Table("Push", ["what", "us"], [["a", "1.0"], ["long_name", "12.5"]])


def test_text_is_aligned():
    assert TABLE.text() == "Push\nwhat         us\na           1.0\nlong_name  12.5"


def test_markdown_shows_names_as_they_are():
    assert TABLE.markdown() == (
        "Push\n\n| what | us |\n| --- | ---: |\n| a | 1.0 |\n| long\\_name | 12.5 |"
    )


@pytest.mark.parametrize(
    ("target", "row"),
    [
        (Target("a", 1.06, 1.05), ["a", "1.06 x", ">= 1.05 x", "yes"]),
        (Target("a", 1.04, 1.05), ["a", "1.04 x", ">= 1.05 x", "no"]),
        (
            Target("a", 0.5, 1.0, at_least=False, unit="us"),
            ["a", "0.50 us", "<= 1 us", "yes"],
        ),
        (
            Target("a", 1.5, 1.0, at_least=False, unit="us"),
            ["a", "1.50 us", "<= 1 us", "no"],
        ),
        (Target("a", None, 3.8), ["a", "-", ">= 3.8 x", "not measured"]),
    ],
)
def test_targets_are_reached_or_not(target, row):
    assert targets_table([target]).rows == [row]
    reached = {"yes": True, "no": False, "not measured": None}[row[-1]]
    assert target.as_dict()["reached"] is reached


def test_contestants_are_compared_round_by_round():
    figures = {
        "seconds": {"ours": [1.0, 2.0, 4.0], "MXNet": [3.0, 8.0, 8.0]},
        "mxnet": {"MXNet": "push; local"},
    }
    assert contestants_table("Push", figures, "ours").rows == [
        ["ours", "1 s", "2 s", "1.00"],
        ["MXNet (push; local)", "3 s", "8 s", "3.00"],
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.38e-6, "1.38 us"), (0.0123, "12.3 ms"), (1.5, "1.5 s"), (1e-7, "0.1 us")],
)
def test_durations_have_fitting_units(seconds, text):
    assert duration(seconds) == text


def options_for(path):
    return argparse.Namespace(json=path)


def test_figures_are_written_after_each_case(tmp_path):
    path = tmp_path / "figures.json"
    seen = []

    def cases():
        for i in range(3):
            seen.append(json.loads(path.read_text()) if path.exists() else None)
            yield {"case": i}

    found = collect(options_for(path), {"gpu": "x"}, "cases", cases())
    assert found == [{"case": 0}, {"case": 1}, {"case": 2}]
    assert seen == [
        None,
        {"gpu": "x", "cases": [{"case": 0}], "failed": []},
        {"gpu": "x", "cases": [{"case": 0}, {"case": 1}], "failed": []},
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["figures.json"]


def test_an_interrupt_leaves_what_was_measured(tmp_path, capsys):
    def cases():
        yield {"case": 0}
        raise KeyboardInterrupt

    path = tmp_path / "figures.json"
    assert collect(options_for(path), {}, "cases", cases()) == [{"case": 0}]
    assert "stopped after 1 cases" in capsys.readouterr().out
    assert json.loads(path.read_text()) == {"cases": [{"case": 0}], "failed": []}


def test_a_case_that_fails_leaves_the_others(tmp_path, capsys):
    options = options_for(tmp_path / "figures.json")
    failed = {"title": "the second", "error": "ValueError('x')"}

    def cases():
        yield {"case": 0}
        yield failed
        yield {"case": 2}
        raise RuntimeError("out of memory")

    assert collect(options, {}, "cases", cases()) == [{"case": 0}, {"case": 2}]
    assert options.failed == [failed, {"title": "case 3"}]
    told = capsys.readouterr()
    assert "failed: the second: ValueError('x')" in told.out
    assert "out of memory" in told.err
    options.smoke = options.plot = options.markdown = False
    facts = report.environment(None)
    with pytest.raises(SystemExit, match="2 cases failed: the second, case 3"):
        report.finish(options, facts, [TABLE], [Target("x", 1, 1)], lambda figure: None)
    assert json.loads(options.json.read_text())["targets"][0]["what"] == "x"
