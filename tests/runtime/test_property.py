"""Any interleaving of arrivals, steps, rounds of any width and cancels: each request's output is the plain decoder's, cut where its own
rule says."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Parts, ScriptedDrafter, open_parts, request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark.runtime.request import Request

SLOTS, LONGEST = 4, 60


class World:
    """One set of parts for all examples, as slots must forget their last users; and the truth by prompt."""

    def __init__(self, bundle: Path) -> None:
        self.parts, self._plain = open_parts(bundle, slots=SLOTS), open_parts(bundle, slots=1)
        self.truth = cache(self._truth)

    def _truth(self, prompt: tuple[int, ...]) -> list[int]:
        one, decoder = request(prompt, LONGEST, speculative=False), self._plain.decoder()
        decoder.add(one)
        while one.finish_reason is None:
            decoder.step()
        return one.output

    def check(self, one: Request) -> None:
        """The output is the truth up to the first stop token or the limit; nothing else was emitted or counted."""
        truth, stop = self.truth(tuple(one.prompt)), one.rule.stop_ids
        limit = one.rule.max_tokens
        end = next((i + 1 for i, token in enumerate(truth[:limit]) if token in stop), None)
        if one.finish_reason in ("abort", None):
            assert one.output == truth[: len(one.output)]
            assert len(one.output) < limit
            assert not set(one.output) & stop
            return
        assert one.output == truth[: end or limit]
        assert one.finish_reason == ("stop" if end else "length")
        assert sum(one.stats.accepted_per_round) == len(one.output) - 1


@pytest.fixture(scope="module")
def world(small_bundle: Path) -> World:
    return World(small_bundle)


def decoder_of(parts: Parts, truth: dict[Any, list[int]], rights: list[int]) -> Any:
    """A decoder whose drafter is right for `rights` positions in turn; without `rights`, the bundle's own."""
    if not rights:
        return parts.decoder()
    return parts.decoder(ScriptedDrafter(parts.drafter, truth, lambda _name, number: rights[number % len(rights)], 320))


PROMPTS = st.lists(st.integers(0, 299), min_size=1, max_size=6).map(tuple) | st.integers(0, 5).map(lambda n: tuple(range(7, 90 + n)))
ARRIVALS = st.fixed_dictionaries(
    {
        "prompt": PROMPTS,
        "max_tokens": st.integers(1, LONGEST),
        "stop_at": st.none() | st.integers(0, LONGEST - 1),
        "speculative": st.booleans(),
        "steps": st.integers(0, 4),
        "cancel": st.none() | st.integers(0, 6),
        "width": st.none() | st.integers(1, 8),
    }
)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.lists(ARRIVALS, min_size=1, max_size=9), st.lists(st.integers(0, 7), max_size=4))
def test_any_traffic(world: World, arrivals: list[dict[str, Any]], rights: list[int]) -> None:
    """Requests arrive between steps, some are cancelled; between steps a round of any width runs for some of them."""
    rng = np.random.default_rng(len(arrivals))
    truth = {number: world.truth(arrival["prompt"]) for number, arrival in enumerate(arrivals)}
    decoder, requests = decoder_of(world.parts, truth, rights), []
    try:
        for number, arrival in enumerate(arrivals):
            stop = [] if arrival["stop_at"] is None else [truth[number][arrival["stop_at"]]]
            one = request(arrival["prompt"], arrival["max_tokens"], stop, name=number, speculative=arrival["speculative"])
            requests.append(one)
            decoder.add(one)
            for _ in range(arrival["steps"]):
                decoder.step()
            if arrival["cancel"] is not None and arrival["cancel"] < len(requests):
                decoder.cancel(requests[arrival["cancel"]])
            ready = [r for r in decoder._scheduler.running if r.is_prefilled and r.finish_reason is None and r.left > 8]
            if arrival["width"] is not None and ready:
                chosen = [ready[i] for i in rng.permutation(len(ready))[: rng.integers(1, len(ready) + 1)]]
                decoder.round(chosen, width=arrival["width"])
                for r in chosen:
                    if r.finish_reason is not None:
                        decoder._end(r)
        while any(one.finish_reason is None for one in requests):
            decoder.step()
    finally:
        for one in requests:
            decoder.cancel(one)
    for one in requests:
        world.check(one)
    assert world.parts.slots.free == SLOTS
