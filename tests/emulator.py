"""The kernels on the CPU: builds their sources with g++ and the emulation into a shared library, and launches them there.

Started as a script it runs one saved case in a process of its own: sanitizers must be loaded before Python.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.plugins.kernels import SOURCES, Launch

if TYPE_CHECKING:
    import numpy as np

EMULATION = SOURCES / "emulate"
COMPILER = shutil.which("g++")

_FLAGS = ["-std=c++17", "-fPIC", "-fno-strict-aliasing", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]


@dataclass(frozen=True)
class Sanitizer:
    """How to build with a sanitizer and how to run what was built."""

    flags: tuple[str, ...] = ()
    define: str = ""
    runtime_name: str = ""
    environment: tuple[tuple[str, str], ...] = ()


NONE = Sanitizer(flags=("-O2",))
ADDRESS = Sanitizer(
    flags=("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    define="-DEMULATE_ADDRESS_SANITIZER",
    runtime_name="libasan.so",
    environment=(("ASAN_OPTIONS", "detect_leaks=0"),),
)
THREAD = Sanitizer(
    flags=("-O1", "-g", "-fsanitize=thread"),
    define="-DEMULATE_THREAD_SANITIZER",
    runtime_name="libtsan.so",
    environment=(("TSAN_OPTIONS", "exitcode=66 halt_on_error=1"),),
)


def build(
    directory: Path, launches: Iterable[Launch], sanitizer: Sanitizer = NONE, sources: Path = SOURCES, extra: str = "", parts: int = 1
) -> Path:
    """Return a shared library with an entry point for each kernel, compiled in `parts` pieces at once."""
    directory.mkdir(parents=True, exist_ok=True)
    kernels = {launch.kernel: launch for launch in launches}
    names = sorted(kernels)
    includes = "".join(f'#include "{sources / name}"\n' for name in sorted({launch.source for launch in kernels.values()}))
    jobs = []
    for part in range(parts):
        text = f'#include "cuda.h"\n{includes}#include "launch.h"\n'
        text += "".join(f"EMULATE_KERNEL({_entry(kernels[name])}, {name})\n" for name in names[part::parts])
        file = directory / f"kernels{part}.cpp"
        file.write_text(text + (extra if part == 0 else ""))
        jobs.append([*_FLAGS, f"-I{EMULATION}", *sanitizer.flags, "-c", str(file), "-o", str(file.with_suffix(".o"))])
    fibers = directory / "fibers.o"
    jobs.append([*_FLAGS, "-O2", *([sanitizer.define] if sanitizer.define else []), "-c", str(EMULATION / "fibers.cpp"), "-o", str(fibers)])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(_compile, jobs))
    library = directory / "kernels.so"
    objects = [str(directory / f"kernels{part}.o") for part in range(parts)]
    _compile(["-shared", *sanitizer.flags, *objects, str(fibers), "-o", str(library)])
    return library


def run(library: Path, launches: Sequence[Launch], arrays: Mapping[str, np.ndarray]) -> None:
    """Launch in order, in this process, over arrays by name."""
    _run(library, launches, {name: array.ctypes.data for name, array in arrays.items()})


def run_sanitized(
    library: Path, sanitizer: Sanitizer, launches: Sequence[Launch], arrays: Mapping[str, np.ndarray]
) -> subprocess.CompletedProcess[str]:
    """Launch in order in a process with the sanitizer loaded, over copies that are written back where it reported nothing."""
    case = library.with_name("case.pickle")
    case.write_bytes(pickle.dumps((launches, {name: array.tobytes() for name, array in arrays.items()})))
    preload = subprocess.run([str(COMPILER), f"-print-file-name={sanitizer.runtime_name}"], capture_output=True, text=True, check=True)
    environment = os.environ | dict(sanitizer.environment)
    environment |= {"LD_PRELOAD": preload.stdout.strip(), "PYTHONMALLOC": "malloc", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, str(library), str(case)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if result.returncode == 0:
        for name, content in pickle.loads(case.read_bytes()).items():
            arrays[name].view("u1").reshape(-1)[:] = bytearray(content)
    return result


def _run(library: Path, launches: Sequence[Launch], addresses: Mapping[str, int]) -> None:
    loaded = ctypes.CDLL(str(library))
    for launch in launches:
        arguments = launch.arguments(addresses)
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        function = loaded[_entry(launch)]
        function.restype = ctypes.c_bool
        sizes = (ctypes.c_uint * 3)(*launch.grid), (ctypes.c_uint * 3)(*launch.block)
        if not function(*sizes, ctypes.c_size_t(launch.shared_bytes), pointers):
            raise RuntimeError(f"{launch.kernel}: threads wait at a barrier that others never reach")


def _entry(launch: Launch) -> str:
    return f"run_{hashlib.sha256(launch.kernel.encode()).hexdigest()[:16]}"


def _compile(arguments: Sequence[str]) -> None:
    result = subprocess.run([str(COMPILER), *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def _main(library: Path, case: Path) -> None:
    launches, contents = pickle.loads(case.read_bytes())
    # Allocations of their own, of exactly this size: what AddressSanitizer watches the ends of.
    buffers = {name: (ctypes.c_char * len(content)).from_buffer_copy(content) for name, content in contents.items()}
    _run(library, launches, {name: ctypes.addressof(buffer) for name, buffer in buffers.items()})
    case.write_bytes(pickle.dumps({name: buffer.raw for name, buffer in buffers.items()}))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
