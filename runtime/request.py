"""A request being decoded: its prompt, its output so far, and what decoding has to remember of it.

Knows token ids, text and numbers; no tensors but the taps that wait for the drafter.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from dspark.runtime.errors import RequestError
from dspark.runtime.processors import LogitsProcessor
from dspark.runtime.sampling import Sampled, SamplingParams
from dspark.runtime.stats import Stats
from dspark.runtime.stop import STOP, OutputText, StopRule


def room(prompt: int, max_seq_len: int) -> int:
    """Return the tokens that may follow a prompt of so many. Raises RequestError if there is none, or no prompt."""
    if not prompt:
        raise RequestError("the prompt is empty: expected at least one token")
    if prompt >= max_seq_len:
        raise RequestError(f"the prompt has {prompt} tokens, max_seq_len is {max_seq_len} with at least one for the output")
    return max_seq_len - prompt


@dataclass(frozen=True)
class Choice:
    """What a round chose for a request: the accepted proposals and the token behind them."""

    tokens: list[int]
    logprobs: list[dict[int, float]]
    """By token, the chosen one first; empty if the request does not ask for them."""


@dataclass(eq=False)
class Request:
    """A request being decoded."""

    id: Hashable
    prompt: Sequence[int]
    rule: StopRule
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    speculative: bool = True
    processor: LogitsProcessor | None = None
    text: OutputText | None = None
    """The output's text, if it is watched: for a stream, or for stop strings."""
    output: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    fed: int = 0
    """Prompt tokens that the target has got."""
    error: BaseException | None = None
    """What ended the request before its time."""
    stats: Stats = field(default_factory=Stats)

    @property
    def anchor(self) -> int:
        """The newest token: chosen, not yet seen by the target."""
        return self.output[-1]

    @property
    def position(self) -> int:
        """The anchor's position: the number of tokens the target has committed."""
        return len(self.prompt) + len(self.output) - 1

    @property
    def left(self) -> int:
        """Tokens that may still be emitted."""
        return self.rule.max_tokens - len(self.output)

    @property
    def is_prefilled(self) -> bool:
        """Whether the first token has been chosen."""
        return bool(self.output)

    @property
    def sampled(self) -> Sampled:
        """What choosing the next tokens needs: they begin behind the prompt and the output."""
        return Sampled(self.params, self.seed, len(self.prompt) + len(self.output))

    def shown(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return those of the newest tokens that belong to the text: a stop token that ends the output does only if asked for."""
        is_stop = self.finish_reason == STOP and not self.params.include_stop_str_in_output and tokens[-1] in self.rule.stop_ids
        return tokens[:-1] if is_stop else tokens

    def emit(self, choice: Choice) -> list[int]:
        """Append newly committed tokens, up to the request's end, and return those that were kept."""
        emitted = len(self.output)
        kept, self.finish_reason = self.rule.cut(emitted, choice.tokens)
        if self.text is not None:
            end = self.text.push(self.shown(kept), max(0, self.rule.min_tokens - emitted))
            if end is not None:
                kept, self.finish_reason = kept[:end], STOP
        self.output += kept
        self.logprobs += choice.logprobs[: len(kept)]
        self.stats.tokens = len(self.output)
        return kept
