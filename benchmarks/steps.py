"""Step times of bundles' graphs at chosen capacities: target over 1 and 8 tokens, draft at two ring sizes.

    python benchmarks/steps.py --shape 1.7b --json steps.json
    python benchmarks/random_pair.py 4b pair && dspark-export pair/target pair/drafter int4 --weights int4
    dspark-export pair/target pair/drafter int8 --weights int8
    python benchmarks/steps.py int8 int4 --cache 544 --ring 544 2048

With a shape a random float32 pair of it is made and removed afterwards (1.7b: 11 GB of disk). The steps of all bundles are interleaved;
medians are printed, with the median of each pass's ratio to the first bundle, and written for benchmarks/cost_model.py.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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


def cases(engine: Engine, args: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """Return the bound steps of a bundle: `target` by tokens, `draft` by ring capacity."""
    width, found = engine.manifest.num_speculative_tokens + 1, {}
    for n in (1, width):
        sizes = {"B": args.batch, "N": n, "M": n, "S": args.cache}
        found[f"target {n}"] = bound(engine, TARGET, sizes, {"start": args.filled, "logit_rows": np.arange(n)})
    for ring in args.ring:
        numbers = {"start": args.filled, "total": args.filled + width // 2}
        found[f"draft {ring}"] = bound(engine, DRAFT, {"B": args.batch, "N": width, "R": ring}, numbers)
    return found


def measure(bundles: Sequence[Path], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Print a table of medians; return them in seconds by bundle and step."""
    steps: dict[tuple[str, Path], Callable[[], None]] = {}
    for bundle in bundles:
        began = time.perf_counter()
        own = cases(OnnxRuntimeEngine(load_bundle(bundle), threads=args.threads), args)
        print(f"{bundle.name} loaded in {time.perf_counter() - began:.1f} s")
        steps |= {(name, bundle): run for name, run in own.items()}
    times: dict[tuple[str, Path], list[float]] = {key: [] for key in steps}
    for repeat in range(args.repeats + 1):
        for key, run in sorted(steps.items()):
            began = time.perf_counter()
            run()
            if repeat:
                times[key].append(time.perf_counter() - began)
    print(f"batch {args.batch}, cache {args.cache}, {args.filled} tokens in it; target by tokens, draft by ring\n")
    print("| step | bundle | median, ms | least, ms | to the first |")
    print("|---|---|---:|---:|---:|")
    for (name, bundle), seconds in times.items():
        ratio = np.median(np.divide(seconds, times[name, bundles[0]]))
        print(f"| {name} | {bundle.name} | {np.median(seconds) * 1e3:.1f} | {min(seconds) * 1e3:.1f} | {ratio:.2f} |")
    medians = {key: float(np.median(seconds)) for key, seconds in times.items()}
    return {bundle.name: {name: medians[name, own] for name, own in medians if own == bundle} for bundle in bundles}


def generate(bundle: Path, tokens: int, threads: int | None) -> None:
    """Generate both ways as a check, and print how many rounds it took."""
    llm, params = LLM(bundle, threads=threads), SamplingParams(max_tokens=tokens, ignore_eos=True)
    outputs = {way: llm.generate([[1, 2, 3, 4, 5]], params, speculative=way)[0] for way in (True, False)}
    for way, output in outputs.items():
        kind, stats = "speculative" if way else "plain", output.stats
        print(f"{bundle.name}, {kind}: {len(output.token_ids)} tokens in {stats.rounds} rounds, {stats.decode_seconds:.2f} s")
    print(f"the outputs are {'equal' if outputs[True].token_ids == outputs[False].token_ids else 'DIFFERENT'}")


@contextmanager
def random_bundle(shape: str) -> Iterator[Path]:
    """Make a bundle of a random float32 pair, its weights by reference, for as long as it is used."""
    from dspark.export.bundle import ExportOptions, export_bundle

    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        write_pair(place, SHAPES[shape], dtype="fp32")
        export_bundle(place / "target", place / "drafter", place / shape, ExportOptions())
        yield place / shape


def run(bundles: Sequence[Path], args: argparse.Namespace) -> None:
    """Measure, then generate; what was measured is freed in between: at large shapes both do not fit into memory."""
    threads, load = args.threads or "default", os.getloadavg()[0]
    about = f"{machine.describe('onnxruntime', 'numpy')}, threads {threads}, load average {load:.1f} before"
    print(about)
    seconds = measure(bundles, args)
    if args.json:
        record = {"machine": about, "batch": args.batch, "cache": args.cache, "ring": args.ring[0], "bundles": seconds}
        args.json.write_text(json.dumps(record, indent=2))
    for bundle in bundles if args.generate else ():
        generate(bundle, args.generate, args.threads)


def main() -> None:
    """Measure the bundles given, or a random one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundles", type=Path, nargs="*")
    parser.add_argument("--shape", choices=SHAPES, help="measure a random bundle of this shape instead")
    parser.add_argument("--cache", type=int, default=544, help="cache capacity in rows")
    parser.add_argument("--filled", type=int, default=512, help="committed tokens")
    parser.add_argument("--ring", type=int, nargs="+", default=[544], help="ring capacities in rows")
    parser.add_argument("--batch", type=int, default=1, help="requests in a step")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--generate", type=int, default=32, help="tokens to generate afterwards, as a check")
    parser.add_argument("--json", type=Path, help="write the medians here")
    args = parser.parse_args()
    if bool(args.bundles) == bool(args.shape):
        parser.error("give either bundles or --shape")
    if args.bundles:
        run(args.bundles, args)
        return
    with random_bundle(args.shape) as bundle:
        run([bundle], args)


if __name__ == "__main__":
    main()
