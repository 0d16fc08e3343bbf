"""The benchmark of lookups runs, tiny, and wrong rows are not timed."""

import pytest
import torch

import lookups
from harness import Plan
from smoke import assert_rounds, run_smoke

PLAN = Plan(rounds=3, turn_s=0.01, budget_s=0.1)


def test_measures_all_cases(tmp_path):
    output, written = run_smoke("lookups", tmp_path, "--rounds=4")
    cases = written["cases"]
    assert_rounds(
        cases[lookups.LOOKUP], [lookups.TORCH, lookups.DENSE, lookups.ROW_SPARSE]
    )
    assert_rounds(cases[lookups.PUSH], [lookups.DENSE, lookups.ROW_SPARSE])
    assert lookups.PUSH in output
    assert [target["limit"] for target in written["targets"]] == [1.0, 2.0]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", [lookups.DENSE, lookups.ROW_SPARSE])
def test_wrong_rows_are_not_timed(name):
    table = torch.randn(50, 4)
    stores = lookups.stores_with(table)
    for store in stores.values():
        assert torch.equal(
            store.row_sparse_pull("table", row_ids=torch.arange(50)), table
        )
    row = torch.ones(1, 4)
    stores[name].push("table", lookups.rows_of(torch.tensor([7]), row, table.shape))
    with pytest.raises(Exception, match=name):
        lookups.measure_lookups(stores, table, torch.arange(50), PLAN)
