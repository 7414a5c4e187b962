"""When a request ends: a stop token, a stop string, or the number of tokens left.

Knows token ids, text and numbers; where text comes from is runtime.tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

STOP, LENGTH, ABORT = "stop", "length", "abort"


@dataclass(frozen=True)
class StopRule:
    """Stop tokens, the least and the most tokens a request may have."""

    stop_ids: frozenset[int]
    max_tokens: int
    min_tokens: int = 0

    def cut(self, emitted: int, tokens: Sequence[int]) -> tuple[list[int], str | None]:
        """Return those of the newly committed `tokens` that belong to the output, and why it ends (None: it goes on).

        `emitted` tokens came before. The stop token itself belongs to the output. The first reason in the order of tokens counts.
        """
        kept: list[int] = []
        for token in tokens[: self.max_tokens - emitted]:
            kept.append(token)
            if token in self.stop_ids and emitted + len(kept) > self.min_tokens:
                return kept, STOP
        return kept, LENGTH if emitted + len(kept) >= self.max_tokens else None


class _Stream(Protocol):
    def push(self, tokens: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class OutputText:
    """The text of an output as its tokens come, up to a stop string.

    `strings` end the output; the one that did is left out of the text unless `include` is set. Text that may be the begin of one is held
    back from `take` until that is decided.
    """

    def __init__(self, stream: _Stream, strings: Sequence[str] = (), *, include: bool = False) -> None:
        self._stream, self._strings, self._include = stream, strings, include
        self._unread: list[int] = []
        self._taken = 0
        self.text = ""
        """What the tokens gave so far, those that came since the last `take` left out where no string is looked for."""
        self.matched: str | None = None
        """The stop string that ended the output."""

    def push(self, tokens: Sequence[int], unarmed: int = 0) -> int | None:
        """Take new tokens; return how many belong to the output if a stop string ends it among them, else None.

        A string that is whole before `unarmed` of these tokens have passed does not count.
        """
        if not self._strings:
            self._unread += tokens
            return None
        for number, token in enumerate(tokens, 1):
            before = len(self.text)
            self.text += self._stream.push([token])
            if number > unarmed and self._match(before):
                return number
        return None

    def take(self, *, final: bool) -> str:
        """Return the text that has become certain since the last call; all of it if no more will come."""
        if self._unread:
            self.text += self._stream.push(self._unread)
            self._unread = []
        if final and self.matched is None:
            self.text += self._stream.finish()
        end = len(self.text) if final else len(self.text) - self._undecided()
        piece = self.text[self._taken : end]
        self._taken += len(piece)
        return piece

    def _match(self, before: int) -> bool:
        """Look for stop strings that end in the text from `before` on; cut the text at the one that ends first."""
        found = [(i + len(s), i, s) for s in self._strings if (i := self.text.find(s, max(0, before - len(s) + 1))) >= 0]
        if not found:
            return False
        end, begin, self.matched = min(found)
        self.text = self.text[: end if self._include else begin]
        return True

    def _undecided(self) -> int:
        longest = max((len(s) for s in self._strings), default=1) - 1
        tails = range(min(longest, len(self.text)), 0, -1)
        return next((n for n in tails if any(s.startswith(self.text[-n:]) for s in self._strings)), 0)
