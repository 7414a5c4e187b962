"""What proposing from the K likeliest tokens before the Markov correction costs in acceptance and saves in time, on the example pair.

    python benchmarks/markov_topk.py 4 16 64 256

Exports the pair for each K and without, and decodes its prompts with all of them in turn. On a vocabulary of 2048 there is little time to
save; `benchmarks/steps.py` compares drafts of larger shapes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import machine
import numpy as np
from pair import KINDS, PROMPTS

from dspark.export.bundle import ExportOptions, export_bundle
from dspark.runtime import LLM, SamplingParams
from dspark.runtime.stats import Stats

PAIR = PROMPTS.parent


def main() -> None:
    """Print accepted lengths by kind and the draft's time, a row for each K."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("topk", type=int, nargs="+", metavar="K")
    parser.add_argument("--weights", default="float", help="as in dspark-export")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--limit", type=int, default=24, help="prompts of each kind")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        llms, totals = {}, {}
        for topk in (None, *args.topk):
            bundle = Path(scratch) / str(topk)
            export_bundle(PAIR / "target", PAIR / "drafter", bundle, ExportOptions(weights=args.weights, markov_topk=topk))
            llms[topk] = LLM(bundle, threads=args.threads)
            totals |= {(topk, kind): Stats() for kind in KINDS}
        for kind in KINDS:
            for seed, line in enumerate((PROMPTS / f"{kind}.jsonl").read_text().splitlines()[: args.limit]):
                params = SamplingParams(max_tokens=160, temperature=args.temperature, seed=seed)
                outputs = {topk: llm.generate([json.loads(line)["ids"]], params)[0] for topk, llm in llms.items()}
                for topk, output in outputs.items():
                    if not args.temperature and output.token_ids != outputs[None].token_ids:
                        raise SystemExit(f"{kind}: the output differs with {topk} candidates")
                    totals[topk, kind].add(output.stats)
    print(machine.describe("onnxruntime", "numpy"))
    print(f"weights {args.weights}, temperature {args.temperature}, threads {args.threads or 'default'}, {args.limit} prompts a kind")
    print("| candidates | " + " | ".join(KINDS) + " | draft, ms |")
    print("|---|" + "---:|" * (len(KINDS) + 1))
    for topk in llms:
        own = [totals[topk, kind] for kind in KINDS]
        draft = 1e3 * np.sum([s.seconds["draft"] for s in own]) / np.sum([s.rounds for s in own])
        lengths = " | ".join(f"{s.mean_accepted_length:.2f}" for s in own)
        print(f"| {'all' if topk is None else topk} | {lengths} | {draft:.2f} |")


if __name__ == "__main__":
    main()
