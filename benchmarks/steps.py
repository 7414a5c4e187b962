"""Step times of bundles' graphs at chosen capacities: target over 1 and 8 tokens, draft at two ring sizes.

    python benchmarks/random_pair.py 0.6b /tmp/pair && dspark-export /tmp/pair/target /tmp/pair/drafter /tmp/fp32
    dspark-export /tmp/pair/target /tmp/pair/drafter /tmp/int8 --weights int8
    python benchmarks/steps.py /tmp/fp32 /tmp/int8 --cache 544 --ring 544 2048

The cases of all bundles are interleaved; medians are printed, and the median of each pass's ratio to the first bundle.
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


def cases(engine: Engine, args: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """Return the bound steps of a bundle by name."""
    width = engine.manifest.num_speculative_tokens + 1
    bound_cases = {
        f"target, {n} token{'s' * (n > 1)}, cache {args.cache}": bound(
            engine, TARGET, {"B": 1, "N": n, "M": n, "S": args.cache}, {"start": args.filled, "logit_rows": np.arange(n)}
        )
        for n in (1, width)
    }
    for ring in args.ring:
        numbers = {"start": args.filled, "total": args.filled + width // 2}
        bound_cases[f"draft, ring {ring}"] = bound(engine, DRAFT, {"B": 1, "N": width, "R": ring}, numbers)
    return bound_cases


def main() -> None:
    """Print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--cache", type=int, default=544, help="cache capacity in rows")
    parser.add_argument("--filled", type=int, default=512, help="committed tokens")
    parser.add_argument("--ring", type=int, nargs="+", default=[544], help="ring capacities in rows")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--generate", type=int, default=32, help="tokens to generate first, as a check")
    args = parser.parse_args()
    steps: dict[tuple[str, Path], Callable[[], None]] = {}
    loaded = {}
    for bundle in args.bundles:
        began = time.perf_counter()
        own = cases(OnnxRuntimeEngine(load_bundle(bundle), threads=args.threads), args)
        loaded[bundle] = time.perf_counter() - began
        steps |= {(name, bundle): run for name, run in own.items()}
    times: dict[tuple[str, Path], list[float]] = {key: [] for key in steps}
    for repeat in range(args.repeats + 1):
        for key, run in sorted(steps.items()):
            began = time.perf_counter()
            run()
            if repeat:
                times[key].append(time.perf_counter() - began)
    print(machine.describe("onnxruntime", "numpy"))
    print("loaded in " + ", ".join(f"{seconds:.1f} s ({bundle.name})" for bundle, seconds in loaded.items()))
    print("| step | bundle | median, ms | least, ms | to the first |")
    print("|---|---|---:|---:|---:|")
    for (name, bundle), seconds in times.items():
        ratio = np.median(np.divide(seconds, times[name, args.bundles[0]]))
        print(f"| {name} | {bundle.name} | {np.median(seconds) * 1e3:.1f} | {min(seconds) * 1e3:.1f} | {ratio:.2f} |")
    for bundle in args.bundles if args.generate else ():
        llm = LLM(bundle, threads=args.threads)
        params = SamplingParams(max_tokens=args.generate, ignore_eos=True)
        for speculative in (True, False):
            (output,) = llm.generate([[1, 2, 3, 4, 5]], params, speculative=speculative)
            kind, stats = "speculative" if speculative else "plain", output.stats
            print(f"{bundle.name}, {kind}: {len(output.token_ids)} tokens in {stats.rounds} rounds, {stats.decode_seconds:.2f} s")


if __name__ == "__main__":
    main()
