"""Step times of a bundle's graphs at chosen capacities: target over 1 and 8 tokens, draft at two ring sizes.

    python benchmarks/steps.py --shape 1.7b --json steps.json
    python benchmarks/random_pair.py 4b /tmp/pair && dspark-export /tmp/pair/target /tmp/pair/drafter /tmp/bundle --weights int4
    python benchmarks/steps.py /tmp/bundle --cache 544 --ring 544 2048

With a shape a random float32 pair of it is made and removed afterwards (1.7b: 11 GB of disk). The cases are interleaved; medians are
printed, and written for benchmarks/cost_model.py.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import machine
import numpy as np
from random_pair import SHAPES, write_pair

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


@contextmanager
def random_bundle(shape: str) -> Iterator[Path]:
    """Make a bundle of a random float32 pair, its weights by reference, for as long as it is used."""
    from dspark.export.bundle import ExportOptions, export_bundle

    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        write_pair(place, SHAPES[shape], dtype="fp32")
        export_bundle(place / "target", place / "drafter", place / "bundle", ExportOptions())
        yield place / "bundle"


def measure(bundle: Path, args: argparse.Namespace) -> dict[str, float]:
    """Print a table of medians and return them in seconds, by step."""
    began = time.perf_counter()
    engine = OnnxRuntimeEngine(load_bundle(bundle), threads=args.threads)
    engine.load([TARGET, DRAFT])
    loaded = time.perf_counter() - began
    width = engine.manifest.num_speculative_tokens + 1
    cases = {
        f"target {n}": bound(
            engine,
            TARGET,
            {"B": args.batch, "N": n, "M": n, "S": args.cache},
            {"start": args.filled, "logit_rows": np.arange(n)},
        )
        for n in (1, width)
    }
    for ring in args.ring:
        numbers = {"start": args.filled, "total": args.filled + width // 2}
        cases[f"draft {ring}"] = bound(engine, DRAFT, {"B": args.batch, "N": width, "R": ring}, numbers)
    times: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(args.repeats + 1):
        for name, run in cases.items():
            began = time.perf_counter()
            run()
            if repeat:
                times[name].append(time.perf_counter() - began)
    print(f"loaded in {loaded:.1f} s; batch {args.batch}, cache {args.cache}, {args.filled} filled; target by tokens, draft by ring")
    print("| step | median, ms | least, ms |")
    print("|---|---:|---:|")
    for name, seconds in times.items():
        print(f"| {name} | {np.median(seconds) * 1e3:.1f} | {min(seconds) * 1e3:.1f} |")
    return {name: float(np.median(seconds)) for name, seconds in times.items()}


def generate(bundle: Path, tokens: int, threads: int | None) -> None:
    """Generate both ways as a check, and print how many rounds it took."""
    llm, params = LLM(bundle, threads=threads), SamplingParams(max_tokens=tokens, ignore_eos=True)
    outputs = {way: llm.generate([[1, 2, 3, 4, 5]], params, speculative=way)[0] for way in (True, False)}
    for way, output in outputs.items():
        kind = "speculative" if way else "plain"
        print(f"{kind}: {len(output.token_ids)} tokens in {output.stats.rounds} rounds, {output.stats.decode_seconds:.2f} s")
    print(f"the outputs are {'equal' if outputs[True].token_ids == outputs[False].token_ids else 'DIFFERENT'}")


def run(bundle: Path, args: argparse.Namespace) -> None:
    """Measure, then generate; what was measured is freed first, as both do not fit into memory at large shapes."""
    about = f"{machine.describe('onnxruntime', 'numpy')}, threads {args.threads or 'default'}, load average {os.getloadavg()[0]:.1f}"
    print(about)
    seconds = measure(bundle, args)
    if args.json:
        record = {"machine": about, "batch": args.batch, "cache": args.cache, "ring": args.ring[0], "seconds": seconds}
        args.json.write_text(json.dumps(record, indent=2))
    if args.generate:
        generate(bundle, args.generate, args.threads)


def main() -> None:
    """Print the table for a bundle, or for a random one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--shape", choices=SHAPES, help="make a random bundle of this shape instead")
    parser.add_argument("--cache", type=int, default=544, help="cache capacity in rows")
    parser.add_argument("--filled", type=int, default=512, help="committed tokens")
    parser.add_argument("--ring", type=int, nargs="+", default=[544], help="ring capacities in rows")
    parser.add_argument("--batch", type=int, default=1, help="requests in a step")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--generate", type=int, default=32, help="tokens to generate afterwards, as a check")
    parser.add_argument("--json", type=Path, help="write the medians here")
    args = parser.parse_args()
    if (args.bundle is None) == (args.shape is None):
        parser.error("give either a bundle or --shape")
    if args.bundle:
        run(args.bundle, args)
        return
    with random_bundle(args.shape) as bundle:
        run(bundle, args)


if __name__ == "__main__":
    main()
