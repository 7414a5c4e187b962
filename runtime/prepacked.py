"""A cache of graphs as ONNX Runtime has optimized them, with weights packed for this CPU: they load faster and processes share their pages.

What is cached depends on the bundle's files, the CPU and ONNX Runtime's version, which name its folder; it is never part of a bundle.
Knows files. Does not know sessions.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from dspark.runtime.bundle import WEIGHTS, Bundle
from dspark.runtime.errors import EngineError

MODEL, PACKED = "model.onnx", "weights.bin"


class PrepackedCache:
    """The cached graphs of one bundle, below `folder`."""

    def __init__(self, folder: Path, bundle: Bundle, version: str) -> None:
        m = bundle.manifest
        weights = sorted(asdict(m.files[WEIGHTS]).items()) if m.weights.root is None else sorted(m.weights.files.items())
        self._bundle, self._common = bundle, repr((version, cpu_kind(), weights))
        self._folder = folder

    def model(self, graph: str, save: Callable[[Path], None]) -> Path:
        """Return the cached graph; `save` writes MODEL and PACKED into a folder where there is none yet.

        Raises EngineError where the folder cannot be written.
        """
        identity = self._common + self._bundle.manifest.files[f"{graph}.onnx"].sha256
        place = self._folder / f"{graph}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
        if not place.exists():
            try:
                self._write(graph, place, save)
            except OSError as error:
                if not place.exists():  # else another process was faster
                    raise EngineError(
                        f"the cache of packed weights {self._folder} cannot be written ({error}): name another folder"
                    ) from error
        return place / MODEL

    def _write(self, graph: str, place: Path, save: Callable[[Path], None]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{graph}-", dir=self._folder))
        try:
            save(scratch)
            scratch.chmod(0o755)  # other users' processes may share it
            os.rename(scratch, place)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def cpu_kind() -> str:
    """Return what tells this CPU's model and instructions from others."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kept = ("model name", "flags", "Features", "CPU part")
    return "; ".join(dict.fromkeys(line for line in lines if line.split("\t")[0].split(":")[0].strip() in kept))
