"""Load time and memory of a bundle, with and without the cache of packed weights: one process, then a second beside it.

    python benchmarks/load.py BUNDLE

Each process loads the bundle, decodes a few tokens and holds it. Private memory is what a second process costs; shared pages (files
that are mapped) are counted once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine


def held(bundle: Path, cache: Path | None) -> subprocess.Popen[str]:
    """Start a process that loads a bundle and waits; its first line is what it measured."""
    command = [sys.executable, __file__, str(bundle), "--child", *(["--cache", str(cache)] if cache else [])]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def child(bundle: Path, cache: Path | None) -> None:
    """Load, decode, report, and wait for the parent to end."""
    from dspark.runtime import LLM, SamplingParams

    began = time.perf_counter()
    llm = LLM(bundle, prepacked_cache=cache)
    loaded = time.perf_counter() - began
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True))
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split(":")[0]: int(line.split()[1]) / 1e6 for line in lines}
    private = sizes["Private_Dirty"] + sizes["Private_Clean"]
    print(json.dumps({"load": loaded, "resident": sizes["Rss"], "anonymous": sizes["Anonymous"], "private": private}), flush=True)
    sys.stdin.read()


def main() -> None:
    """Print a row for each mode and process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.bundle, args.cache)
        return
    print(machine.describe("onnxruntime", "numpy"))
    print("| packed weights | process | load, s | resident, GB | anonymous, GB | its own, GB |")
    print("|---|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as scratch:
        for name, cache in (("at load", None), ("written to the cache", Path(scratch)), ("from the cache", Path(scratch))):
            first = held(args.bundle, cache)
            rows = [first.stdout.readline()]
            second = held(args.bundle, cache)
            rows.append(second.stdout.readline())
            for process, row in zip(("first", "second"), rows, strict=True):
                m = json.loads(row)
                sizes = " | ".join(f"{m[key]:.2f}" for key in ("load", "resident", "anonymous", "private"))
                print(f"| {name} | {process} | {sizes} |", flush=True)
            for process in (first, second):
                process.communicate()


if __name__ == "__main__":
    main()
