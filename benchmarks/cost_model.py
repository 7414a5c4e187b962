"""Cost model of a round: from the work of its graphs (work.py), the accepted length from which speculation pays.

    python benchmarks/cost_model.py --machines H200-class B300-class --shapes 4b 8b 14b --dtypes bf16 int8 int4 --batches 1 8 32
    python benchmarks/steps.py --shape 0.6b --json steps.json && python benchmarks/cost_model.py --measured 0.6b fp32 steps.json 0.6b

A step takes bytes / bandwidth + operations / rate: no overlap, no launches. Everything but the measured row is computed.
K proposals, L accepted length: tokens a round, the target's own included.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from random_pair import SHAPES, Shape
from work import BITS, FLOAT_BYTES, Work, draft_step, storage, target_step


@dataclass(frozen=True)
class Machine:
    """Bytes and operations a second, and the bytes of floats in a quantised model there."""

    name: str
    bandwidth: float
    rate: float
    other: int

    def seconds(self, work: Work) -> float:
        """Return the time of a step."""
        return work.bytes / self.bandwidth + work.operations / self.rate


MACHINES = {
    "H200-class": Machine("H200-class, 4.8 TB/s", 4.8e12, 0.99e15, 2),
    "B300-class": Machine("B300-class, 8 TB/s", 8e12, 2.5e15, 2),
}
"""Nominal memory bandwidth and dense bf16 rate. Real kernels reach less of either, and launches and synchronisation come on top."""


def round_seconds(machine: Machine, shape: Shape, dtype: str, batch: int, context: int, ring: int) -> tuple[float, float, float]:
    """Return the times of a plain step, of a verification and of a draft."""
    kind = storage(dtype, machine.other)
    verify = [machine.seconds(target_step(shape, kind, batch, rows, context)) for rows in (1, shape.block + 1)]
    return verify[0], verify[1], machine.seconds(draft_step(shape, kind, batch, min(ring, context)))


def break_even(plain: float, verify: float, draft: float) -> float:
    """Return the accepted length at which a round costs what plain decoding of its tokens costs."""
    return (verify + draft) / plain


def fitted(name: str, shape: Shape, dtype: str, steps: Mapping[str, float], batch: int, context: int) -> Machine:
    """Return the machine whose target steps over 1 and K + 1 tokens take the measured seconds; floats are float32 there.

    Ends the program where no such machine exists: the wider step cannot take less time, nor as many times as long as it has operations.
    """
    works = [target_step(shape, storage(dtype, 4), batch, rows, context) for rows in (1, shape.block + 1)]
    times = [steps["target 1"], steps[f"target {shape.block + 1}"]]
    inverse_bandwidth, inverse_rate = np.linalg.solve([[work.bytes, work.operations] for work in works], times)
    if min(inverse_bandwidth, inverse_rate) <= 0:
        raise SystemExit(
            f"{name}: steps of {times[0] * 1e3:.1f} and {times[1] * 1e3:.1f} ms fit no bandwidth and rate: measure again, undisturbed"
        )
    return Machine(name, 1 / inverse_bandwidth, 1 / inverse_rate, 4)


def print_work(shapes: Iterable[str], dtypes: Iterable[str], context: int, ring: int) -> None:
    """Print bytes and operations for one request. Floats of quantised models count as on the accelerators, in 2 bytes."""
    print(f"\nBytes and operations of one request, {context} cached tokens, ring of {ring} (computed)\n")
    print("| shape | dtype | plain step, GB | verify, GB | draft, GB | of it Markov, GB | plain, GFLOP | verify, GFLOP | draft, GFLOP |")
    print("|---|---|" + "---:|" * 7)
    for name in shapes:
        for dtype in dtypes:
            shape, kind = SHAPES[name], storage(dtype, 2)
            works = [target_step(shape, kind, 1, rows, context) for rows in (1, shape.block + 1)] + [draft_step(shape, kind, 1, ring)]
            sizes = [work.bytes / 1e9 for work in works] + [shape.block * shape.vocabulary * shape.rank * kind.markov / 1e9]
            cells = [f"{value:.3g}" for value in (*sizes, *(work.operations / 1e9 for work in works))]
            print(f"| {name} | {dtype} | " + " | ".join(cells) + " |")


def print_pays(machine: Machine, args: argparse.Namespace) -> None:
    """Print when speculation pays and what it brings at the accepted lengths asked for."""
    print(f"\n{machine.name}, {args.context} cached tokens (computed, not measured)\n")
    lengths = " | ".join(f"speed-up at L = {length:g}" for length in args.accepted)
    print(f"| shape | dtype | batch | plain step, ms | verify, ms | draft, ms | pays from L | {lengths} |")
    print("|---|---|" + "---:|" * (5 + len(args.accepted)))
    for name in args.shapes:
        for dtype in args.dtypes:
            for batch in args.batches:
                times = round_seconds(machine, SHAPES[name], dtype, batch, args.context, args.ring)
                pays = break_even(*times)
                cells = [f"{1e3 * t:.3g}" for t in times] + [f"{pays:.2f}"] + [f"{length / pays:.2f}" for length in args.accepted]
                print(f"| {name} | {dtype} | {batch} | " + " | ".join(cells) + " |")


def print_measured(name: str, dtype: str, path: Path, bundle: str, args: argparse.Namespace) -> None:
    """Print the measured steps, the machine fitted to the target's, and what the model says of the draft, then of other batches."""
    shape, record = SHAPES[name], json.loads(path.read_text())
    steps, batch, cache = record["bundles"][bundle], record["batch"], record["cache"]
    machine = fitted(f"fitted to {path.name}, {bundle}", shape, dtype, steps, batch, cache)
    plain, verify, draft = (steps[key] for key in ("target 1", f"target {shape.block + 1}", f"draft {record['ring']}"))
    modelled = machine.seconds(draft_step(shape, storage(dtype, machine.other), batch, record["ring"]))
    print(f"\n{name}, {dtype}, batch {batch}: measured ({record['machine']})\n")
    print("| plain step, ms | verify, ms | draft, ms | pays from L | fitted GB/s | fitted GFLOP/s | draft by the model, ms |")
    print("|" + "---:|" * 7)
    cells = [f"{1e3 * t:.1f}" for t in (plain, verify, draft)] + [f"{break_even(plain, verify, draft):.2f}"]
    print("| " + " | ".join([*cells, f"{machine.bandwidth / 1e9:.1f}", f"{machine.rate / 1e9:.0f}", f"{1e3 * modelled:.1f}"]) + " |")
    print_pays(machine, argparse.Namespace(**{**vars(args), "shapes": [name], "dtypes": [dtype]}))


def main() -> None:
    """Print the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["4b", "8b", "14b"])
    parser.add_argument("--dtypes", nargs="+", choices=(*FLOAT_BYTES, *BITS), default=["bf16", "int8", "int4"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=1024, help="cached tokens of each request")
    parser.add_argument("--ring", type=int, default=2048, help="the drafter's window in rows")
    parser.add_argument("--accepted", type=float, nargs="+", default=[2, 3, 4, 5, 6])
    parser.add_argument("--machines", nargs="*", choices=MACHINES, default=list(MACHINES))
    parser.add_argument(
        "--measured", nargs=4, action="append", default=[], metavar=("SHAPE", "DTYPE", "JSON", "BUNDLE"), help="of benchmarks/steps.py"
    )
    args = parser.parse_args()
    print_work(args.shapes, args.dtypes, args.context, min(args.context, args.ring))
    for machine in args.machines:
        print_pays(MACHINES[machine], args)
    for name, dtype, path, bundle in args.measured:
        print_measured(name, dtype, Path(path), bundle, args)


if __name__ == "__main__":
    main()
