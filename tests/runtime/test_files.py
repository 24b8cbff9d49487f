import json
import os

import numpy as np
import pytest

from greedynas.runtime import files
from greedynas.runtime.files import Records, read_arrays, write_atomically, write_json


def test_a_write_that_fails_leaves_the_old_version(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    write_json(file, {"version": 1})
    for function in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, lambda *_: (_ for _ in ()).throw(OSError("no space left")))
            with pytest.raises(OSError, match="no space"):
                write_atomically(file, b"half of the new ver")
        assert json.loads(file.read_text()) == {"version": 1}
    write_json(file, {"version": 2})
    assert json.loads(file.read_text()) == {"version": 2}


def test_records_are_truncated_to_a_stored_length(tmp_path):
    file = tmp_path / "metrics.jsonl"
    records = Records(file)
    records.write(step=1)
    length = records.flush()
    records.write(step=2)
    records.flush()
    with file.open("ab") as handle:
        handle.write(b'{"step": 3, "los')  # a line that a crash has cut
    again = Records(file, length)
    again.write(step=2.5)
    again.flush()
    assert [json.loads(line) for line in file.read_text().splitlines()] == [{"step": 1}, {"step": 2.5}]


def test_records_that_are_shorter_than_stored_are_not_padded(tmp_path):
    """Check that lost metrics (such as a deleted file) are not replaced by zero bytes."""
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n')
    Records(file, 500).flush()
    assert file.read_bytes() == b'{"step": 1}\n'


def test_untrusted_arrays_are_read_without_pickles_and_within_limits(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "good.npz", a=np.arange(3), b=np.zeros((2, 2)))
    assert read_arrays(tmp_path / "good.npz", ["a"])["a"].tolist() == [0, 1, 2]
    np.savez_compressed(tmp_path / "pickle.npz", a=np.array([print], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        read_arrays(tmp_path / "pickle.npz", ["a"])
    monkeypatch.setattr(files, "MAX_ARRAYS", 10**6)
    np.savez_compressed(tmp_path / "bomb.npz", a=np.zeros(10**6))
    assert (tmp_path / "bomb.npz").stat().st_size < 10**5
    with pytest.raises(ValueError, match="unpacks to more than"):
        read_arrays(tmp_path / "bomb.npz", ["a"])


def test_a_full_disk_leaves_no_partial_file_and_the_error_names_the_file(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*a\.json"):
        write_json(tmp_path / "a.json", {})
    assert not list(tmp_path.iterdir())
