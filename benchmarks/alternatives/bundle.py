"""Worker for a dspark bundle: `speculative`, and `plain`, which is ONNX Runtime on the same target graph without a drafter.

python benchmarks/alternatives/bundle.py BUNDLE THREADS
"""

from __future__ import annotations

import sys
from functools import partial

from protocol import serve

from dspark.runtime import LLM, SamplingParams


def generate(llm: LLM, ids: list[int], max_tokens: int, stop_ids: list[int], *, speculative: bool) -> list[int]:
    """Decode greedily; return the emitted tokens."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, stop_token_ids=stop_ids)
    (output,) = llm.generate([ids], params, speculative=speculative)
    return output.token_ids


def main() -> None:
    """Load the bundle and answer jobs."""
    bundle, threads = sys.argv[1:]
    decode = partial(generate, LLM(bundle, threads=int(threads)))
    ways = {"speculative": partial(decode, speculative=True), "plain": partial(decode, speculative=False)}
    serve(ways, ["onnxruntime", "numpy"])


if __name__ == "__main__":
    main()
