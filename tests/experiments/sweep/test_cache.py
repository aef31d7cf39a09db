from gradwire.experiments.sweep.cache import POINTS, Finished, append_point, read_points


def test_a_line_that_a_crash_cut_short_is_left_out_and_does_not_spoil_the_next(tmp_path, caplog):
    whole = [Finished(key, [], {}, [], 1.0, "2026", "0.1.0", {}) for key in "abc"]
    append_point(tmp_path, whole[0])
    append_point(tmp_path, whole[1])
    text = (tmp_path / POINTS).read_text()
    (tmp_path / POINTS).write_text(text[:-20])
    assert list(read_points(tmp_path)) == ["a"]
    assert "line 2 is left out" in caplog.text
    append_point(tmp_path, whole[2])
    assert list(read_points(tmp_path)) == ["a", "c"]
