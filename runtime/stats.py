"""What a request did: rounds, accepted proposals, time by phase.

Knows numbers only. K proposals a round.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ROUND = ("choose", "draft", "verify", "accept")
"""Phases of a round: what is verified and drawn, then a graph or more each."""
PHASES = ("prefill", *ROUND)


@dataclass
class Stats:
    """Statistics of one request, or of several added up.

    `accepted_per_round` counts the tokens each round emitted, the bonus included; the first token comes from the prefill, in no round.
    `accepted` and `proposed` count the accepted and the judged proposals of each round, before any stop cut the output.
    """

    accepted_per_round: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Time by phase, engine and host. On a device a phase enqueues, and the wait for all of a round is part of `accept`."""
    engine: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """The part of each in which a graph ran, or was waited for."""
    decode_seconds: float = 0.0
    """From the first token to the last, engine and host."""

    @property
    def engine_seconds(self) -> float:
        """The part of `decode_seconds` in which a graph ran."""
        return sum(self.engine[phase] for phase in ROUND)

    @property
    def rounds(self) -> int:
        """Number of verification rounds."""
        return len(self.accepted_per_round)

    @property
    def mean_accepted_length(self) -> float:
        """Mean tokens a round, the bonus included."""
        return sum(self.accepted_per_round) / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second, the prefill and its token left out."""
        return sum(self.accepted_per_round) / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def host_share(self) -> float:
        """Share of the decoding time spent outside engine runs."""
        return 1 - self.engine_seconds / self.decode_seconds if self.decode_seconds else 0.0

    def acceptance_per_position(self, proposals: int) -> list[float]:
        """Share of the rounds that judged proposal k + 1 in which it was accepted, for k below `proposals`."""
        rates = []
        for k in range(proposals):
            judged = [a > k for a, n in zip(self.accepted, self.proposed, strict=True) if n > k]
            rates.append(sum(judged) / len(judged) if judged else 0.0)
        return rates

    def add(self, other: Stats) -> None:
        """Add another request's statistics."""
        self.accepted_per_round += other.accepted_per_round
        self.accepted += other.accepted
        self.proposed += other.proposed
        self.prompt_tokens += other.prompt_tokens
        self.tokens += other.tokens
        self.decode_seconds += other.decode_seconds
        for mine, theirs in ((self.seconds, other.seconds), (self.engine, other.engine)):
            for phase, seconds in theirs.items():
                mine[phase] += seconds
