"""How tokens are chosen: a request's parameters, and the numbers they become in a round.

Names and meanings as in vLLM. Knows numbers only. B rows of the bound slot range, K proposals.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.runtime.engine import Array
from dspark.runtime.errors import RequestError, numbered
from dspark.runtime.graphs import MOST_LOGPROBS
from dspark.runtime.streams import Purpose, uniforms

COLD = 1e-5
"""A temperature below this is greedy, as in the reference; the graphs hold it too."""
_MAX_SEED = 2**64 - 1
_ALL = 2**31 - 1
"""A top_k that keeps every token."""
_LARGEST = 1e38


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request; names as in vLLM. The defaults are greedy.

    Temperature, top_k, top_p and min_p shape the target's distribution in the graph; penalties, bias, allowed tokens and min_tokens
    change its logits on the host, position by position. The drafter only follows the temperature: that costs acceptance, never exactness.
    """

    max_tokens: int | None = 256
    """None: as many as the context allows."""
    min_tokens: int = 0
    """No stop token may be chosen, and no stop string counts, before this many tokens."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens, ties included; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the most likely tokens that together have this probability, of those that top_k kept."""
    min_p: float = 0.0
    """Keep tokens of at least this share of the most likely one's probability."""
    seed: int | None = None
    """Makes sampled output reproducible, for one way of decoding: plain, or speculative with the same number of proposals; and for one
    length limit, as the round before it judges fewer proposals."""
    stop: str | Sequence[str] | None = None
    """Strings that end the output when they appear in it."""
    include_stop_str_in_output: bool = False
    """Whether the text has the stop string, or the stop token, that ended it."""
    stop_token_ids: Collection[int] | None = None
    """Token ids that end the output, besides the model's own."""
    ignore_eos: bool = False
    """Whether the model's own end tokens are ordinary ones."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that the prompt or the output has."""
    presence_penalty: float = 0.0
    """Subtracted from logits of tokens that the output has."""
    frequency_penalty: float = 0.0
    """Subtracted from logits as often as the output has the token."""
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Collection[int] | None = None
    """If given, no other token is chosen."""
    logprobs: int | None = None
    """If given, log-probabilities of the chosen tokens and of this many most likely ones, under the target's unprocessed logits."""

    def __post_init__(self) -> None:
        checks = [
            (self.max_tokens is None or _is_int(self.max_tokens, 1), "max_tokens", "None or an integer of at least 1"),
            (_is_int(self.min_tokens, 0), "min_tokens", "an integer of at least 0"),
            (_is_number(self.temperature, 0.0), "temperature", "a number of at least 0"),
            (_is_int(self.top_k, -1), "top_k", "an integer of at least 1, or 0 or -1 to keep all"),
            (_is_number(self.top_p, 0.0, 1.0) and self.top_p > 0, "top_p", "a number above 0, at most 1"),
            (_is_number(self.min_p, 0.0, 1.0), "min_p", "a number of 0 to 1"),
            (self.seed is None or _is_int(self.seed, 0, _MAX_SEED), "seed", "None or an integer of 0 to 2**64 - 1"),
            (self.stop is None or _are_strings(self.stop), "stop", "None, a string or strings, none empty"),
            (isinstance(self.include_stop_str_in_output, bool), "include_stop_str_in_output", "True or False"),
            (self.stop_token_ids is None or _are_tokens(self.stop_token_ids), "stop_token_ids", "None or token ids"),
            (isinstance(self.ignore_eos, bool), "ignore_eos", "True or False"),
            (_is_number(self.repetition_penalty, 0.01, 100.0), "repetition_penalty", "a number of 0.01 to 100"),
            (_is_number(self.presence_penalty, -2.0, 2.0), "presence_penalty", "a number of -2 to 2"),
            (_is_number(self.frequency_penalty, -2.0, 2.0), "frequency_penalty", "a number of -2 to 2"),
            (self.logit_bias is None or _is_bias(self.logit_bias), "logit_bias", "None or numbers of -100 to 100 by token id"),
            (_is_allowed(self.allowed_token_ids), "allowed_token_ids", "None or at least one token id"),
            (
                self.logprobs is None or _is_int(self.logprobs, 0, MOST_LOGPROBS),
                "logprobs",
                f"None or an integer of 0 to {MOST_LOGPROBS}",
            ),
        ]
        faults = [f"{name} is {getattr(self, name)!r}, expected {expected}" for holds, name, expected in checks if not holds]
        if not faults and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            faults.append(f"min_tokens is {self.min_tokens}, expected at most max_tokens, which is {self.max_tokens}")
        if faults:
            raise RequestError(f"these sampling parameters cannot be used:{numbered(faults)}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is chosen."""
        return self.temperature < COLD

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, however they were given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def token_ids(self) -> set[int]:
        """Return all token ids that the parameters name and that need a logit."""
        allowed = () if self.allowed_token_ids is None else self.allowed_token_ids
        return {int(token) for token in (*(self.logit_bias or ()), *allowed)}


@dataclass(frozen=True)
class Sampled:
    """One row of a round that samples: its request's parameters and seed, and the position of the first token the round may give."""

    params: SamplingParams
    seed: int
    position: int


class Draws:
    """The numbers of a round by row: rows of no request are greedy and use no random number."""

    def __init__(self, rows: Mapping[int, Sampled], batch: int, num_speculative_tokens: int) -> None:
        k = num_speculative_tokens
        self.temperature = np.zeros(batch, np.float32)
        self.top_k = np.full(batch, _ALL, np.int64)
        self.top_p, self.min_p = np.ones(batch, np.float32), np.zeros(batch, np.float32)
        self.draft_uniform, self.accept_uniform = np.zeros((batch, k), np.float32), np.zeros((batch, k), np.float32)
        self.next_uniform = np.zeros(batch, np.float32)
        for row, sampled in rows.items():
            params = sampled.params
            self.temperature[row], self.top_p[row], self.min_p[row] = params.temperature, params.top_p, params.min_p
            if params.top_k > 0:
                self.top_k[row] = min(params.top_k, _ALL)
            if not params.is_greedy:
                self.draft_uniform[row] = uniforms(sampled.seed, Purpose.DRAFT, sampled.position, k)
                self.accept_uniform[row] = uniforms(sampled.seed, Purpose.ACCEPT, sampled.position, k)
                self.next_uniform[row] = uniforms(sampled.seed, Purpose.NEXT, sampled.position, 1)[0]
        warm = self.temperature >= COLD
        self.any = bool(warm.any())
        """Whether any row samples."""
        self.truncates = bool((warm & ((self.top_k < _ALL) | (self.top_p < 1) | (self.min_p > 0))).any())
        """Whether any row that samples cuts its distribution."""

    def of(self, names: Sequence[str]) -> dict[str, Array]:
        """Return the arrays of these names."""
        return {name: getattr(self, name) for name in names}


def _is_int(value: Any, least: int, most: int | None = None) -> bool:
    is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return is_int and value >= least and (most is None or value <= most)


def _is_number(value: Any, least: float | None = None, most: float | None = None) -> bool:
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST
    return bool(is_number) and (least is None or value >= least) and (most is None or value <= most)


def _are_tokens(value: Any) -> bool:
    return isinstance(value, (Sequence, Set, np.ndarray)) and not isinstance(value, str) and all(_is_int(item, 0) for item in value)


def _are_strings(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value)
    return isinstance(value, (Sequence, Set)) and all(isinstance(item, str) and item for item in value)


def _is_bias(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_int(token, 0) and _is_number(bias, -100.0, 100.0) for token, bias in value.items())


def _is_allowed(value: Any) -> bool:
    return value is None or (_are_tokens(value) and len(value) > 0)
