"""TensorRT and TensorRT-RTX as one: the module, its libraries, its dtypes and log, with errors that name the remedy.

Knows how the two differ where they are loaded. Does not know graphs.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

from dspark.runtime.engines import FLAVOURS
from dspark.runtime.errors import EngineError

DTYPES = {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16", "float32": "FLOAT", "int64": "INT64"}
"""TensorRT's names of our dtypes."""

_CORE, _PARSER = "libtensorrt_rtx.so", "libtensorrt_onnxparser_rtx.so"
_links: list[tempfile.TemporaryDirectory[str]] = []


def load_module(flavour: str) -> Any:
    """Return the Python module of a flavour. Raises EngineError naming the extra to install."""
    module = FLAVOURS[flavour]
    if flavour == "tensorrt-rtx":
        _link_libraries(module)
    try:
        trt = importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise EngineError(f'{flavour} needs the module {module} ({error}): pip install "dspark[{flavour}]"') from error
    return trt


def _link_libraries(module: str) -> None:
    """Load the libraries of the wheel through a folder that also has the name the parser asks for.

    At the first plugin the parser opens `libtensorrt_rtx.so` in the folder it was loaded from. The wheel of 1.7.1 holds only `.so.1`, and
    what is thrown then ends the process. Nothing is written into the wheel's own folder.
    """
    found = importlib.util.find_spec(f"{module}_libs")
    folder = Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None
    if _links or folder is None or (folder / _CORE).exists() or not (folder / f"{_CORE}.1").exists():
        return
    if module in sys.modules:
        raise EngineError(
            f"{module} was imported before dspark could load its libraries, and would end the process at the first plugin: "
            f"import it later, or make a link {folder / _CORE} to {_CORE}.1"
        )
    _links.append(tempfile.TemporaryDirectory(prefix="dspark-tensorrt-rtx-"))
    links = Path(_links[0].name)
    for name in (_CORE, f"{_CORE}.1", f"{_PARSER}.1"):
        (links / name).symlink_to(folder / (name if name.endswith(".1") else f"{name}.1"))
    for name in (f"{_CORE}.1", f"{_PARSER}.1"):
        ctypes.CDLL(str(links / name))


def make_log(trt: Any) -> Any:
    """Return a logger that keeps errors, as `errors`, for our messages and prints nothing."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(message)

    return Log()
