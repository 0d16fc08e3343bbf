"""The benchmark of checkpoints runs, once and small: a smoke test without timing."""

from smoke import assert_rounds, run_smoke


def test_prints_a_table_and_writes_json_and_a_plot(tmp_path):
    _, written = run_smoke("checkpoint", tmp_path)
    assert len(written["large"]) == 2
    for of_store in written["large"].values():
        names = ["store.save", "save_file, fsync", "store.load"]
        assert_rounds(of_store["seconds"], names)
    assert_rounds(written["many"]["seconds"], ["store.save", "store.load"])
    assert all(target["value"] for target in written["targets"])
