"""Time of a whole round against context length and batch size, on a random pair of the example pair's shape with a longer limit.

    python benchmarks/rounds.py

Makes the pair and two bundles, with the default ring and with a ring over the full context, in a temporary directory. Cases are
interleaved; the drafter's part is given apart.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import machine
import numpy as np
from random_pair import SHAPES, write_pair

from dspark.export.bundle import ExportOptions, export_bundle
from dspark.runtime.bundle import load_bundle
from dspark.runtime.decode import Decoder
from dspark.runtime.drafter import Drafter
from dspark.runtime.onnxruntime import OnnxRuntimeEngine
from dspark.runtime.request import Request
from dspark.runtime.state import Slots
from dspark.runtime.stop import StopRule
from dspark.runtime.target import Qwen3Target


class Case:
    """Requests that have been fed `context` tokens each, with a decoder of their own."""

    def __init__(self, bundle: Path, context: int, batch: int) -> None:
        engine, slots = OnnxRuntimeEngine(load_bundle(bundle)), Slots(batch)
        limits = {"num_speculative_tokens": engine.manifest.num_speculative_tokens, "max_seq_len": engine.manifest.limits.max_seq_len}
        self._decoder = Decoder(engine, slots, Qwen3Target(engine, slots), Drafter(engine, slots), **limits)
        rng, rule = np.random.default_rng(0), StopRule(frozenset(), 4000)
        self._requests = [Request(i, rng.integers(0, 2000, context).tolist(), rule) for i in range(batch)]
        self.draft: list[float] = []
        self.round: list[float] = []
        for request in self._requests:
            self._decoder.admit(request)
            self._decoder.prefill(request)

    def run(self) -> None:
        """Run a round and note its time and the drafter's."""
        stats = self._requests[0].stats
        before, began = stats.seconds["draft"], time.perf_counter()
        self._decoder.round(self._requests)
        self.round.append(1e3 * (time.perf_counter() - began))
        self.draft.append(1e3 * (stats.seconds["draft"] - before))


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 8192])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        write_pair(Path(scratch), SHAPES["pair"])
        bundles = {}
        for window in (2048, "full"):
            bundles[window] = Path(scratch) / f"bundle-{window}"
            export_bundle(Path(scratch) / "target", Path(scratch) / "drafter", bundles[window], ExportOptions(ctx_window=window))
        print(machine.describe("onnxruntime", "numpy"))
        by_context = {(context, window): Case(bundle, context, 1) for window, bundle in bundles.items() for context in args.contexts}
        _measure(by_context.values(), args.repeats)
        print("| context | window | draft, ms | round, ms |")
        print("|---:|---|---:|---:|")
        for (context, window), case in by_context.items():
            print(f"| {context} | {window} | {np.median(case.draft):.2f} | {np.median(case.round):.2f} |")
        by_batch = {batch: Case(bundles[2048], args.contexts[0], batch) for batch in args.batches}
        _measure(by_batch.values(), args.repeats)
        print(f"\n| batch, context {args.contexts[0]} | draft, ms | round, ms | round a request, ms |")
        print("|---:|---:|---:|---:|")
        for batch, case in by_batch.items():
            print(f"| {batch} | {np.median(case.draft):.2f} | {np.median(case.round):.2f} | {np.median(case.round) / batch:.2f} |")


def _measure(cases: object, repeats: int) -> None:
    for repeat in range(repeats + 3):
        for case in cases:
            case.run()
            if repeat < 3:
                case.draft.clear(), case.round.clear()


if __name__ == "__main__":
    main()
