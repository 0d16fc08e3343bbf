"""The benchmark of sums by size runs, tiny."""

import distributed_sizes
from jobs import prefix_of_other_host
from smoke import assert_rounds, run_smoke


def test_measures_all_sizes(tmp_path):
    _, written = run_smoke("distributed_sizes", tmp_path, "--no-mxnet")
    names = {
        distributed_sizes.MEMORY,
        distributed_sizes.SOCKETS,
        distributed_sizes.GLOO,
    }
    if prefix_of_other_host():
        names.add(distributed_sizes.TCP)
    asked = [(case["ranks"], case["elements"]) for case in written["cases"]]
    assert asked == [(2, size) for size in distributed_sizes.SIZES[:2]]
    for case in written["cases"]:
        assert_rounds(case["seconds"], names)


def test_tables_are_by_number_of_ranks():
    seconds = {distributed_sizes.MEMORY: [1.0, 3.0, 2.0], distributed_sizes.GLOO: [8.0]}
    cases = [
        {"ranks": ranks, "elements": size, "seconds": seconds}
        for ranks in distributed_sizes.NUM_RANKS
        for size in (16, 256)
    ]
    tables = distributed_sizes.tables_of(cases)
    assert [table.title for table in tables] == [
        f"{ranks} ranks, medians" for ranks in distributed_sizes.NUM_RANKS
    ]
    assert [line[0] for line in tables[1].rows] == ["64 B", "1,024 B"]
    assert [line[-1] for line in tables[1].rows] == ["4.00", "4.00"]
