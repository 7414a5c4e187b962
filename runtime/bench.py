"""`dspark bench`: speeds of a bundle on this machine, plain and speculative interleaved, and where the time of a round goes.

Knows prompts and statistics. Does not know tensors.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dspark.runtime.stats import ROUND, Stats

if TYPE_CHECKING:
    from dspark.runtime.llm import LLM
    from dspark.runtime.prompts import Prompt
    from dspark.runtime.sampling import SamplingParams

_BAR = 40
WAYS = {"speculative": True, "plain": False}


@dataclass
class Measured:
    """Runs of one way to decode: wall seconds and statistics of each."""

    seconds: list[float] = field(default_factory=list)
    runs: list[Stats] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> list[float]:
        """Tokens of whole calls per second, prefill and tokenizer included, of each run."""
        return [stats.tokens / seconds for stats, seconds in zip(self.runs, self.seconds, strict=True)]

    def stages(self) -> dict[str, float]:
        """Return the milliseconds a round of each stage, medians over the runs.

        `tokenizer` is what whole calls spend outside prefill and rounds: encoding, decoding, checking parameters.
        """
        rows = [_stages(stats, seconds) for stats, seconds in zip(self.runs, self.seconds, strict=True)]
        return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def _stages(stats: Stats, seconds: float) -> dict[str, float]:
    engine = {name: stats.engine[name] for name in ROUND if name != "choose"}
    choose = stats.seconds["choose"]
    stages = {
        **engine,
        "choose": choose,
        "host": stats.decode_seconds - sum(engine.values()) - choose,
        "tokenizer": seconds - stats.seconds["prefill"] - stats.decode_seconds,
    }
    return {name: 1e3 * spent / max(1, stats.rounds) for name, spent in stages.items()}


def measure(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, repeats: int) -> dict[str, Measured]:
    """Decode every prompt both ways in turn, one at a time, after a warm-up that is not counted."""
    for speculative in WAYS.values():
        llm.generate([prompts[0]], params, speculative=speculative)
    measured = {way: Measured() for way in WAYS}
    for _ in range(repeats):
        totals = {way: (Stats(), 0.0) for way in WAYS}
        for prompt in prompts:
            for way, speculative in WAYS.items():
                began = time.perf_counter()
                (output,) = llm.generate([prompt], params, speculative=speculative)
                stats, seconds = totals[way]
                stats.add(output.stats)
                totals[way] = stats, seconds + time.perf_counter() - began
        for way, (stats, seconds) in totals.items():
            measured[way].runs.append(stats)
            measured[way].seconds.append(seconds)
    return measured


def summary(measured: dict[str, Measured]) -> dict[str, Any]:
    """Return speeds, their ratio, accepted length, the host's share, and the stages of both ways."""
    fast, slow = (measured[way] for way in WAYS)
    ratios = [a / b for a, b in zip(fast.tokens_per_second, slow.tokens_per_second, strict=True)]
    return {
        "tokens_per_second": {way: statistics.median(runs.tokens_per_second) for way, runs in measured.items()},
        "ratio": statistics.median(ratios),
        "mean_accepted_length": fast.runs[0].mean_accepted_length,
        "host_share": {way: statistics.median(stats.host_share for stats in runs.runs) for way, runs in measured.items()},
        "stages_ms": {way: runs.stages() for way, runs in measured.items()},
    }


def report(numbers: dict[str, Any], *, profile: bool) -> str:
    """Return the summary as text; `profile` adds the stages of a round with bars."""
    lines = [f"{way:<14} {speed:9.1f} tok/s, prefill included" for way, speed in numbers["tokens_per_second"].items()]
    lines.append(f"{'ratio':<14} {numbers['ratio']:9.2f}")
    lines.append(f"{'accepted':<14} {numbers['mean_accepted_length']:9.2f} tokens a round, bonus included")
    lines += [f"{'host, ' + way:<17} {share:9.1%} of a round outside engine runs" for way, share in numbers["host_share"].items()]
    if profile:
        for way, stages in numbers["stages_ms"].items():
            total = sum(stages.values())
            lines.append(f"\n{way} round: {total:.2f} ms")
            for name, spent in stages.items():
                share = spent / total if total else 0.0
                lines.append(f"  {name:<10} {spent:8.3f} ms {share:6.1%} {'█' * round(_BAR * share)}")
    return "\n".join(lines)
