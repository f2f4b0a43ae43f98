"""Files of others are read as a whole within a limit."""

import io

from user_errors import rejects

from recnmt_hf._bounded_reading import read_bounded, read_small_text


def test_files_without_an_end_are_not_read(tmp_path):
    (tmp_path / "endless.json").symlink_to("/dev/zero")
    (tmp_path / "small.json").write_text('{"a": "ä"}', encoding="utf-8")
    assert read_small_text(tmp_path / "small.json") == '{"a": "ä"}'
    with rejects(field=str(tmp_path / "endless.json")):
        read_small_text(tmp_path / "endless.json")
    assert read_bounded(io.BytesIO(b"123"), "x", 3) == b"123"
    with rejects(field="x"):
        read_bounded(io.BytesIO(b"1234"), "x", 3)
