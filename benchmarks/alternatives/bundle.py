"""Worker for a dspark bundle: `speculative`, and `plain`, which is ONNX Runtime on the same target graph without a drafter.

python benchmarks/alternatives/bundle.py BUNDLE THREADS
"""

from __future__ import annotations

import sys
from functools import partial

from protocol import Way, serve

from dspark.runtime import LLM, SamplingParams


def generate(llm: LLM, ids: list[int], max_tokens: int, stop_ids: list[int], *, speculative: bool) -> list[int]:
    """Decode greedily; return the emitted tokens."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, stop_token_ids=stop_ids)
    (output,) = llm.generate([ids], params, speculative=speculative)
    return output.token_ids


def ways(llm: LLM) -> dict[str, Way]:
    """Return both ways to decode on one loaded bundle."""
    return {"speculative": partial(generate, llm, speculative=True), "plain": partial(generate, llm, speculative=False)}


if __name__ == "__main__":
    serve(ways(LLM(sys.argv[1], threads=int(sys.argv[2]))), ["onnxruntime", "numpy"])
