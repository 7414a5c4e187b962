"""How tokens are chosen: a request's parameters, and the acceptance step that runs in the engine.

Knows logits only as a tensor that is handed on: it never reads them. B rows, M logit rows, K proposals.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from dspark.runtime.engine import Array, Engine, Step, Tensor
from dspark.runtime.errors import RequestError, numbered
from dspark.runtime.graphs import ACCEPT
from dspark.runtime.state import Rows


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request; names as in vLLM."""

    max_tokens: int = 256
    temperature: float = 0.0
    """0 is greedy, the only choice so far."""
    stop_token_ids: Collection[int] = field(default=())
    """Token ids that end the output, besides the model's own."""
    ignore_eos: bool = False
    """Whether the model's own end tokens are ordinary ones."""

    def __post_init__(self) -> None:
        faults = []
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, (int, np.integer)) or self.max_tokens < 1:
            faults.append(f"max_tokens is {self.max_tokens!r}, expected an integer of at least 1")
        if self.temperature != 0:
            faults.append(f"temperature is {self.temperature!r}: this version decodes greedily, expected 0")
        ids = self.stop_token_ids
        if not isinstance(ids, (Sequence, Set, np.ndarray)) or not all(isinstance(i, (int, np.integer)) and i >= 0 for i in ids):
            faults.append(f"stop_token_ids is {self.stop_token_ids!r}, expected token ids")
        if faults:
            raise RequestError(f"these sampling parameters cannot be used:{numbered(faults)}")


class Accept:
    """The acceptance step: with count 0 it chooses the next token, as after prefill and in plain decoding."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps: dict[tuple[int, int], tuple[Step, dict[str, Tensor]]] = {}

    def __call__(self, logits: Rows, counts: Array, verify_tokens: Tensor | None = None) -> tuple[Array, Array]:
        """Return the accepted counts and next tokens `[B]` of every row of the view.

        Row i of `logits [B,M,V]` judges proposal i + 1 of `verify_tokens [B,K+1]`; `counts [B]`, at most M - 1, says how many are judged.
        """
        batch, rows = logits.tensor.shape[:2]
        assert verify_tokens is not None or not counts.any()
        assert counts.max() < rows
        key = id(logits.tensor), id(verify_tokens)
        if key not in self._steps:
            width = self._engine.manifest.num_speculative_tokens + 1
            tensors = {
                "logits": logits.tensor,
                "verify_tokens": verify_tokens or self._engine.allocate((batch, width), "int64"),
                **{name: self._engine.allocate((batch,), "int64") for name in ("count", "accepted", "next_token")},
            }
            if len(self._steps) > 64:
                self._steps.clear()
            self._steps[key] = self._engine.bind(ACCEPT, tensors), tensors
        step, tensors = self._steps[key]
        tensors["count"].write(counts)
        step.run()
        return tensors["accepted"].read(), tensors["next_token"].read()
