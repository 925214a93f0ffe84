"""Files that commands write: checked before the run, locked while it lasts, and there whole or not at all.

A file is prepared beside its place as NAME.part and renamed when it is complete and on disk. NAME.lock names the process that
writes it. Both are removed in the end; what a killed process leaves behind stops nobody.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from edgexpert.core.errors import UserError

PART, LOCK, UNFINISHED = ".part", ".lock", ".unfinished"
LONGEST_NAME = 255 - len(PART.encode())
FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up", errno.EFBIG: "a file may not be so large"}


def checked_file(path: Path, *, force: bool = True) -> Path:
    """The place of a file to write, links followed.

    Args:
        force: whether a file that is there may be replaced.

    Raises:
        UserError: no regular file can stand there, or one does and must not be replaced.
    """
    try:
        target = path.expanduser().resolve()
        mode = target.stat().st_mode if target.exists() else None
        inside = target.parent.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"the name {_shown(path)} cannot be a file's ({_reason(error)}); give another one") from None
    if len(os.fsencode(target.name)) > LONGEST_NAME:
        raise UserError(f"the name {_shown(path)} is too long; give one of at most {LONGEST_NAME} bytes")
    if mode is not None and stat.S_ISDIR(mode):
        raise UserError(f"the output {path} is a folder; give the name of a file")
    if not inside:
        raise UserError(f"there is no folder {target.parent} to write {target.name} into; make it first")
    if mode is not None and not stat.S_ISREG(mode):
        raise UserError(f"the output {path} is no regular file; give the name of one, or a new name")
    if mode is not None and not force:
        raise UserError(f"the file {path} exists; give another name, remove it, or replace it with `force`")
    if not os.access(target.parent if mode is None else target, os.W_OK):
        raise UserError(f"the output {path} is write-protected; give another name")
    return target


@contextmanager
def output_file(path: Path, *, force: bool = True) -> Iterator[Path]:
    """Gives the name under which a file is to be written. After the block it stands complete under its own, or is not there.

    Args:
        force: whether a file that is there may be replaced.

    Raises:
        UserError: as in `checked_file`, before the block; another process writes the same file; or the disk is full.
    """
    target = checked_file(path, force=force)
    part = target.with_name(target.name + PART)
    with writing(path), locked(target.with_name(target.name + LOCK), path):
        try:
            with part.open("wb"):
                pass  # what forbids it is told before the run
            yield part
            synced(part)
            part.replace(target)
            synced(target.parent)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def output_folder(folder: Path) -> Iterator[Path]:
    """Makes a folder for several results, unless it is there, and holds its lock.

    Raises:
        UserError: no folder can stand there, another process writes into it, or the disk is full.
    """
    place = folder.expanduser()
    if place.exists() and not place.is_dir():
        raise UserError(f"the output {folder} is no folder; give the name of one")
    with writing(folder):
        place.mkdir(parents=True, exist_ok=True)
        with locked(place / LOCK, folder):
            yield place


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Holds the lock of a folder that is not there yet, and gives the place beside it in which it is prepared.

    Raises:
        UserError: it is there, cannot be made, or another process is making it; or the disk is full.
    """
    place = folder.expanduser()
    with writing(folder):
        if place.exists():
            raise UserError(f"the folder {folder} exists; give another folder, or remove it first")
        place.parent.mkdir(parents=True, exist_ok=True)
        with locked(place.with_name(place.name + LOCK), folder):
            yield unfinished(place)


def unfinished(folder: Path) -> Path:
    """Where a folder is prepared that is not there yet."""
    return folder.with_name(folder.name + UNFINISHED)


@contextmanager
def locked(lock: Path, output: Path) -> Iterator[None]:
    """Holds the lock of an output, which names the process that has it.

    Raises:
        UserError: another process, or another output of this one, holds it; says which process and which output.
    """
    with _acquired(lock, output) as file:
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)  # while it is held: who waits for this inode sees that it is gone


def _acquired(lock: Path, output: Path) -> IO[str]:
    while True:
        with writing(output):
            file = lock.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, lock):  # else its owner removed it between the two lines above
                return file
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip()
            file.close()
            if owner == str(os.getpid()):
                raise UserError(f"the output {output} would be written twice at once; give two names") from None
            raise UserError(f"the process {owner or 'of another user'} is writing {output}; wait until it has finished, or give "
                            "another name") from None
        file.close()


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def writing(output: Path, advice: str = "make room, or give another place") -> Iterator[None]:
    """Turns what the system or a library says when it cannot write ``output`` into a `UserError`.

    Errors of reading pass: those that name a file which is not the output's.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = _reason_to_tell(error, output)
        if reason is None:
            raise
        raise UserError(f"the output {output} cannot be written ({reason}); {advice}") from error


def _reason_to_tell(error: Exception, output: Path) -> str | None:
    """Why ``output`` cannot be written, or None where the error is about something else."""
    text = str(error)
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (found := re.search(r"os error (\d+)|[Ee]rrno (\d+)", text)):  # as safetensors says it, and Arrow
        number = int(found[1] or found[2])
    if number in FULL:
        return FULL[number]
    if "inline_container" in text or "iostream error" in text:  # torch.save gives no number
        return "the disk is full, or a file may not be so large"
    if isinstance(error, OSError) and error.filename is not None:
        named = Path(os.fsdecode(error.filename)).absolute()
        place = output.expanduser().resolve()
        beside = named.parent == place.parent and named.name.startswith(place.name)
        if beside or place in named.parents:
            return _reason(error)
    return None


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) else str(error)
    return (text or type(error).__name__).lower()


def _shown(path: Path) -> str:
    """A path that may hold anything, shortened."""
    text = repr(str(path))
    return text if len(text) < 80 else f"{text[:40]}...{text[-20:]}"


def synced(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
