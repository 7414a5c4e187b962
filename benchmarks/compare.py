"""dspark beside its alternatives: the same target, prompts and threads, each in an environment of its own, interleaved, one table.

Environments (`--commands` prints these lines; the greedy output of all should be the same, which is checked):

    python -m venv env-transformers
    env-transformers/bin/pip install torch==2.13.0 transformers==5.24.0
    python -m venv env-genai
    env-genai/bin/pip install onnxruntime-genai==0.18.0 torch==2.13.0 transformers==5.24.0 onnx onnx-ir
    env-genai/bin/python -m onnxruntime_genai.models.builder -i examples/pair/target -o genai-fp32 -p fp32 -e cpu -c genai-cache
    dspark-export examples/pair/target examples/pair/drafter bundle-fp32
    python benchmarks/compare.py bundle-fp32 --transformers env-transformers/bin/python --genai env-genai/bin/python genai-fp32

Further bundles (--weights int8, int4) and genai models (-p int8, int4) of the same target may follow the first ones. For a random pair of a
published shape add --target PAIR/target --ignore-eos: the prompts' ids exist in its vocabulary. Not compared: DeepSpec's own loop, which is
in no package index (RECORDED quotes its figures). Speeds are emitted tokens by wall time of whole calls, prefill included.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import machine
import numpy as np
from pair import KINDS, PROMPTS
from worker import Worker

EXAMPLE_TARGET = PROMPTS.parent / "target"
RECORDED = (
    "Recorded when the example pair was made, not in this run (examples/pair/README.md): DeepSpec's loop on transformers 5.10.2 "
    "201-236 tok/s, transformers' greedy 64-68 tok/s beside it, one thread."
)


@dataclass
class Alternative:
    """One row of the tables: a way of a worker, and what it did."""

    name: str
    worker: Worker
    way: str
    speeds: dict[str, list[float]] = field(default_factory=dict)
    """Tokens per second by kind, one number a repeat."""
    outputs: list[list[int]] = field(default_factory=list)
    """Emitted tokens of every prompt, of the first repeat."""


def measure(alternatives: Sequence[Alternative], jobs: Mapping[str, Sequence[Mapping[str, object]]], repeats: int) -> None:
    """Run every job on every alternative in turn, `repeats` times; who begins changes with each job."""
    first = next(iter(jobs.values()))[0]
    for alternative in alternatives:
        alternative.worker.run({**first, "way": alternative.way})  # warm-up
    for repeat in range(repeats):
        for kind, group in jobs.items():
            totals = {a.name: np.zeros(2) for a in alternatives}
            for number, job in enumerate(group):
                begin = (number + repeat) % len(alternatives)
                for a in (*alternatives[begin:], *alternatives[:begin]):
                    answer = a.worker.run({**job, "way": a.way})
                    totals[a.name] += len(answer["tokens"]), answer["seconds"]
                    if not repeat:
                        a.outputs.append(answer["tokens"])
            for a in alternatives:
                tokens, seconds = totals[a.name]
                a.speeds.setdefault(kind, []).append(tokens / seconds)


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> tuple[int, float]:
    """Return how many outputs are equal, and the share of tokens before the first difference of each output."""
    pairs = list(zip(ours, theirs, strict=True))
    same = sum(len(list(takewhile(lambda ab: ab[0] == ab[1], zip(a, b, strict=False)))) for a, b in pairs)
    return sum(list(a) == list(b) for a, b in pairs), same / sum(max(len(a), len(b)) for a, b in pairs)


def ratios(reference: Alternative, other: Alternative) -> dict[str, float]:
    """Return by kind the median over the repeats of how many times faster the reference was."""
    return {kind: float(np.median(np.divide(speeds, other.speeds[kind]))) for kind, speeds in reference.speeds.items()}


def table(alternatives: Sequence[Alternative]) -> str:
    """Return Markdown: speeds by kind, then the first alternative's speed as a multiple of each other's, then the agreement with it."""
    reference, *others = alternatives
    kinds, count = list(reference.speeds), len(reference.outputs)
    lines = ["| tokens per second | " + " | ".join(kinds) + " |", "|---|" + "---:|" * len(kinds)]
    for a in alternatives:
        lines.append(f"| {a.name} | " + " | ".join(f"{np.median(a.speeds[kind]):.0f}" for kind in kinds) + " |")
    columns = [*kinds, "equal outputs", "equal tokens"]
    lines += ["", f"| {reference.name}, times | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for a in others:
        equal, share = agreement(reference.outputs, a.outputs)
        cells = [f"{value:.2f}" for value in ratios(reference, a).values()]
        lines.append(f"| {a.name} | " + " | ".join([*cells, f"{equal} of {count}", f"{share:.1%}"]) + " |")
    return "\n".join(lines)


def read_jobs(kinds: Sequence[str], prompts: int, max_tokens: int, stop_ids: list[int]) -> dict[str, list[dict[str, object]]]:
    """Return the first prompts of each kind as jobs."""
    jobs: dict[str, list[dict[str, object]]] = {}
    for kind in kinds:
        lines = (PROMPTS / f"{kind}.jsonl").read_text().splitlines()[:prompts]
        jobs[kind] = [{"ids": json.loads(line)["ids"], "max_tokens": max_tokens, "stop_ids": stop_ids} for line in lines]
    return jobs


def end_tokens(target: Path) -> list[int]:
    """Return the stop ids of a checkpoint's generation_config.json, none without one."""
    path = target / "generation_config.json"
    ids = json.loads(path.read_text())["eos_token_id"] if path.exists() else []
    return ids if isinstance(ids, list) else [ids]


