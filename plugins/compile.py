"""Kernels to machine code with NVRTC, on the machine that runs them: no host compiler, no CUDA toolkit, no GPU needed.

Knows NVRTC's C interface (through ctypes, from a wheel or a CUDA toolkit) and the cache; not the kernels, and not how code is loaded.
One cubin holds all kernels of a call. It is cached under the hash of everything it depends on, so nothing ever invalidates an entry.
"""

from __future__ import annotations

import base64
import ctypes
import ctypes.util
import hashlib
import importlib.metadata
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from dspark.plugins.kernels import SOURCES, Launch
from dspark.plugins.rules import PluginError

_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
"""Wheels of NVRTC: ours, and the one that a torch for CUDA 12 brings along."""

_BUILTINS = re.compile(r"libnvrtc-builtins\.so[.\d]*|nvrtc-builtins64_\d+\.dll")
_LIBRARY = re.compile(r"libnvrtc\.so[.\d]*|nvrtc64_\d+_\d+\.dll")


class CompilerMissingError(PluginError):
    """NVRTC is not installed; the message names the extra."""


class CompileError(PluginError):
    """NVRTC refused the program; the message holds its log."""


@dataclass(frozen=True)
class Binary:
    """Machine code for one compute capability; the symbol of each kernel by its name expression; what the assembler said they use."""

    cubin: bytes
    symbols: dict[str, str]
    log: str = field(compare=False)


def compile_kernels(launches: Iterable[Launch], capability: tuple[int, int], cache_directory: Path | None = None) -> Binary:
    """Return the kernels of `launches` as machine code for a compute capability such as (8, 9), from the cache where it is there."""
    launches = list(launches)
    names = sorted({launch.kernel for launch in launches})
    program = "".join(f'#include "{source}"\n' for source in sorted({launch.source for launch in launches}))
    headers = {path.name: path.read_text() for path in sorted(SOURCES.glob("*.cuh"))}
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17", "--ptxas-options=-v"]
    key = json.dumps([_version(), options, names, program, headers])
    entry = (cache_directory or user_cache_directory()) / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    cached = _read(entry)
    if cached is not None:
        return cached
    binary = _compile(program, headers, names, options)
    with suppress(OSError):  # a home that cannot be written only costs the next process a compilation
        _write(entry, binary)
    return binary


def user_cache_directory() -> Path:
    """Return where this platform keeps files that can be made again."""
    if sys.platform == "win32":
        return Path(os.environ["LOCALAPPDATA"]) / "dspark" / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dspark" / "kernels"


def _read(entry: Path) -> Binary | None:
    """Return a cache entry; none where it is absent, or not what we wrote."""
    try:
        stored = json.loads(entry.read_text())
        return Binary(base64.b64decode(stored["cubin"], validate=True), dict(stored["symbols"]), stored["log"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(entry: Path, binary: Binary) -> None:
    """Write a cache entry whole: processes that compile the same at once replace it by the same."""
    text = json.dumps({"cubin": base64.b64encode(binary.cubin).decode(), "symbols": binary.symbols, "log": binary.log})
    entry.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=entry.parent, prefix=".") as directory:
        whole = Path(directory) / entry.name
        whole.write_text(text)
        os.replace(whole, entry)


@cache
def _library() -> ctypes.CDLL:
    for package in _PACKAGES:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        paths = {file.name: str(file.locate()) for file in files}
        builtins = next(filter(_BUILTINS.fullmatch, paths), None)
        library = next(filter(_LIBRARY.fullmatch, paths), None)
        if builtins and library:
            ctypes.CDLL(paths[builtins])  # NVRTC asks for it by name, which finds nothing in a wheel's folder unless it is loaded already
            return ctypes.CDLL(paths[library])
    toolkit = ctypes.util.find_library("nvrtc")
    if toolkit is not None:
        return ctypes.CDLL(toolkit)
    raise CompilerMissingError(f"kernels are compiled with NVRTC, and {_PACKAGES[0]} is not installed: pip install 'dspark[cuda]'")


def _call(function: str, *arguments: object) -> None:
    library = _library()
    status = getattr(library, function)(*arguments)
    if status:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompileError(f"{function}: {library.nvrtcGetErrorString(status).decode()}")


@cache
def _version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _strings(values: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(values))(*(value.encode() for value in values))


def _compile(program: str, headers: dict[str, str], names: Sequence[str], options: Sequence[str]) -> Binary:
    handle = ctypes.c_void_p()
    texts, paths = _strings(list(headers.values())), _strings(list(headers))
    _call("nvrtcCreateProgram", ctypes.byref(handle), program.encode(), b"dspark.cu", len(headers), texts, paths)
    try:
        for name in names:
            _call("nvrtcAddNameExpression", handle, name.encode())
        try:
            _call("nvrtcCompileProgram", handle, len(options), _strings(options))
        except CompileError as error:
            raise CompileError(f"NVRTC {'.'.join(map(str, _version()))} with {' '.join(options)}: {error}\n{_log(handle)}") from None
        return Binary(_output(handle, "CUBIN"), {name: _symbol(handle, name) for name in names}, _log(handle))
    finally:
        _call("nvrtcDestroyProgram", ctypes.byref(handle))


def _output(handle: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _call(f"nvrtcGet{what}Size", handle, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _call(f"nvrtcGet{what}", handle, buffer)
    return buffer.raw


def _log(handle: ctypes.c_void_p) -> str:
    return _output(handle, "ProgramLog").rstrip(b"\0").decode(errors="replace")


def _symbol(handle: ctypes.c_void_p, name: str) -> str:
    symbol = ctypes.c_char_p()
    _call("nvrtcGetLoweredName", handle, name.encode(), ctypes.byref(symbol))
    return (symbol.value or b"").decode()
