"""From which step on second copies are stale."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.stale_copies import STALE, mark_stale, stale_from


def test_each_copy_has_its_own_step(tmp_path: Path) -> None:
    first, second = Path("/a/tiny"), Path("/b/tiny")
    mark_stale(tmp_path, first, 3)
    mark_stale(tmp_path, second, 0)
    mark_stale(tmp_path, first, 5)
    assert (stale_from(tmp_path, first), stale_from(tmp_path, second)) == (5, 0)
    mark_stale(tmp_path, second, None)
    assert (stale_from(tmp_path, first), stale_from(tmp_path, second)) == (5, None)
    mark_stale(tmp_path, first, None)
    mark_stale(tmp_path, first, None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", "[]", '{"/a": -1}', '{"/a": true}', '{"/a": 1e9}',
                                     '{"/a": 1' + "0" * 20 + "}", "[" * 9999])
def test_a_record_that_no_run_writes_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / STALE).write_text(content)
    assert stale_from(tmp_path, Path("/a")) is None
    mark_stale(tmp_path, Path("/a"), 1)
    assert stale_from(tmp_path, Path("/a")) == 1