def start(args: argparse.Namespace, stack: ExitStack) -> list[Alternative]:
    """Start a worker for every bundle and environment, and name what each does."""

    def worker(*command: object) -> Worker:
        made = Worker(*map(str, command))
        stack.callback(made.close)
        return made

    alternatives = []
    for bundle in args.bundles:
        own = worker(sys.executable, "bundle.py", bundle, args.threads)
        names = {"speculative": "dspark", "plain": "ONNX Runtime"}
        alternatives += [Alternative(f"{name}, {bundle.name}", own, way) for way, name in names.items()]
    if args.transformers:
        assistant = args.assistant or args.target
        own = worker(args.transformers, "hugging_face.py", args.target, assistant, args.threads)
        drafts = f"assistant {assistant.name}" if args.assistant else "the target as its own assistant"
        names = {"greedy": "greedy", "lookup": "prompt lookup", "assisted": f"assisted, {drafts}"}
        alternatives += [Alternative(f"transformers fp32, {name}", own, way) for way, name in names.items()]
    if args.genai:
        python, *models = args.genai
        for model in models:
            own = worker(python, "genai.py", model, args.threads)
            alternatives.append(Alternative(f"onnxruntime-genai, {Path(model).name}", own, "greedy"))
    return alternatives


def main(argv: list[str] | None = None) -> None:
    """Print the tables."""
    if "--commands" in (sys.argv[1:] if argv is None else argv):
        print("\n".join(line[4:] for line in __doc__.splitlines() if line.startswith("    ")))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundles", type=Path, nargs="+", help="bundles of the target; the others are compared with the first")
    parser.add_argument("--commands", action="store_true", help="print how the environments are made, and end")
    parser.add_argument("--target", type=Path, default=EXAMPLE_TARGET, help="the checkpoint that the bundles were made from")
    parser.add_argument("--transformers", metavar="PYTHON", help="interpreter of an environment with transformers")
    parser.add_argument("--assistant", type=Path, help="checkpoint with the target's vocabulary that drafts (default: the target itself)")
    parser.add_argument("--genai", nargs="+", metavar=("PYTHON", "MODEL"), help="interpreter with onnxruntime-genai, then built models")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--prompts", type=int, default=8, help="prompts of each kind")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    jobs = read_jobs(args.kinds, args.prompts, args.max_tokens, [] if args.ignore_eos else end_tokens(args.target))
    with ExitStack() as stack:
        alternatives = start(args, stack)
        before = os.getloadavg()[0]
        measure(alternatives, jobs, args.repeats)
        load = f"load average {before:.1f} before, {os.getloadavg()[0]:.1f} after"
    print(f"{machine.describe('dspark')}, threads {args.threads}, {load}")
    for versions in dict.fromkeys(json.dumps(a.worker.versions) for a in alternatives):
        print(", ".join(f"{name} {version}" for name, version in json.loads(versions).items()))
    print(f"medians of {args.repeats} runs, {args.prompts} prompts a kind, at most {args.max_tokens} tokens, prefill included\n")
    print(table(alternatives))
    if args.target == EXAMPLE_TARGET:
        print(f"\n{RECORDED}")


if __name__ == "__main__":
    main()
