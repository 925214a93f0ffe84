"""What commands write is there whole or not at all, and nothing but a regular file is written."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from edgexpert.core.errors import UserError
from edgexpert.core.output import LONGEST_NAME, new_folder, output_file, output_folder


def test_a_file_stands_complete_or_not_at_all(tmp_path: Path) -> None:
    place = tmp_path / "a.txt"
    with output_file(place) as part:
        part.write_text("new")
        assert not place.exists()
    assert place.read_text() == "new"
    with pytest.raises(ZeroDivisionError), output_file(place) as part:
        part.write_text(str(1 // len(part.read_text())))
    assert place.read_text() == "new"
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize(("make", "message"), [
    (lambda folder: folder / "none" / "a", "there is no folder"),
    (lambda folder: folder, "is a folder"),
    (lambda folder: Path("/dev/null"), "is no regular file"),
    (lambda folder: folder / "fifo", "is no regular file"),
    (lambda folder: folder / "to_null", "is no regular file"),
    (lambda folder: folder / "loop", "cannot be a file's|loop"),
    (lambda folder: folder / ("n" * 256), "cannot be a file's|too long"),
    (lambda folder: folder / ("ü" * (LONGEST_NAME // 2 + 1)), "too long"),
    (lambda folder: folder / "nul\0", "cannot be a file's"),
    (lambda folder: folder / "file" / "a", "there is no folder|cannot be a file's"),
])
def test_what_can_be_no_file_is_refused_before_the_run(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "to_null").symlink_to("/dev/null")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=message), output_file(make(tmp_path)):
        pytest.fail("the run began")
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "fifo").is_fifo() and Path("/dev/null").is_char_device()


def test_the_longest_name_is_written(tmp_path: Path) -> None:
    with output_file(tmp_path / ("n" * LONGEST_NAME)) as part:
        part.write_text("x")


def test_links_are_followed_even_to_what_is_not_there_yet(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real" / "a")
    for content in ("one", "two"):
        with output_file(tmp_path / "link") as part:
            part.write_text(content)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "a").read_text() == content


def test_an_existing_file_is_kept_where_it_must_not_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(UserError, match="exists"), output_file(tmp_path / "a", force=False):
        pass
    assert (tmp_path / "a").read_text() == "old"


def test_a_second_writer_is_told_which_process_has_the_file(tmp_path: Path) -> None:
    place = tmp_path / "a"
    held = ("import sys, pathlib\nfrom edgexpert.core.output import output_file\n"
            "with output_file(pathlib.Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()")
    with subprocess.Popen([sys.executable, "-c", held, place], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(UserError, match=f"process {other.pid} is writing {place}"), output_file(place):
            pass
        other.kill()
    assert {file.name for file in tmp_path.iterdir()} == {"a.part", "a.lock"}, "a killed process leaves both"
    with output_file(place) as part:
        part.write_text("x")
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_one_process_does_not_write_one_file_twice_at_once(tmp_path: Path) -> None:
    with output_file(tmp_path / "a"), pytest.raises(UserError, match="twice"), output_file(tmp_path / "a"):
        pass


def save_text(part: Path) -> None:
    part.write_bytes(bytes(1 << 20))


def save_tensors(part: Path) -> None:
    save_file({"x": torch.zeros(1 << 18)}, part)


def save_checkpoint(part: Path) -> None:
    torch.save({"x": torch.zeros(1 << 18)}, part)


def save_table(part: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": list(range(1 << 17))}), part, compression="none", use_dictionary=False)


def save_drawing(part: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(20, 20))
    figure.subplots().imshow(torch.rand(1000, 1000))
    figure.savefig(part, format="png")


@pytest.mark.parametrize("save", [save_text, save_tensors, save_checkpoint, save_table, save_drawing])
def test_a_file_size_limit_ends_with_one_sentence_and_no_file(tmp_path: Path, save: Callable[[Path], None]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(UserError, match="cannot be written"), output_file(tmp_path / "a") as part:
            save(part)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_what_has_nothing_to_do_with_the_output_passes(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), output_file(tmp_path / "a"):
        (tmp_path / "other").read_text()
    with pytest.raises(UserError, match="no such file"), output_file(tmp_path / "a") as part:
        part.unlink()


def test_a_folder_is_made_by_one_writer_at_a_time(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "new"
    with new_folder(place) as unfinished:
        unfinished.mkdir()
        with pytest.raises(UserError, match=f"{place} would be written twice"), new_folder(place):
            pass
        unfinished.rename(place)
    with pytest.raises(UserError, match="exists; give another folder"), new_folder(place):
        pass
    assert [entry.name for entry in place.parent.iterdir()] == ["new"]


def test_a_folder_of_results_is_written_by_one_at_a_time_and_may_be_there(tmp_path: Path) -> None:
    for _ in range(2):
        with output_folder(tmp_path / "out") as place:
            (place / "result").write_text("x")
            with pytest.raises(UserError, match="twice"), output_folder(tmp_path / "out"):
                pass
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["result"]
    with pytest.raises(UserError, match="is no folder"), output_folder(tmp_path / "out" / "result"):
        pass
