"""Time, peak memory and bytes of exporting pairs of the published shapes.

    python benchmarks/export_shapes.py 4b 8b 14b                      # by reference, bf16: what GPU engines take
    python benchmarks/export_shapes.py --dtype fp32 0.6b 1.7b         # converted for the CPU
    python benchmarks/export_shapes.py --dtype int4 0.6b 4b           # quantised for the CPU

Each export is a process of its own. Weight files are holes: an export by reference reads headers only, a conversion reads zeros.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine
from random_pair import SHAPES, write_pair

FORMS = {dtype: ("--dtype", dtype) for dtype in ("bf16", "fp16", "fp32")}
FORMS |= {weights: ("--weights", weights) for weights in ("int8", "int4")}


def measure(shape: str, dtype: str, directory: Path) -> tuple[float, float, float]:
    """Export one shape; return seconds, peak GB of memory and MB written."""
    write_pair(directory / shape, SHAPES[shape], sparse=True)
    output = directory / f"{shape}-{dtype}"
    arguments = [str(directory / shape / "target"), str(directory / shape / "drafter"), str(output), *FORMS[dtype], "-q"]
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "dspark.export.cli", *arguments])
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    if status:
        raise SystemExit(f"the export of {shape} failed")
    written = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    return seconds, usage.ru_maxrss / 1e6, written / 1e6


def main() -> None:
    """Print a table, a row a shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--dtype", choices=FORMS, default="bf16")
    parser.add_argument("--directory", type=Path, help="where to put the files (default: a temporary directory)")
    args = parser.parse_args()
    print(machine.describe("torch", "onnx", "onnxscript"))
    print("| shape | dtype | seconds | peak memory, GB | written, MB |")
    print("|---|---|---:|---:|---:|")
    for shape in args.shapes:
        with tempfile.TemporaryDirectory(dir=args.directory) as directory:
            seconds, memory, written = measure(shape, args.dtype, Path(directory))
        print(f"| {shape} | {args.dtype} | {seconds:.1f} | {memory:.2f} | {written:.1f} |", flush=True)


if __name__ == "__main__":
    main()
