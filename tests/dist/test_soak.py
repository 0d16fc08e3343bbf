"""A short run of soak.py."""

import soak


def test_a_short_soak():
    # The seed alone decides what so many phases do.
    report = soak.soak(8.0, seed=1, least_phases=24)
    assert report.problems() == [], report
    assert report.stops > 0
    for what in ("phases", "pushes", "pulls", "values", "barriers", "inits", "rates"):
        assert report.counts[what] > 0, what
