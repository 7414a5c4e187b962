"""Worker for onnxruntime-genai: `greedy` on a model that its builder made from the same target.

    python benchmarks/alternatives/genai.py MODEL THREADS

The builder's genai_config.json is given the number of threads and, where the jobs have no stop ids, the longest output as the shortest.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import onnxruntime_genai
from protocol import serve


def load(directory: str, threads: int) -> Any:
    """Load a model on a number of threads."""
    options = {"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}
    config = onnxruntime_genai.Config(directory)
    config.overlay(json.dumps(options))
    return onnxruntime_genai.Model(config)


def generate(model: Any, ids: list[int], max_tokens: int, stop_ids: list[int]) -> list[int]:
    """Decode greedily; return the emitted tokens. Stops at a token of the jobs or where the model's own configuration says so."""
    params, longest = onnxruntime_genai.GeneratorParams(model), len(ids) + max_tokens
    params.set_search_options(do_sample=False, max_length=longest, min_length=0 if stop_ids else longest)
    generator = onnxruntime_genai.Generator(model, params)
    generator.append_tokens([ids])
    tokens: list[int] = []
    while not generator.is_done() and len(tokens) < max_tokens and not (tokens and tokens[-1] in stop_ids):
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
    return tokens


def main() -> None:
    """Load the model and answer jobs."""
    directory, threads = sys.argv[1:]
    serve({"greedy": partial(generate, load(directory, int(threads)))}, ["onnxruntime-genai", "onnxruntime"])


if __name__ == "__main__":
    main()
