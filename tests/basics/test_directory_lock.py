
import pytest

from basics.directory_lock import LOCK_NAME, locked
from basics.errors import UserError


def test_a_temporary_directory_goes_with_its_lock(tmp_path):
    directory = tmp_path / "a/b"
    with locked(directory, busy="busy", is_temporary=True):
        (directory / LOCK_NAME).touch()  # as where directories cannot be locked
        with pytest.raises(UserError, match="busy"), locked(directory, busy="busy"):
            pass
    assert not directory.exists()
    with locked(directory, busy="busy", is_temporary=True):
        (directory / "state").touch()
    with locked(directory, busy="busy"):
        (directory / "state").unlink()
    assert directory.is_dir()
