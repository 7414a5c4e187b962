"""Plain and speculative decoding of several of the example pair's prompts at once, interleaved.

    python benchmarks/batch.py BUNDLE

For each batch size the prompts of the kinds are taken in groups of that size; a group is decoded both ways in turn. Wall time of whole
calls, prefill included.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import machine
import numpy as np
from pair import PROMPTS

from dspark.runtime import LLM, SamplingParams

KINDS = ("math", "func", "json")


def run(llm: LLM, prompts: list[list[int]], *, speculative: bool) -> tuple[float, int]:
    """Decode prompts together; return seconds and tokens."""
    began = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(max_tokens=160), speculative=speculative)
    return time.perf_counter() - began, sum(len(output.token_ids) for output in outputs)


def main() -> None:
    """Print tokens per second by batch size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8, help="prompts of each kind")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    llm = LLM(args.bundle, threads=args.threads)
    lines = [(PROMPTS / f"{kind}.jsonl").read_text().splitlines()[: args.prompts] for kind in KINDS]
    prompts = [json.loads(line)["ids"] for group in zip(*lines, strict=True) for line in group]
    run(llm, prompts[:8], speculative=True)  # warm-up
    print(machine.describe("onnxruntime", "numpy"))
    print(f"medians of {args.repeats} runs, {len(prompts)} prompts of {', '.join(KINDS)}, at most 160 tokens each")
    print("| batch | speculative tok/s, in all | each | plain tok/s, in all | each | ratio |")
    print("|---:|---:|---:|---:|---:|---:|")
    for batch in (1, 2, 4, 8):
        groups = [prompts[i : i + batch] for i in range(0, len(prompts) - batch + 1, batch)]
        speeds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(args.repeats):
            totals = {way: np.zeros(2) for way in speeds}
            for group in groups:
                for way in speeds:
                    totals[way] += run(llm, group, speculative=way)
            for way, (seconds, tokens) in totals.items():
                speeds[way].append(tokens / seconds)
        fast, slow = np.median(speeds[True]), np.median(speeds[False])
        ratio = np.median(np.divide(speeds[True], speeds[False]))
        print(f"| {batch} | {fast:.0f} | {fast / batch:.0f} | {slow:.0f} | {slow / batch:.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
