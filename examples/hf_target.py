"""A Hugging Face torch model as the target of a bundle, in place of the bundle's own target graph.

    python examples/hf_target.py BUNDLE TARGET_DIRECTORY --prompt "Write a Python function that ..." [--compare]

Needs torch and `pip install "transformers>=5"`; TARGET_DIRECTORY is the checkpoint that the bundle was exported from. Drafter and
acceptance run in the bundle's graphs as ever, the model gives logits and taps. `--compare` checks that the tokens are those of the model's
own greedy `generate`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, PreTrainedModel

from dspark.runtime import LLM, SamplingParams
from dspark.runtime.engine import Array, Engine, Tensor
from dspark.runtime.errors import ConfigError, DSparkError
from dspark.runtime.graphs import MODEL_DTYPE
from dspark.runtime.state import Rows, Slots, View
from dspark.runtime.target import Verified


@dataclass
class _Fed:
    """What a request has fed: the rows of the cache from `length` on are not committed."""

    cache: DynamicCache
    length: int = 0


class HuggingFaceTarget:
    """A Qwen3 model with a cache per request: `LLM(bundle, target=partial(HuggingFaceTarget, model))` decodes with it.

    Requests are verified one after the other. B rows of the view, N new rows, V vocabulary rows, m tapped layers, H hidden size.
    """

    def __init__(self, model: PreTrainedModel, engine: Engine, slots: Slots) -> None:
        self._model, self._engine, self._slots = model, engine, slots
        sizes = [(c.num_hidden_layers, c.hidden_size, c.vocab_size) for c in (model.config, engine.manifest.target)]
        if sizes[0][:2] != sizes[1][:2] or sizes[0][2] < sizes[1][2]:
            theirs, ours = ("{} layers, hidden size {}, {} vocabulary rows".format(*size) for size in sizes)
            raise ConfigError(f"the model has {theirs}; the target of this bundle has {ours}: load the model it was exported from")
        drafter = engine.manifest.drafter
        self._layers, self._vocabulary, self._taps_width = drafter.target_layer_ids, drafter.vocab_size, drafter.taps_width
        self._requests: dict[Hashable, _Fed] = {}
        self._tensors: dict[tuple[View, int], tuple[Tensor, Tensor]] = {}
        # Hooks, since `output_hidden_states` gives the last layer's output behind the final norm only. -1 is the embedding's output.
        self._outputs: dict[int, torch.Tensor] = {}
        for i in self._layers:
            module = model.get_input_embeddings() if i == -1 else model.model.layers[i]
            module.register_forward_hook(partial(self._keep, i))

    def prefill(self, request: Hashable, tokens: Sequence[int]) -> Verified:
        """Feed the next chunk of a prompt and commit it."""
        view, fed = self._slots.view([request]), self._requests.setdefault(request, _Fed(DynamicCache(config=self._model.config)))
        new_logits, new_taps = self._feed(fed, tokens, logit_rows=1)
        fed.length += len(tokens)
        logits, _ = self._output_tensors(view, 1)
        taps = self._engine.allocate((1, *new_taps.shape), MODEL_DTYPE)  # no graph is bound to a prompt's taps
        logits.write(new_logits[None])
        taps.write(new_taps[None])
        return Verified(Rows(view, logits), Rows(view, taps))

    def verify(self, requests: Sequence[Hashable], tokens: Rows, counts: Sequence[int]) -> Verified:
        """Feed the anchor and `count` proposals of each request behind its committed rows."""
        view, ids = self._slots.view(requests), tokens.tensor.read()
        logits, taps = self._output_tensors(view, ids.shape[1])
        all_logits, all_taps = logits.read(), taps.read()
        for request, row, count in zip(requests, view.rows, counts, strict=True):
            n = count + 1
            all_logits[row, :n], all_taps[row, :n] = self._feed(self._requests[request], ids[row, :n].tolist(), logit_rows=n)
        logits.write(all_logits)
        taps.write(all_taps)
        return Verified(Rows(view, logits), Rows(view, taps))

    def commit(self, request: Hashable, rows: int) -> None:
        """Commit the first `rows` tokens of the last verification; the next feed cuts off the others."""
        self._requests[request].length += rows

    def release(self, request: Hashable) -> None:
        """Forget a request; one that ends before its prompt is fed has no cache yet."""
        self._requests.pop(request, None)

    @torch.inference_mode()
    def _feed(self, fed: _Fed, tokens: Sequence[int], logit_rows: int) -> tuple[Array, Array]:
        """Feed `tokens` behind the committed rows; return the logits `[M,V]` of the last `logit_rows` and the taps `[N,m*H]`."""
        rejected = fed.cache.get_seq_length() - fed.length
        if rejected:
            fed.cache.crop(-rejected)  # the rows to remove; the length to keep is refused since Transformers 5.20
        ids = torch.tensor([tokens], device=self._model.device)
        # The cache by position: its keyword was `past_key_values` before Transformers 5.24, and is `cache` since.
        logits = self._model(ids, None, None, fed.cache, logits_to_keep=logit_rows).logits[0, :, : self._vocabulary]
        taps = torch.cat([self._outputs[i][0] for i in self._layers], -1)
        return logits.float().cpu().numpy(), taps.float().cpu().numpy()

    def _keep(self, layer: int, _module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        self._outputs[layer] = output

    def _output_tensors(self, view: View, rows: int) -> tuple[Tensor, Tensor]:
        """Return logits `[B,rows,V]` and taps `[B,rows,m*H]` of a slot range, the same in every call: graphs need not bind again."""
        if (view, rows) not in self._tensors:
            logits = self._engine.allocate((view.size, rows, self._vocabulary), "float32")
            self._tensors[view, rows] = logits, self._engine.allocate((view.size, rows, self._taps_width), MODEL_DTYPE)
        return self._tensors[view, rows]


def main() -> int:
    """Generate with the model as target; return 1 if its own `generate` gives other tokens, 2 for a refused argument."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path, help="bundle directory made by dspark-export")
    parser.add_argument("target", type=Path, help="directory of the target's Hugging Face checkpoint")
    parser.add_argument("--prompt", required=True, help="a user's message, rendered with the chat template")
    parser.add_argument("--compare", action="store_true", help="check that the tokens are those of the model's own greedy generate")
    args = parser.parse_args()
    if not (args.target / "config.json").is_file():
        parser.error(f"{args.target} has no config.json: expected the directory of a Hugging Face checkpoint")
    try:
        model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32, local_files_only=True)
        llm = LLM(args.bundle, target=partial(HuggingFaceTarget, model))
        (output,) = llm.generate([[{"role": "user", "content": args.prompt}]], SamplingParams(max_tokens=256, temperature=0))
    except (DSparkError, OSError) as error:
        parser.error(str(error))
    print(output.text)
    print("tokens of each round:", output.stats.accepted_per_round)
    if not args.compare:
        return 0
    ids, n = torch.tensor([output.prompt_token_ids]), len(output.token_ids)
    config = GenerationConfig(max_new_tokens=n, do_sample=False, eos_token_id=sorted(llm.end_token_ids) or None, pad_token_id=0)
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, ids.shape[1] :].tolist()
    print("generate gives", "the same tokens" if output.token_ids == theirs else f"OTHER TOKENS: {theirs}")
    return int(output.token_ids != theirs)


if __name__ == "__main__":
    sys.exit(main())
