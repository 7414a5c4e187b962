"""Changes to the target's logits that depend on the tokens so far: penalties, bias, allowed tokens, minimal length.

Applied on the host, row by row along a block: row i is judged as if the proposals before it stood. Knows one request's parameters and
numbers; the drafter ignores all of this, which costs acceptance and never exactness. n rows, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from dspark.runtime.engine import Array
from dspark.runtime.sampling import SamplingParams


class LogitsProcessor:
    """The changes that one request's parameters ask for."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], stop_ids: Collection[int], vocabulary: int) -> None:
        self._params, self._vocabulary = params, vocabulary
        self._prompt = np.unique(np.asarray(prompt, np.int64))
        self._stop_ids = np.array([token for token in stop_ids if token < vocabulary], np.int64)
        bias = params.logit_bias or {}
        self._bias_ids, self._bias = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)
        self._banned: Array | None = None
        if params.allowed_token_ids is not None:
            self._banned = np.ones(vocabulary, bool)
            self._banned[list(params.allowed_token_ids)] = False
        self._penalises = bool(params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty)

    def active(self, emitted: int) -> bool:
        """Whether logits change for a token that follows `emitted` others."""
        return self._penalises or bool(len(self._bias)) or self._banned is not None or emitted < self._params.min_tokens

    def apply(self, logits: Array, output: Sequence[int], proposals: Sequence[int]) -> None:
        """Change `logits [n,V]` in place; row i follows `output` and the first i of `proposals`.

        In vLLM's order: allowed tokens, minimal length, bias, then repetition, frequency and presence penalty.
        """
        for i, row in enumerate(logits):
            tokens = [*output, *proposals[:i]]
            if self._banned is not None:
                row[self._banned] = -np.inf
            if len(tokens) < self._params.min_tokens:
                row[self._stop_ids] = -np.inf
            row[self._bias_ids] += self._bias
            if self._penalises:
                self._penalise(row, np.asarray(tokens, np.int64))

    def _penalise(self, row: Array, output: Array) -> None:
        params = self._params
        ids, counts = np.unique(output, return_counts=True)
        if params.repetition_penalty != 1:
            seen = np.union1d(self._prompt, ids)
            values = row[seen]
            row[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        row[ids] -= np.float32(params.frequency_penalty) * counts + np.float32(params.presence_penalty)
