"""When a request ends: a stop token, or the number of tokens left.

Knows token ids and numbers only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

STOP, LENGTH = "stop", "length"


@dataclass(frozen=True)
class StopRule:
    """Stop tokens and the most tokens a request may have."""

    stop_ids: frozenset[int]
    max_tokens: int

    @classmethod
    def of(cls, stop_ids: Iterable[int], max_tokens: int) -> StopRule:
        """Make a rule from any collection of ids."""
        return cls(frozenset(int(i) for i in stop_ids), max_tokens)

    def cut(self, emitted: int, tokens: Sequence[int]) -> tuple[list[int], str | None]:
        """Return those of the newly committed `tokens` that belong to the output, and why it ends (None: it goes on).

        `emitted` tokens came before. The stop token itself belongs to the output. The first reason in the order of tokens counts.
        """
        kept = []
        for token in tokens[: self.max_tokens - emitted]:
            kept.append(token)
            if token in self.stop_ids:
                return kept, STOP
        return kept, LENGTH if emitted + len(kept) >= self.max_tokens else None
