"""The plots of earlier runs stay when an example is run again."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.outputs import claim, clear, write_plot


def drawn(text: str, file: Path) -> None:
    def draw(new: Path) -> None:
        new.write_text(text)

    write_plot(file, draw)


def files(directory: Path) -> dict[str, str]:
    return {one.name: one.read_text() for one in directory.iterdir()}


def test_the_earlier_plot_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    drawn("first", tmp_path / "plot.png")

    def full_disk(file: Path) -> None:
        file.write_text("half")
        assert files(tmp_path)["plot.png"] == "first"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_plot(tmp_path / "plot.png", full_disk)
    assert files(tmp_path) == {"plot.png": "first"}


def test_a_new_run_removes_everything_but_plots(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").touch()
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "logs" / "log").touch()
    (run / "link").symlink_to(tmp_path / "outside")
    for name in ("plot.png", "plot-1.png", "story.json"):
        (run / name).touch()
    clear(run)
    assert sorted(one.name for one in run.iterdir()) == ["plot-1.png", "plot.png"]
    assert (tmp_path / "outside" / "file").exists()


def test_two_runs_at_the_same_time_do_not_share_a_folder(tmp_path: Path) -> None:
    claim(tmp_path / "run")
    clear(tmp_path / "run")
    with pytest.raises(OSError, match="another run writes there"):
        claim(tmp_path / "run")
    claim(tmp_path / "other")
