"""Plain and speculative decoding of the example pair's prompts, interleaved, with a table of stages.

    python benchmarks/pair.py BUNDLE

Each prompt is decoded plainly and speculatively in turn; plain decoding has its own one-row binding. Speeds leave the prefill out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import machine
import numpy as np

from dspark.runtime import LLM, SamplingParams
from dspark.runtime.stats import Stats

KINDS = ("math", "func", "json", "code", "prose")
PROMPTS = Path(__file__).parent.parent / "examples" / "pair" / "prompts"


def run_kind(llm: LLM, kind: str) -> dict[bool, Stats]:
    """Decode all prompts of a kind both ways and return the statistics of each way."""
    totals = {True: Stats(), False: Stats()}
    for line in (PROMPTS / f"{kind}.jsonl").read_text().splitlines():
        fields = json.loads(line)
        for speculative in (True, False):
            (output,) = llm.generate([fields["ids"]], SamplingParams(max_tokens=160), speculative=speculative)
            if output.token_ids != fields["greedy_ids"]:
                raise SystemExit(f"{kind}: the output differs from the recorded greedy one")
            totals[speculative].add(output.stats)
    return totals


def main() -> None:
    """Print speeds by kind, then the stages of a round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    llm = LLM(args.bundle, threads=args.threads)
    run_kind(llm, "json")  # warm-up
    runs = {kind: [run_kind(llm, kind) for _ in range(args.repeats)] for kind in KINDS}
    print(machine.describe("onnxruntime", "numpy"))
    print(f"medians of {args.repeats} runs, 24 prompts a kind, threads {args.threads or 'default'}")
    print("| kind | accepted length | speculative tok/s | plain tok/s | ratio | outside engine runs |")
    print("|---|---:|---:|---:|---:|---:|")
    for kind, repeats in runs.items():
        fast, slow = ([run[way].tokens_per_second for run in repeats] for way in (True, False))
        ratio = np.median([f / s for f, s in zip(fast, slow, strict=True)])
        host = np.median([run[True].host_share for run in repeats])
        length = repeats[0][True].mean_accepted_length
        print(f"| {kind} | {length:.2f} | {np.median(fast):.0f} | {np.median(slow):.0f} | {ratio:.2f} | {host:.1%} |")
    print()
    print("| kind | draft, ms | verify, ms | accept, ms | rest, ms | plain step, ms | plain accept, ms | plain rest, ms |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for kind, repeats in runs.items():
        cells = [_stages(run[True], ("draft", "verify", "accept")) + _stages(run[False], ("verify", "accept")) for run in repeats]
        print(f"| {kind} | " + " | ".join(f"{value:.2f}" for value in np.median(cells, axis=0)) + " |")


def _stages(stats: Stats, phases: tuple[str, ...]) -> list[float]:
    engine = [stats.seconds[name] for name in phases]
    return [1e3 * seconds / stats.rounds for seconds in (*engine, stats.decode_seconds - sum(engine))]


if __name__ == "__main__":
    main()
