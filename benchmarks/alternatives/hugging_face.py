"""Worker for transformers' `generate` in float32: `greedy`, `lookup` (n-grams of the prompt) and `assisted` (a smaller model drafts).

    python benchmarks/alternatives/hugging_face.py TARGET ASSISTANT THREADS

ASSISTANT may be the target itself: then nearly every proposal is accepted, and each costs what a token of the target costs.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from protocol import serve
from transformers import AutoModelForCausalLM

LOOKUP_TOKENS = 10
"""`prompt_lookup_num_tokens`, the value in transformers' documentation."""


def generate(model: Any, ids: list[int], max_tokens: int, stop_ids: list[int], **options: Any) -> list[int]:
    """Decode greedily; return the emitted tokens."""
    prompt = torch.tensor([ids])
    with torch.inference_mode():
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=stop_ids or None,
            pad_token_id=0,
            **options,
        )
    return output[0, len(ids) :].tolist()


def load(directory: str) -> Any:
    """Load a checkpoint in float32, its generation settings cleared: the jobs say when to stop."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model.eval()


def main() -> None:
    """Load target and assistant and answer jobs."""
    target, assistant, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = load(target)
    ways = {
        "greedy": partial(generate, model),
        "lookup": partial(generate, model, prompt_lookup_num_tokens=LOOKUP_TOKENS),
        "assisted": partial(generate, model, assistant_model=load(assistant)),
    }
    serve(ways, ["transformers", "torch"])


if __name__ == "__main__":
    main()
