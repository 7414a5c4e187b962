"""Several requests at once: each gives what it gives alone, in whatever slot, beside whatever neighbours, however wide the round."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import engines
import numpy as np
import oracle
import pytest
from conftest import PAIR, SMALL, Export
from engines import Parts, ScriptedDrafter, fed_whole, open_parts, request, start
from random_pair import write_pair

from dspark.runtime import LLM, SamplingParams
from dspark.runtime.errors import LimitError, RequestError, UnknownRequestError
from dspark.runtime.request import Request
from dspark.runtime.schedule import Scheduler
from dspark.runtime.target import Verified

WINDOW = 32
Array = np.ndarray


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of lengths 1 to 90, some longer than a chunk of 64."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 300, length).tolist() for length in rng.integers(1, 91, count)]


def plain(bundle: Path, prompt: list[int], tokens: int, **params: Any) -> list[int]:
    one = request(prompt, tokens, speculative=False, **params)
    for _ in engines.decode(open_parts(bundle, slots=1).decoder(), one):
        pass
    return one.output


def run(parts: Parts, *requests: Request, drafter: Any = None) -> None:
    for _ in engines.decode(parts.decoder(drafter), *requests):
        pass


def visible(parts: Parts, name: object) -> list[Array]:
    """Return the rows of caches and rings that a request can see."""
    slot = parts.slots.slot(name)
    length, total, first = (int(n[slot]) for n in (parts.target._length, parts.drafter._total, parts.drafter._first))
    view, ring = parts.slots.view([name]), [p % parts.drafter.rings.capacity for p in range(max(first, total - WINDOW), total)]
    caches = [t.read()[0, :, :length].copy() for t in parts.target.caches.tensors(view).values()]
    return caches + [t.read()[0][:, ring].copy() for t in parts.drafter.rings.tensors(view).values()]


def rebuilt(bundle: Path, tokens: list[int]) -> list[Array]:
    """Return the same after feeding all tokens at once to fresh parts."""
    return visible(fed_whole(bundle, tokens), "r")


@pytest.mark.parametrize(
    ("each_bundle", "seed"), [("float", 0), ("float", 1), ("float", 2), ("int8", 0), ("int4", 0)], indirect=["each_bundle"]
)
def test_any_mix_of_rollbacks_keeps_the_state(each_bundle: Path, seed: int) -> None:
    """Three slots, 30 rounds, each request right for a random 0..7 positions: caches and rings equal rebuilt ones."""
    rng, parts, names = np.random.default_rng(seed), open_parts(each_bundle), "abc"
    own = dict(zip(names, prompts(3, seed), strict=True))
    truth = {name: plain(each_bundle, prompt, 260) for name, prompt in own.items()}
    drafter = ScriptedDrafter(parts.drafter, truth, lambda _name, _round: int(rng.integers(0, 8)), 320)
    decoder, requests = parts.decoder(drafter), [request(prompt, 260, name=name) for name, prompt in own.items()]
    start(decoder, *requests)
    for _ in range(30):
        decoder.round([one for one in requests if one.finish_reason is None])
    decoder._pending.settle([])
    for one in requests:
        decoder._pending.write(one.id)
        assert one.output == truth[one.id][: len(one.output)]
        assert set(one.stats.accepted) >= {0, 7}
        for ours, theirs in zip(visible(parts, one.id), rebuilt(each_bundle, [*one.prompt, *one.output[:-1]]), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("each_bundle", "slots"), [("float", 1), ("float", 2), ("float", 3), ("float", 4), ("int8", 2), ("int4", 3)], indirect=["each_bundle"]
)
def test_more_requests_than_slots(each_bundle: Path, slots: int) -> None:
    """Ten prompts arrive at once, end at different times and hand their slots on; sampled ones give what they give alone."""
    own, llm = prompts(10), LLM(each_bundle, max_num_seqs=slots)
    params = [SamplingParams(max_tokens=5 + 7 * i, temperature=0.8 * (i % 3 == 0), seed=i) for i in range(10)]
    outputs = llm.generate(own, params)
    alone = LLM(each_bundle, max_num_seqs=1)
    for prompt, param, output in zip(own, params, outputs, strict=True):
        assert output.token_ids == alone.generate([prompt], param)[0].token_ids
        if param.is_greedy:
            assert output.token_ids == plain(each_bundle, prompt, param.max_tokens)
        assert (len(output.token_ids), output.finish_reason) == (param.max_tokens, "length")


def test_plain_and_speculative_requests_in_one_batch(each_bundle: Path) -> None:
    parts, own = open_parts(each_bundle), prompts(4, 3)
    requests = [request(prompt, 40, name=i, speculative=i % 2 == 0) for i, prompt in enumerate(own)]
    run(parts, *requests)
    for one in requests:
        assert one.output == plain(each_bundle, list(one.prompt), 40)
        assert (max(one.stats.proposed) > 0) == one.speculative


def test_three_requests_in_a_bucket_of_four(each_bundle: Path) -> None:
    """Case A1: the free slot takes the padding's junk; the live slots hold what a run without the bucket gives."""
    own = prompts(3, 5)
    states = []
    for slots in (4, 3):  # with three slots the range has exactly three rows
        parts = open_parts(each_bundle, slots=slots)
        decoder, requests = parts.decoder(), [request(prompt, 200, name=i) for i, prompt in enumerate(own)]
        start(decoder, *requests)
        for _ in range(20):
            decoder.round(requests)
        assert decoder._slots.view([0, 1, 2]).size == slots
        states.append(([one.output for one in requests], [visible(parts, i) for i in range(3)]))
    assert states[0][0] == states[1][0]
    for pair in zip(states[0][1], states[1][1], strict=True):
        for ours, theirs in zip(*pair, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_gap_is_closed(small_bundle: Path) -> None:
    """When low slots are free, the highest request moves down with its rows, and gives what it gives alone."""
    parts, own = open_parts(small_bundle), prompts(4, 6)
    lengths = [3, 60, 3, 60]
    requests = [request(prompt, n, name=i) for i, (prompt, n) in enumerate(zip(own, lengths, strict=True))]
    decoder = parts.decoder()
    for one in requests:
        decoder.add(one)
    slots, sizes = {}, []
    while any(one.finish_reason is None for one in requests):
        decoder.step()
        live = [one.id for one in requests if one.finish_reason is None]
        slots.update({name: parts.slots.slot(name) for name in live})
        sizes += [parts.slots.view(live).size] if live else []
    assert slots[3] < 3, "it moved"
    assert sizes[-1] < 4
    for one in requests:
        assert one.output == plain(small_bundle, list(one.prompt), len(one.output))
    assert parts.slots.free == 4


def test_moving_takes_the_state_along(small_bundle: Path) -> None:
    parts, decoder, own = open_parts(small_bundle), None, prompts(3, 8)
    decoder, requests = parts.decoder(), [request(prompt, 100, name=i) for i, prompt in enumerate(own)]
    start(decoder, *requests)
    for _ in range(3):
        decoder.round(requests)
    decoder.release(requests[0])
    before = visible(parts, 2)
    decoder._close_gap()
    assert parts.slots.slot(2) == 0
    for ours, theirs in zip(visible(parts, 2), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for _ in range(3):
        decoder.round(requests[1:])
    decoder._pending.settle([])
    for one in requests[1:]:
        decoder._pending.write(one.id)
        assert one.output == plain(small_bundle, list(one.prompt), len(one.output))
        for ours, theirs in zip(visible(parts, one.id), rebuilt(small_bundle, [*one.prompt, *one.output[:-1]]), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_an_unfed_request_moves_to_a_clean_slot(small_bundle: Path) -> None:
    """It has no rows to take along; those of the slot's last user are not its own."""
    parts = open_parts(small_bundle)
    for name in "ab":
        parts.slots.admit(name)
        parts.drafter.write_context(name, np.full((40, 192), np.nan, np.float32), np.arange(40))
        parts.target.prefill(name, [1, 2, 3])
        for tensor in parts.target.caches.tensors(parts.slots.view([name])).values():
            tensor.write(np.nan)
    parts.slots.admit("c")
    parts.slots.admit("d")
    for name in "ab":
        parts.target.release(name)
        parts.drafter.release(name)
        parts.slots.release(name)
    parts.slots.move_down("d")
    assert parts.slots.slot("d") == 0
    for state in (parts.drafter.rings, parts.target.caches):
        assert all((tensor.read() == 0).all() for tensor in state.tensors(parts.slots.view(["d"])).values())


def test_moving_takes_the_hole_along(small_bundle: Path) -> None:
    parts, rng = open_parts(small_bundle), np.random.default_rng(0)
    for name in "abc":
        parts.slots.admit(name)
        parts.drafter.write_context(name, rng.standard_normal((6, 192)).astype(np.float32), np.arange(3, 9))
    before = parts.drafter.propose("c", [5]).debug["draft_logits"].read()[0].copy()
    parts.drafter.release("a")
    parts.slots.release("a")
    assert parts.slots.straggler() == "c"
    parts.slots.move_down("c")
    assert parts.slots.slot("c") == 0
    assert parts.slots.straggler() is None
    np.testing.assert_allclose(parts.drafter.propose("c", [5]).debug["draft_logits"].read()[0], before, atol=1e-6)


def test_state_grows_with_the_slots_in_use(small_bundle: Path) -> None:
    llm, own = LLM(small_bundle), prompts(4, 9)
    llm.generate(own[:1], SamplingParams(max_tokens=4))
    assert llm._decoder._drafter.rings.slots == llm._decoder._target.caches.slots == 1
    llm.generate(own, SamplingParams(max_tokens=4))
    assert llm._decoder._drafter.rings.slots == llm._decoder._target.caches.slots == 4


@pytest.mark.parametrize("widths", [[1], [2], [8], [1, 8], [3, 1, 1, 7], [1] * 70 + [8] * 3])
def test_any_width(small_bundle: Path, small_pair: Path, widths: list[int]) -> None:
    """Rounds of any width, one after the other: tokens are the target's, drafts those on true context, also behind 70 plain steps."""
    prompt, parts = [7, 250, 31, 99, 4], open_parts(small_bundle)
    truth, seen = plain(small_bundle, prompt, 130), []
    drafter = ScriptedDrafter(parts.drafter, {"r": truth}, lambda _name, number: (3 * number) % 8, 320)
    drafter.propose_hook = lambda proposals: seen.append((one.position, proposals.debug["draft_logits"].read()[0].copy()))
    decoder, one = parts.decoder(drafter), request(prompt, 130)
    start(decoder, one)
    for number in range(max(8, len(widths))):
        width = widths[number % len(widths)]
        (kept,) = decoder.round([one], width=width)
        assert 1 <= len(kept) <= width
        assert one.stats.proposed[-1] == width - 1
    assert one.output == truth[: len(one.output)]
    assert len(seen) == sum(widths[i % len(widths)] > 1 for i in range(max(8, len(widths))))
    target, own = oracle.Target(small_pair / "target"), oracle.Drafter(small_pair / "drafter")
    tokens = prompt + truth
    taps = target.taps(tokens, own.config["target_layer_ids"])
    for anchor, logits in seen:
        np.testing.assert_allclose(logits, own.windowed(taps[:anchor], anchor, tokens[anchor], window=WINDOW)["logits"], atol=1e-4)


def test_counts_are_the_rounds_own(small_bundle: Path) -> None:
    """Two requests in a round of width 6: the proposals that count differ, those behind are not judged though they are right."""
    parts, own = open_parts(small_bundle), prompts(2, 11)
    truth = {i: plain(small_bundle, prompt, 60) for i, prompt in enumerate(own)}
    decoder = parts.decoder(ScriptedDrafter(parts.drafter, truth, lambda *_: 7, 320))
    requests = [request(prompt, 60, name=i) for i, prompt in enumerate(own)]
    start(decoder, *requests)
    assert [len(kept) for kept in decoder.round(requests, width=6, counts=[5, 2])] == [6, 3]
    assert [len(kept) for kept in decoder.round(requests, counts=[0, 4])] == [1, 5]
    assert [len(kept) for kept in decoder.round(requests)] == [8, 8]
    assert [one.output for one in requests] == [truth[i][: len(one.output)] for i, one in enumerate(requests)]
    before = [visible(parts, i) for i in range(2)]
    for options in ({"width": 0}, {"width": 9}, {"width": 2, "counts": [2, 0]}, {"counts": [1]}, {"counts": [-1, 0]}, {"counts": [8, 0]}):
        with pytest.raises(RequestError):
            decoder.round(requests, **options)
    for old, new in zip(before, [visible(parts, i) for i in range(2)], strict=True):
        for ours, theirs in zip(old, new, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_width_of_one_is_a_plain_step(small_bundle: Path) -> None:
    """It runs the target on one row and the acceptance, no more; context rows are written by one call in many steps."""
    parts, ran = open_parts(small_bundle, slots=1), []
    load = parts.engine.bind

    def bind(graph: str, tensors: Any) -> Any:
        step, shape = load(graph, tensors), tensors["tokens"].shape if graph == "target" else None
        run_step = step.run
        step.run = lambda: (ran.append((graph, shape)), run_step())[1]
        return step

    parts.engine.bind = bind
    decoder, one = parts.decoder(), request([1, 2, 3], 200)
    start(decoder, one)
    ran.clear()
    for _ in range(130):
        decoder.round([one], width=1)
    assert {graph for graph, _ in ran} == {"target", "accept", "context"}
    assert {shape for graph, shape in ran if graph == "target"} == {(1, 1)}
    assert sum(graph == "context" for graph, _ in ran) == 2, "64 rows wait for each call"


@pytest.mark.parametrize("kept", [0, 1, 5, 40])
def test_a_hole_in_the_prefix(small_bundle: Path, small_pair: Path, kept: int) -> None:
    """A target that computes only the newest rows of a prompt, as with a prefix cache: the drafter drafts from what it has.

    Draft logits equal the oracle's without the rows before; the hole leaves the window after some rounds.
    """

    class Cached:
        def __init__(self, target: Any) -> None:
            self._target, self.verify, self.commit, self.release = target, target.verify, target.commit, target.release

        def prefill(self, name: object, tokens: list[int]) -> Verified:
            verified = self._target.prefill(name, tokens)
            taps = verified.taps.tensor.read()[:, max(0, len(tokens) - kept) :]
            tensor = parts.engine.allocate(taps.shape, "model")
            tensor.write(taps)
            return Verified(verified.logits, type(verified.taps)(verified.taps.view, tensor))

    parts, prompt, seen = open_parts(small_bundle), prompts(1, 13)[0] * 3, []
    prompt = prompt[:45]
    truth = plain(small_bundle, prompt, 80)
    drafter = ScriptedDrafter(parts.drafter, {"r": truth}, lambda _name, number: (2 * number) % 8, 320)
    drafter.propose_hook = lambda proposals: seen.append((one.position, proposals.debug["draft_logits"].read()[0].copy()))
    parts.target = Cached(parts.target)
    one = request(prompt, 80)
    run(parts, one, drafter=drafter)
    assert one.output == truth
    target, own = oracle.Target(small_pair / "target"), oracle.Drafter(small_pair / "drafter")
    tokens = prompt + truth
    taps, first = target.taps(tokens, own.config["target_layer_ids"]), len(prompt) - kept
    for anchor, logits in seen:
        expected = own.windowed(taps[:anchor], anchor, tokens[anchor], window=WINDOW, first=first)
        np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
    unholed = own.windowed(taps[: len(prompt)], len(prompt), tokens[len(prompt)], window=WINDOW)["logits"]
    assert (np.abs(seen[0][1] - unholed).max() > 1e-3) == (kept < WINDOW)
    with pytest.raises(UnknownRequestError):
        parts.drafter.skip_to("r", 3)


def test_skipping_is_checked(small_bundle: Path) -> None:
    parts = open_parts(small_bundle)
    parts.slots.admit("r")
    parts.drafter.write_context("r", np.zeros((5, 3 * 64), np.float32), np.arange(5))
    for position in (4, 512):
        with pytest.raises(RequestError, match=f"rows up to position 5: it can skip .* not to {position}"):
            parts.drafter.skip_to("r", position)
    parts.drafter.skip_to("r", 9)
    assert parts.drafter.total("r") == 9


def test_a_request_that_does_not_fit_does_not_start(small_bundle: Path) -> None:
    decoder = open_parts(small_bundle).decoder()
    for prompt, message in (([], "the prompt is empty"), ([5] * 512, "the prompt has 512 tokens, max_seq_len is 512")):
        with pytest.raises(RequestError, match=message):
            decoder.add(request(prompt, 4))
    for requests in ([], [request([1, 2], 4)]):
        with pytest.raises(RequestError, match="at least one request, each with its prompt fed"):
            decoder.round(requests)
    assert decoder.step() == []
    with pytest.raises(LimitError, match=r"max_num_seqs is 5, this bundle allows 1\.\.4"):
        LLM(small_bundle, max_num_seqs=5)


def test_cancelling_frees_the_slot(small_bundle: Path) -> None:
    """A request is cancelled while it waits, while its prompt is fed, and while it decodes; the others do not notice."""
    parts, own = open_parts(small_bundle, slots=2), prompts(5, 15)
    own[1] = (own[1] * 90)[:200]  # fed in several steps
    decoder, requests = parts.decoder(), [request(prompt, 30, name=i) for i, prompt in enumerate(own)]
    for one in requests:
        decoder.add(one)
    decoder.step()
    assert not requests[1].is_prefilled
    for i in (1, 4, 0, 0):
        decoder.cancel(requests[i])
    assert [one.finish_reason for one in requests] == ["abort", "abort", None, None, "abort"]
    while any(one.finish_reason is None for one in requests):
        decoder.step()
    for one in requests[2:4]:
        assert one.output == plain(small_bundle, list(one.prompt), 30)
    assert parts.slots.free == 2
    decoder.cancel(requests[2])
    assert requests[2].finish_reason == "length"


def test_scheduler() -> None:
    """First come, first served; one chunk of prompt tokens a step; a round takes whoever has a token, each with its own counts."""
    scheduler = Scheduler(chunk=10)
    requests = [request([1] * n, 5, name=n) for n in (4, 25, 3)]
    for one in requests:
        scheduler.add(one)
    assert scheduler.round(7) is None
    assert scheduler.admit(free=2) == requests[:2]
    assert list(scheduler.prefills()) == [(requests[0], 4), (requests[1], 6)]
    requests[0].fed, requests[1].fed = 4, 6
    requests[0].output = [9, 9]
    assert list(scheduler.prefills()) == [(requests[1], 16)]
    plan = scheduler.round(7)
    assert plan is not None
    assert (plan.requests, plan.width, plan.counts) == (requests[:1], 3, [2])
    requests[1].fed, requests[1].output = 25, [9]
    requests[0].output = [9] * 4
    plan = scheduler.round(2)
    assert plan is not None
    assert (plan.width, plan.counts) == (3, [0, 2])
    scheduler.remove(requests[0])
    scheduler.remove(requests[2])
    assert (scheduler.running, list(scheduler.waiting)) == ([requests[1]], [])


KINDS = ("prose", "func", "math")


@pytest.mark.parametrize(("served", "batch"), [(7, 1), (7, 3), (7, 8), (6, 2), (5, 4), (4, 5), (3, 6), (2, 7), (1, 8)])
def test_the_pair_at_every_depth_and_batch(pair_bundle: Path, served: int, batch: int) -> None:
    """Prompts of three kinds in turn, 200 tokens each, equal to plain decoding token by token."""
    files = [(PAIR / "prompts" / f"{kind}.jsonl").read_text().splitlines()[:3] for kind in KINDS]
    own = [json.loads(line)["ids"] for lines in zip(*files, strict=True) for line in lines][:batch]
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    outputs = LLM(pair_bundle, num_speculative_tokens=served, max_num_seqs=batch).generate(own, params)
    for prompt, output in zip(own, outputs, strict=True):
        assert output.token_ids == plain_pair(pair_bundle, tuple(prompt))
        assert len(output.token_ids) == 200


@cache
def plain_pair(bundle: Path, prompt: tuple[int, ...]) -> list[int]:
    """Return 200 tokens of plain decoding."""
    llm = LLM(bundle, speculative=False, max_num_seqs=1)
    return llm.generate([prompt], SamplingParams(max_tokens=200, ignore_eos=True))[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("block", [15, 16])
def test_long_blocks(export: Export, tmp_path: Path, block: int) -> None:
    """Blocks of 15 and 16, batch 1..8, 200 tokens: random proposals and right ones, equal to plain decoding."""
    write_pair(tmp_path, replace(SMALL, block=block), dtype="fp32", deviation=0.15)
    bundle = export(tmp_path, ctx_window=32, max_chunk=64)
    own = prompts(8, block)
    truth = {i: plain(bundle, prompt, 200) for i, prompt in enumerate(own)}
    for batch in (1, 3, 8):
        parts = open_parts(bundle, slots=8)
        drafter = ScriptedDrafter(parts.drafter, truth, lambda name, number: (5 * number + int(str(name))) % (block + 1), 320)
        requests = [request(prompt, 200, name=i) for i, prompt in enumerate(own[:batch])]
        run(parts, *requests, drafter=drafter)
        for one in requests:
            assert one.output == truth[one.id]
            assert {0, block} <= set(one.stats.accepted)
        parts = open_parts(bundle, slots=8)
        requests = [request(prompt, 200, name=i) for i, prompt in enumerate(own[:batch])]
        run(parts, *requests)
        assert [one.output for one in requests] == [truth[i] for i in range(batch)]


@pytest.mark.slow
def test_four_thousand_tokens(export: Export, tmp_path: Path) -> None:
    """Window 32, positions up to 4,200: near 1,000, 2,000 and 4,000 draft logits equal the oracle's; the tokens are the plain decoder's."""
    write_pair(tmp_path, replace(SMALL, positions=4200), dtype="fp32", deviation=0.15)
    bundle, prompt = export(tmp_path, ctx_window=32, debug_outputs=True, max_chunk=64), [7, 250, 31, 99, 4]
    truth, parts, seen = plain(bundle, prompt, 4000), open_parts(bundle, slots=1), []
    drafter = ScriptedDrafter(parts.drafter, {"r": truth}, lambda _name, number: (3 * number) % 8, 320)
    near = (1000, 2000, 3990)
    drafter.propose_hook = lambda proposals: (
        seen.append((one.position, proposals.debug["draft_logits"].read()[0].copy()))
        if any(0 <= one.position - n < 10 for n in near)
        else None
    )
    one = request(prompt, 4000)
    run(parts, one, drafter=drafter)
    assert one.output == truth
    target, own = oracle.Target(tmp_path / "target"), oracle.Drafter(tmp_path / "drafter")
    tokens = prompt + truth
    taps = target.taps(tokens, own.config["target_layer_ids"])
    assert {n for n in near for anchor, _ in seen if 0 <= anchor - n < 10} == set(near)
    for anchor, logits in seen:
        np.testing.assert_allclose(logits, own.windowed(taps[:anchor], anchor, tokens[anchor], window=WINDOW)["logits"], atol=1e-4)


def test_an_error_ends_the_requests_it_hits(small_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that fails, then a round that fails: their requests end with the error, the others go on as if nothing was."""
    parts, own = open_parts(small_bundle), prompts(3, 17)
    decoder, requests = parts.decoder(), [request(prompt, 40, name=i) for i, prompt in enumerate(own)]
    for one in requests[:2]:
        decoder.add(one)
    for _ in range(3):
        decoder.step()
    decoder.add(requests[2])
    error = OSError("a target of the user's own may raise anything")

    def failing(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(parts.target, "prefill", failing)
        assert [one.id for one, _ in decoder.step()] == [0, 1], "the round's tokens are not lost"
    assert [one.finish_reason for one in requests] == [None, None, "abort"]
    assert (requests[2].error, parts.slots.free) == (error, 2)
    again = request(own[2], 40, name="again")
    decoder.add(again)
    while any(one.finish_reason is None for one in (*requests, again)):
        decoder.step()
    for one in (*requests[:2], again):
        assert one.output == plain(small_bundle, list(one.prompt), 40)
    last = request(own[0], 40, name="last")
    decoder.add(last)
    while not last.is_prefilled:
        decoder.step()
    with monkeypatch.context() as patch:
        patch.setattr(parts.target, "verify", failing)
        assert decoder.step() == []
    assert (last.finish_reason, last.error, parts.slots.free) == ("abort", error, 4)


def test_readers_get_the_errors_of_their_own_streams(pair_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, params = LLM(pair_bundle), SamplingParams(max_tokens=30, ignore_eos=True)
    (alone,) = llm.generate([[1, 2, 3]], params)
    good, bad = llm.stream([1, 2, 3], params), llm.stream([4, 5, 6], params)
    prefill = llm._decoder._target.prefill

    def failing(name: object, tokens: list[int]) -> Verified:
        if tokens[0] == 4:
            raise LimitError("no room")
        return prefill(name, tokens)

    monkeypatch.setattr(llm._decoder._target, "prefill", failing)
    assert good.result().token_ids == alone.token_ids
    for read in (lambda: next(bad), bad.result):
        with pytest.raises(LimitError, match="no room"):
            read()
    with pytest.raises(LimitError):
        llm.generate([[1, 2, 3], [4, 5]], params)
    assert llm._decoder._slots.free == 8


def test_an_interruption_ends_what_it_hits(pair_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, params = LLM(pair_bundle), SamplingParams(max_tokens=30, ignore_eos=True)
    stream = llm.stream([1, 2, 3], params)
    next(stream)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm._decoder._target, "verify", interrupted)
        next(stream)
    assert llm._decoder._slots.free == 8
    assert llm.generate([[1, 2, 3]], params)


def test_threads_take_turns(pair_bundle: Path) -> None:
    llm, params = LLM(pair_bundle), SamplingParams(max_tokens=60, ignore_eos=True)
    own = [[i, 7, 9 * i] for i in range(1, 9)]
    expected = [output.token_ids for output in llm.generate(own, params)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(2):
            found = list(pool.map(lambda prompt: llm.generate([prompt], params)[0].token_ids, own))
            assert found == expected


def test_a_stream_forgotten_in_the_middle_of_a_step(pair_bundle: Path) -> None:
    """The collector may drop a stream while a step runs: it ends with the next one."""
    llm = LLM(pair_bundle, max_num_seqs=2)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    kept, dropped = llm.stream([1, 2, 3], params), [llm.stream([4, 5, 6], params)]
    next(kept)
    verify = llm._decoder._target.verify

    def dropping(*arguments: Any) -> Verified:
        dropped.clear()
        return verify(*arguments)

    llm._decoder._target.verify = dropping
    output = kept.result()
    assert llm._decoder._slots.free == 2
    assert not llm._decoder._abandoned
    llm._decoder._target.verify = verify
    assert output.token_ids == llm.generate([[1, 2, 3]], params)[0].token_ids
