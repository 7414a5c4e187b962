"""Session options by measurement: threads, spinning and packed weights, on the steps of a bundle, interleaved.

    python benchmarks/options.py BUNDLE

A round runs two sessions in turn, so that threads of one that go on spinning take the cores from the other.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import machine
import numpy as np
from steps import cases

from dspark.runtime.bundle import Bundle, load_bundle
from dspark.runtime.onnxruntime import OnnxRuntimeEngine


class Varied(OnnxRuntimeEngine):
    """The engine with session options of its own."""

    def __init__(self, bundle: Bundle, threads: int, entries: dict[str, str]) -> None:
        super().__init__(bundle, threads=threads)
        self._entries = entries

    def _options(self) -> Any:
        options = super()._options()
        for key, value in self._entries.items():
            options.add_session_config_entry(key, value)
        return options


SPINNING, PACKING = "session.intra_op.allow_spinning", "session.disable_prepacking"
VARIANTS: dict[str, tuple[int, dict[str, str]]] = {
    "1 thread": (1, {}),
    "2 threads, pools stop after a run (used)": (2, {}),
    "2 threads, pools spin on": (2, {"session.force_spinning_stop": "0"}),
    "2 threads, no spinning": (2, {SPINNING: "0"}),
    "2 threads, weights not packed": (2, {PACKING: "1"}),
}


def main() -> None:
    """Print a row for each variant: the steps, and a draft and a verification in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--repeats", type=int, default=15)
    parser.set_defaults(batch=1, cache=544, filled=512, ring=[544])
    args = parser.parse_args()
    bundle = load_bundle(args.bundle)
    steps = {name: list(cases(Varied(bundle, *options), args).values()) for name, options in VARIANTS.items()}
    spent: dict[str, list[list[float]]] = {name: [] for name in steps}
    for repeat in range(args.repeats + 2):
        for name, (one, width, draft) in steps.items():
            row = []
            for parts in ((one,), (width,), (draft,), (draft, width)):
                began = time.perf_counter()
                for part in parts:
                    part()
                row.append(1e3 * (time.perf_counter() - began))
            if repeat > 1:
                spent[name].append(row)
    print(machine.describe("onnxruntime", "numpy"))
    print("| options | 1 token, ms | a block, ms | draft, ms | draft and a block in turn, ms |")
    print("|---|---:|---:|---:|---:|")
    for name, rows in spent.items():
        print(f"| {name} | " + " | ".join(f"{value:.2f}" for value in np.median(rows, axis=0)) + " |")


if __name__ == "__main__":
    main()
