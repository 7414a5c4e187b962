"""A request being decoded: its prompt, its output so far, and what decoding has to remember of it.

Knows token ids, text and numbers; no tensors but the taps that wait for the drafter.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from dspark.runtime.engine import Array
from dspark.runtime.processors import LogitsProcessor
from dspark.runtime.sampling import Sampled, SamplingParams
from dspark.runtime.stats import Stats
from dspark.runtime.stop import STOP, OutputText, StopRule


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
    committed: int | None = None
    """Rows of the last verification that were committed and that the drafter has not got yet; None when it has all."""
    waiting: list[Array] = field(default_factory=list)
    """Taps of committed rows before those, kept while the request does not draft."""
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

    def emit(self, choice: Choice) -> list[int]:
        """Append newly committed tokens, up to the request's end, and return those that were kept."""
        emitted = len(self.output)
        kept, self.finish_reason = self.rule.cut(emitted, choice.tokens)
        if self.text is not None:
            end = self.text.push(kept, max(0, self.rule.min_tokens - emitted))
            if end is not None:
                kept, self.finish_reason = kept[:end], STOP
        self.output += kept
        self.logprobs += choice.logprobs[: len(kept)]
        self.stats.tokens = len(self.output)
        return kept
