"""Step times of a bundle's graphs at chosen capacities: target over 1 and 8 tokens, draft at two ring sizes.

    python benchmarks/random_pair.py 0.6b /tmp/pair && dspark-export /tmp/pair/target /tmp/pair/drafter /tmp/bundle
    python benchmarks/steps.py /tmp/bundle --cache 544 --ring 544 2048

The cases are interleaved; medians are printed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import machine
import numpy as np

from dspark.runtime import LLM, SamplingParams
from dspark.runtime.bundle import load_bundle
from dspark.runtime.engine import Engine, Tensor
from dspark.runtime.graphs import DRAFT, TARGET
from dspark.runtime.onnxruntime import OnnxRuntimeEngine


def bound(engine: Engine, graph: str, sizes: dict[str, int], values: dict[str, object]) -> Callable[[], None]:
    """Bind a graph to tensors of the given sizes, filled with `values` by name, and return its run."""
    signature, tensors = engine.signatures[graph], {}
    for spec in (*signature.inputs, *signature.outputs):
        if spec.name not in signature.aliases:
            shape = tuple(sizes[d] if isinstance(d, str) else d for d in spec.shape)
            tensor: Tensor = engine.allocate(shape, spec.dtype)
            tensor.write(values.get(spec.name, 0))
            tensors[spec.name] = tensor
    return engine.bind(graph, tensors).run


def main() -> None:
    """Print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--cache", type=int, default=544, help="cache capacity in rows")
    parser.add_argument("--filled", type=int, default=512, help="committed tokens")
    parser.add_argument("--ring", type=int, nargs="+", default=[544], help="ring capacities in rows")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--generate", type=int, default=32, help="tokens to generate first, as a check")
    args = parser.parse_args()
    began = time.perf_counter()
    engine = OnnxRuntimeEngine(load_bundle(args.bundle), threads=args.threads)
    loaded = time.perf_counter() - began
    width = engine.manifest.num_speculative_tokens + 1
    cases = {
        f"target, {n} token{'s' * (n > 1)}, cache {args.cache}": bound(
            engine, TARGET, {"B": 1, "N": n, "M": n, "S": args.cache}, {"start": args.filled, "logit_rows": np.arange(n)}
        )
        for n in (1, width)
    }
    for ring in args.ring:
        numbers = {"start": args.filled, "total": args.filled + width // 2}
        cases[f"draft, ring {ring}"] = bound(engine, DRAFT, {"B": 1, "N": width, "R": ring}, numbers)
    times: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(args.repeats + 1):
        for name, run in cases.items():
            began = time.perf_counter()
            run()
            if repeat:
                times[name].append(time.perf_counter() - began)
    print(machine.describe("onnxruntime", "numpy"))
    print(f"loaded in {loaded:.1f} s")
    print("| step | median, ms | least, ms |")
    print("|---|---:|---:|")
    for name, seconds in times.items():
        print(f"| {name} | {np.median(seconds) * 1e3:.1f} | {min(seconds) * 1e3:.1f} |")
    if args.generate:
        llm = LLM(args.bundle)
        params = SamplingParams(max_tokens=args.generate, ignore_eos=True)
        for speculative in (True, False):
            (output,) = llm.generate([[1, 2, 3, 4, 5]], params, speculative=speculative)
            kind = "speculative" if speculative else "plain"
            print(f"{kind}: {len(output.token_ids)} tokens in {output.stats.rounds} rounds, {output.stats.decode_seconds:.2f} s")


if __name__ == "__main__":
    main()
