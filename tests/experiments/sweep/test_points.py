from gradwire.experiments.sweep.points import POINTS, Finished, append_point, read_points


def test_a_line_that_a_crash_cut_short_is_left_out_and_does_not_spoil_the_next(tmp_path, caplog):
    whole = [Finished([key], {}, [], 1.0, "2026", "0.1.0", {}) for key in "abc"]
    append_point(tmp_path, whole[0])
    append_point(tmp_path, whole[1])
    text = (tmp_path / POINTS).read_text()
    (tmp_path / POINTS).write_text(text[:-20])
    assert [point.arguments for point in read_points(tmp_path).values()] == [["a"]]
    assert "line 2 is left out" in caplog.text
    append_point(tmp_path, whole[2])
    assert [point.arguments for point in read_points(tmp_path).values()] == [["a"], ["c"]]


def test_what_a_file_keeps_of_a_row_is_rounded_and_curves_are_whole_again(tmp_path):
    row = {
        "loss": [2.345678, None],
        "step": [1, 2],
        "eval.loss": 2.34567891,
        "sent_bytes": 37848576.0,
        "seconds": [0.1234567],
    }
    append_point(tmp_path, Finished(["a"], {}, [row], 1.0, "2026", "0.1.0", {}))
    assert '"step"' not in (tmp_path / POINTS).read_text()
    [[kept]] = [point.rows for point in read_points(tmp_path).values()]
    assert kept == {
        "loss": [2.3457, None],
        "step": [1, 2],
        "eval.loss": 2.34568,
        "sent_bytes": 37848576,
        "seconds": [0.12346],
    }
