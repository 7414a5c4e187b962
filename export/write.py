"""Write a bundle directory atomically: everything goes to a temporary sibling, is flushed to disk, then renamed.

Knows files. Does not know graphs or models.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dspark.runtime.bundle import MANIFEST, FileRecord, record_file
from dspark.runtime.errors import ExportError


def check_output(output: Path, *, overwrite: bool) -> None:
    """Raise ExportError if `output` cannot become a bundle: it exists and is no empty directory (nor, to overwrite, a bundle)."""
    blocking = next((parent for parent in output.parents if parent.exists() and not parent.is_dir()), None)
    if blocking is not None:
        raise ExportError(f"{blocking} is no directory: choose another output than {output}")
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise ExportError(f"{output} exists and is no directory: choose another output")
    if not output.exists() or not any(output.iterdir()):
        return
    foreign = _foreign_files(output)
    if foreign:
        raise ExportError(f"{output} is not empty and holds {foreign[0]}, which is no part of a bundle: choose another output")
    if not overwrite:
        raise ExportError(f"{output} already holds a bundle: choose another output, or pass --overwrite")


@contextmanager
def atomic_directory(output: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary directory that becomes `output` if the block ends without an exception, and vanishes if not."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    except OSError as error:
        raise ExportError(f"{output} cannot be written ({error.strerror}): choose another output") from error
    try:
        scratch.chmod(0o755)
        yield scratch
        for path in sorted(scratch.rglob("*")):
            _sync(path)
        _sync(scratch)
        check_output(output, overwrite=overwrite)
        if output.exists():
            # Two renames: for a moment there is no bundle at `output`, never half of one.
            retired = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
            output.rename(retired / "old")
            scratch.rename(output)
            shutil.rmtree(retired)
        else:
            scratch.rename(output)
        _sync(output.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _foreign_files(directory: Path) -> list[str]:
    """Return the files of a directory that are not those of a bundle by its own manifest; all of them where there is none."""
    names = [path.relative_to(directory).as_posix() for path in sorted(directory.rglob("*")) if not path.is_dir()]
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        known = {MANIFEST, *manifest["files"]} if manifest["ops_contract"] and manifest["format_version"] else set()
    except (OSError, ValueError, KeyError, TypeError):
        known = set()
    return [name for name in names if name not in known]


def record_files(directory: Path) -> dict[str, FileRecord]:
    """Return the record of every file below a directory by relative path, in order."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): record_file(path) for path in paths}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
