"""A short run of soak.py."""

import soak


def test_a_short_soak():
    report = soak.soak(8.0, seed=1)
    assert report.problems() == [], report
    assert report.stops > 0
    for what in ("phases", "pushes", "pulls", "values", "barriers", "inits", "rates"):
        assert report.counts[what] > 0, what
