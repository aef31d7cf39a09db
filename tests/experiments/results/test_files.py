from pathlib import Path

import pytest

from gradwire.experiments.results.files import check_file, check_folder, prepared_folder, write_json

FULL = Path("/dev/full")  # a disk without space left


def test_what_can_be_written_is_accepted(tmp_path):
    (tmp_path / "old.json").touch()
    for path in (None, "", f"{tmp_path}/new.json", f"{tmp_path}/old.json"):
        check_file("json", path)
    for path in (None, "", f"{tmp_path}/new/folder", str(tmp_path), "here"):
        check_folder("out", path)
    assert [file.name for file in tmp_path.iterdir()] == ["old.json"]


def test_a_folder_is_no_file_and_a_file_no_folder(tmp_path):
    (tmp_path / "a.json").touch()
    with pytest.raises(
        ValueError, match=f"^json: {tmp_path} is a folder; name a file, such as {tmp_path}/figures.json"
    ):
        check_file("json", str(tmp_path))
    with pytest.raises(ValueError, match=f"^json: there is no folder {tmp_path}/new"):
        check_file("json", f"{tmp_path}/new/a.json")
    with pytest.raises(ValueError, match=f"^out: {tmp_path}/a.json is a file; name a folder"):
        check_folder("out", f"{tmp_path}/a.json/pictures")


def test_an_output_folder_is_made_with_nothing_in_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for _ in range(2):
        assert prepared_folder("~/new/folder") == tmp_path / "new" / "folder"
        assert list((tmp_path / "new").rglob("*")) == [tmp_path / "new" / "folder"]


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
def test_where_there_is_no_space_left_a_sentence_says_so():
    with pytest.raises(ValueError, match="cannot write --json /dev/full: No space left on device; the table above"):
        write_json({}, str(FULL))
