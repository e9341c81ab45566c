from __future__ import annotations

from pathlib import Path

import pytest

from areal_core.runs.run_dir import atomic_dir, atomic_write


class Stop(Exception):
    pass


def test_atomic_write_when_the_block_ends_then_the_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")

    with atomic_write(path) as file:
        file.write("new é")
        assert path.read_text() == "old"

    assert path.read_text("utf-8") == "new é"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("mode", ["w", "wb"])
def test_atomic_write_when_the_block_raises_then_the_old_file_stays(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "f"
    path.write_text("old")

    def write() -> None:
        with atomic_write(path, mode) as file:
            file.write("half" if mode == "w" else b"half")
            raise Stop

    with pytest.raises(Stop):
        write()

    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_atomic_dir_when_the_block_ends_then_the_folder_appears_with_all_it_holds(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "d"

    with atomic_dir(target) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "x").write_text("1")
        assert not target.exists()

    assert (target / "sub" / "x").read_text() == "1"
    assert [p.name for p in target.parent.iterdir()] == ["d"]


def test_atomic_dir_when_the_block_raises_then_nothing_is_left(tmp_path: Path) -> None:
    def write() -> None:
        with atomic_dir(tmp_path / "d") as folder:
            (folder / "x").write_text("1")
            raise Stop

    with pytest.raises(Stop):
        write()

    assert list(tmp_path.iterdir()) == []


def test_atomic_dir_when_it_exists_then_only_overwrite_replaces_it(tmp_path: Path) -> None:
    target = tmp_path / "d"
    with atomic_dir(target) as folder:
        (folder / "old").write_text("1")

    with pytest.raises(FileExistsError), atomic_dir(target):
        pass
    with atomic_dir(target, overwrite=True) as folder:
        (folder / "new").write_text("2")

    assert [p.name for p in target.iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["d"]
