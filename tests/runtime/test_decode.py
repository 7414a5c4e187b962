"""Decoding: losslessness and state under every acceptance pattern, ends inside a block, limits, slots that leave each other alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import engines
import numpy as np
import oracle
import pytest
from conftest import Export
from engines import Parts, ScriptedDrafter, fed_whole, open_parts, request, start

from dspark.runtime import LLM, SamplingParams
from dspark.runtime.errors import EngineError, LimitError, RequestError
from dspark.runtime.request import Choice, Request
from dspark.runtime.state import Rows

PROMPT = [7, 250, 31, 99, 4]
LENGTH = 120
WIDTH = 8


@pytest.fixture(scope="module")
def greedy(small_pair: Path) -> list[int]:
    """The target's own greedy continuation of PROMPT, by full recomputation in numpy."""
    return oracle.Target(small_pair / "target").greedy(PROMPT, LENGTH)


def scripted(parts: Parts, truth: dict[object, list[int]], right: Callable[[object, int], int]) -> ScriptedDrafter:
    return ScriptedDrafter(parts.drafter, truth, right, parts.engine.manifest.target.vocab_size)


def decode(parts: Parts, drafter: object, one: Request) -> Request:
    for _ in engines.decode(parts.decoder(drafter), one):
        pass
    return one


def plain(bundle: Path, prompt: list[int], tokens: int) -> list[int]:
    """Return what plain decoding gives."""
    return decode(open_parts(bundle), None, request(prompt, tokens, speculative=False)).output


def rebuilt_state(bundle: Path, small_pair: Path, tokens: list[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return caches and rings of `tokens` fed at once to fresh parts, taps from the same run."""
    parts = fed_whole(bundle, tokens)
    view = parts.slots.view(["r"])
    return tuple([t.read()[0] for t in state.tensors(view).values()] for state in (parts.target.caches, parts.drafter.rings))


@pytest.mark.parametrize(
    ("each_bundle", "right"),
    [*(("float", n) for n in range(8)), *(("int8", n) for n in (0, 3, 7)), *(("int4", n) for n in (0, 3, 7))],
    indirect=["each_bundle"],
)
def test_every_acceptance_keeps_output_and_state(each_bundle: Path, small_pair: Path, greedy: list[int], right: int) -> None:
    """A drafter right for r positions, 10 rounds and more: tokens, counts, and the state equals a rebuild from scratch (case A9)."""
    parts = open_parts(each_bundle)
    if parts.engine.manifest.quantization is not None:
        greedy = plain(each_bundle, PROMPT, 100)
    drafter = scripted(parts, {"r": greedy}, lambda _name, _round: right)
    decoder, one = parts.decoder(drafter), request(PROMPT, 12 * (right + 1))
    parts.slots.admit("r")
    decoder.prefill(one)
    for _ in range(10):
        (kept,) = decoder.round([one])
        assert len(kept) == right + 1
    assert one.output == greedy[: len(one.output)]
    assert one.stats.accepted_per_round == [right + 1] * 10
    committed = PROMPT + one.output[:-1]
    assert parts.target.length("r") == len(committed)
    drafter.propose(["r"], [one.anchor], decoder._pending.taps, decoder._pending.counts(["r"]))
    assert parts.drafter.total("r") == len(committed)
    caches, rings = rebuilt_state(each_bundle, small_pair, committed)
    view, total = parts.slots.view(["r"]), len(committed)
    for ours, theirs in zip(parts.target.caches.tensors(view).values(), caches, strict=True):
        np.testing.assert_allclose(ours.read()[0, :, :total], theirs[:, :total], atol=1e-5)
    capacity = parts.drafter.rings.capacity
    visible = [p % capacity for p in range(max(0, total - 32), total)]
    for ours, theirs in zip(parts.drafter.rings.tensors(view).values(), rings, strict=True):
        np.testing.assert_allclose(ours.read()[0][:, visible], theirs[:, visible], atol=1e-5)


def test_partial_acceptance_drafts_what_the_oracle_drafts(small_bundle: Path, small_pair: Path, greedy: list[int]) -> None:
    """Nine rounds of changing acceptance over a wrapping window: each round's own draft logits equal the oracle's on true taps."""
    target, oracle_drafter = oracle.Target(small_pair / "target"), oracle.Drafter(small_pair / "drafter")
    parts, seen = open_parts(small_bundle), []
    drafter = scripted(parts, {"r": greedy}, lambda _name, number: [3, 7, 0, 5, 1, 6, 2, 4, 7][number % 9])
    drafter.propose_hook = lambda proposals: seen.append(proposals.debug["draft_logits"].read()[0].copy())
    one = decode(parts, drafter, request(PROMPT, 44))
    assert one.output == greedy[:44]
    tokens, emitted = PROMPT + greedy, 1
    taps = target.taps(tokens, oracle_drafter.config["target_layer_ids"])
    for logits, length in zip(seen, one.stats.accepted_per_round, strict=True):
        anchor = len(PROMPT) + emitted - 1
        expected = oracle_drafter.windowed(taps[:anchor], anchor, tokens[anchor], window=32)
        np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
        emitted += length
    assert len(seen) >= 9


def test_taps_of_a_wrong_layer_would_show(small_pair: Path) -> None:
    """The taps are outputs of the listed layers: those of the layer before or behind give other drafts (case B5)."""
    target, drafter = oracle.Target(small_pair / "target"), oracle.Drafter(small_pair / "drafter")
    ids = drafter.config["target_layer_ids"]
    right = drafter.windowed(target.taps(PROMPT, ids), len(PROMPT), 17, window=32)["logits"]
    for shift in (-1, 1):
        wrong = drafter.windowed(target.taps(PROMPT, [i + shift for i in ids]), len(PROMPT), 17, window=32)["logits"]
        assert np.abs(right - wrong).max() > 1e-2


@pytest.mark.parametrize("tokens", range(1, 17))
def test_max_tokens_inside_a_block(small_bundle: Path, greedy: list[int], tokens: int) -> None:
    """Case D2: the count is exact when all proposals are right."""
    parts = open_parts(small_bundle)
    one = decode(parts, scripted(parts, {"r": greedy}, lambda *_: 7), request(PROMPT, tokens))
    assert (one.output, one.finish_reason) == (greedy[:tokens], "length")
    assert sum(one.stats.accepted_per_round) == tokens - 1


@pytest.mark.parametrize("index", range(16))
def test_stop_token_inside_a_block(small_bundle: Path, greedy: list[int], index: int) -> None:
    """Case D1: whatever token ends the output, nothing is emitted or counted behind it."""
    parts, emitted = open_parts(small_bundle), []
    first = greedy.index(greedy[index])
    drafter = scripted(parts, {"r": greedy}, lambda *_: 7)
    one = request(PROMPT, 40, [greedy[index]])
    for kept in engines.decode(parts.decoder(drafter), one):
        emitted += kept
    assert one.output == emitted == greedy[: first + 1]
    assert one.finish_reason == "stop"
    assert sum(one.stats.accepted_per_round) == first


def test_a_rejected_stop_token_does_not_end(small_bundle: Path, greedy: list[int]) -> None:
    """Case D5: the drafter proposes the stop token where the target does not."""
    stop = next(token for token in range(320) if token not in greedy)
    parts = open_parts(small_bundle)
    drafter = scripted(parts, {"r": greedy}, lambda *_: 1)
    original = drafter.propose

    def propose(*arguments: object, **options: object) -> object:
        proposals = original(*arguments, **options)
        tokens = proposals.verify_tokens.read().copy()
        tokens[:, 3] = stop
        proposals.verify_tokens.write(tokens)
        return proposals

    drafter.propose = propose
    one = decode(parts, drafter, request(PROMPT, 30, [stop]))
    assert (one.output, one.finish_reason) == (greedy[:30], "length")


def test_all_rejected_for_500_tokens(small_bundle: Path) -> None:
    """Case E5: a drafter that is never right leaves no trace in 490 tokens (the pair's limit is 512)."""
    parts = open_parts(small_bundle)
    expected = plain(small_bundle, PROMPT, 490)
    one = decode(parts, scripted(parts, {"r": expected}, lambda *_: 0), request(PROMPT, 490))
    assert one.output == expected
    assert set(one.stats.accepted_per_round) == {1}


def test_long_output_on_a_short_ring(small_bundle: Path) -> None:
    """500 tokens on a window of 32, own proposals, speculative and plain (cases B6 and E4)."""
    llm = LLM(small_bundle)
    outputs = [llm.generate([PROMPT], SamplingParams(max_tokens=500), speculative=way)[0] for way in (True, False)]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert len(outputs[0].token_ids) == 500


@pytest.mark.parametrize("speculative", [True, False])
def test_context_limit(export: Export, small_pair: Path, greedy: list[int], speculative: bool) -> None:
    """Case B3: limit 64, prompt 60. The output ends with reason `length`, and the target sees no position from 64 on."""
    bundle = export(small_pair, ctx_window=32, max_seq_len=64, max_chunk=64, max_batch_size=4)
    llm, prompt = LLM(bundle, speculative=speculative), (PROMPT + greedy)[:60]
    decoder, fed = llm._decoder, []
    verify = decoder._target.verify

    def recorded(requests: list[object], tokens: Rows, counts: list[int]) -> object:
        fed.append(decoder._target.length(requests[0]) + tokens.tensor.shape[1])
        return verify(requests, tokens, counts)

    decoder._target.verify = recorded
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=100))
    assert (output.token_ids, output.finish_reason) == ((PROMPT + greedy)[60:64], "length")
    assert max(fed) <= 64
    for length in (64, 65, 100):
        with pytest.raises(RequestError, match=f"the prompt has {length} tokens, max_seq_len is 64"):
            llm.generate([(PROMPT + greedy)[:length]])
    (last,) = llm.generate([(PROMPT + greedy)[:63]], SamplingParams(max_tokens=100))
    assert (last.token_ids, last.finish_reason) == ([(PROMPT + greedy)[63]], "length")


def test_slots_leave_each_other_alone(small_bundle: Path, greedy: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    """Three slots: one is prefilled chunk by chunk between decode rounds of the others, then all decode together.

    A slot's visible rows change in no call that is not its own, bit by bit, and its tokens are those it gives alone. ONNX Runtime gives
    no warning that a state tensor was copied instead of written in place.
    """
    parts = open_parts(small_bundle)
    prompts = {"a": PROMPT, "b": [*PROMPT[::-1], 5, 6, 7], "c": (PROMPT * 8)[:37]}
    alone = {name: plain(small_bundle, prompt, 30) for name, prompt in prompts.items()}
    assert alone["a"] == greedy[:30]
    rights = {"a": [7, 0, 3], "b": [1, 6, 2, 4], "c": [5, 0, 7]}
    drafter = scripted(parts, alone, lambda name, number: rights[name][number % len(rights[name])])
    decoder = parts.decoder(drafter)
    requests = {name: request(prompt, 30, name=name) for name, prompt in prompts.items()}

    def visible(name: str) -> list[np.ndarray]:
        slot = parts.slots.slot(name)
        length, total = int(parts.target._length[slot]), int(parts.drafter._total[slot])
        whole = parts.slots.view([name])
        ring = [p % parts.drafter.rings.capacity for p in range(max(0, total - 32), total)]
        caches = [t.read()[0, :, :length].copy() for t in parts.target.caches.tensors(whole).values()]
        return caches + [t.read()[0][:, ring].copy() for t in parts.drafter.rings.tensors(whole).values()]

    def unchanged(others: list[str], call: Callable[[], object]) -> None:
        before = {name: visible(name) for name in others}
        call()
        for name in others:
            for old, new in zip(before[name], visible(name), strict=True):
                np.testing.assert_array_equal(old, new)

    parts.slots.admit("a")
    decoder.prefill(requests["a"])
    parts.slots.admit("b")
    unchanged(["a"], lambda: decoder.prefill(requests["b"]))
    decoder.round([requests["a"], requests["b"]])
    parts.slots.admit("c")
    for begin in range(0, 37, 10):  # a prefill of one slot between the rounds of the others
        chunk = prompts["c"][begin : begin + 10]

        def prefill(begin: int = begin, chunk: list[int] = chunk) -> None:
            verified = parts.target.prefill("c", chunk)
            drafter.write_context("c", verified.taps.tensor.read()[0], np.arange(begin, begin + len(chunk)))
            prefill.logits = verified.logits

        unchanged(["a", "b"], prefill)
        unchanged(["c"], lambda: decoder.round([requests["a"], requests["b"]]))
    chosen = decoder._accept.greedy(prefill.logits, np.zeros(1, np.int64))
    requests["c"].emit(Choice([int(chosen.next_token[0])], []))
    while any(r.finish_reason is None for r in requests.values()):
        live = [r for r in requests.values() if r.finish_reason is None]
        unchanged([n for n, r in requests.items() if r not in live], lambda live=live: decoder.round(live))
    for name, one in requests.items():
        assert one.output == alone[name], name
    assert "in-place optimization not activated" not in capfd.readouterr().err


def test_requests_that_sit_out_a_round(small_bundle: Path, small_pair: Path) -> None:
    """Groups of four requests take turns: each drafts on its own committed rows, whoever was verified in between.

    A row of another request would cost acceptance only, so the rings are compared with rebuilt ones.
    """
    parts = open_parts(small_bundle)
    prompts = {name: [(7 * i + 3 * n) % 300 for i in range(4 + 3 * n)] for n, name in enumerate("abcd")}
    alone = {name: plain(small_bundle, prompt, 60) for name, prompt in prompts.items()}
    drafter = scripted(parts, alone, lambda name, number: (3 * number + ord(name)) % 8)
    decoder, requests = parts.decoder(drafter), {name: request(prompt, 60, name=name) for name, prompt in prompts.items()}
    start(decoder, *requests.values())
    for group in ["ab", "c", "ab", "cd", "a", "abcd", "d", "cb", "abcd"]:
        decoder.round([requests[name] for name in group])
    decoder._pending.settle([])
    for name, one in requests.items():
        decoder._pending.write(one.id)
        assert one.output == alone[name][: len(one.output)]
        committed = prompts[name] + one.output[:-1]
        assert parts.drafter.total(name) == parts.target.length(name) == len(committed)
        _, rings = rebuilt_state(small_bundle, small_pair, committed)
        capacity, total = parts.drafter.rings.capacity, len(committed)
        visible = [p % capacity for p in range(max(0, total - 32), total)]
        for ours, theirs in zip(parts.drafter.rings.tensors(parts.slots.view([name])).values(), rings, strict=True):
            np.testing.assert_allclose(ours.read()[0][:, visible], theirs[:, visible], atol=1e-5)


def test_order_of_requests_makes_no_new_bindings(small_bundle: Path) -> None:
    parts = open_parts(small_bundle)
    made, bind = [], parts.engine.bind
    parts.engine.bind = lambda graph, tensors: made.append(graph) or bind(graph, tensors)
    decoder, requests = parts.decoder(), [request(PROMPT[i:], 60, name=i) for i in range(3)]
    start(decoder, *requests)
    for _ in range(2):
        decoder.round(requests)
    before = len(made)
    decoder.round(requests[::-1])
    decoder.round([requests[1], requests[2], requests[0]])
    assert len(made) == before


def test_growth_lets_go_of_the_old_state(export: Export, small_pair: Path) -> None:
    parts = open_parts(export(small_pair, ctx_window="full", debug_outputs=True), slots=1)
    one = request(PROMPT, 400)
    for _ in engines.decode(parts.decoder(), one):
        pass
    assert parts.target.caches.capacity > 400
    for state in (parts.target.caches, parts.drafter.rings):
        for step in state.bound:
            assert step._step is None or all(
                tensor.shape[2] == state.capacity for name, tensor in step._step._tensors.items() if "key_" in name
            )


def test_commit_is_checked(small_bundle: Path) -> None:
    """Case A10 on the target's side: an impossible count is refused, and the length stays."""
    parts = open_parts(small_bundle, slots=1)
    parts.slots.admit("r")
    parts.target.prefill("r", PROMPT)
    tokens = Rows(parts.slots.view(["r"]), parts.engine.allocate((1, 8), "int64"))
    with pytest.raises(RequestError, match=r"commits 1 rows, expected 1\.\.0"):
        parts.target.commit("r", 1)
    parts.target.verify(["r"], tokens, [7])
    for rows in (0, -5, 9):
        with pytest.raises(RequestError, match=rf"commits {rows} rows, expected 1\.\.8"):
            parts.target.commit("r", rows)
    parts.target.commit("r", 8)
    with pytest.raises(RequestError):
        parts.target.commit("r", 1)
    assert parts.target.length("r") == len(PROMPT) + 8
    with pytest.raises(RequestError, match=r"token ids \[320\] are outside"):
        parts.target.prefill("r", [5, 320])


def test_more_slots_than_the_bundle_allows(small_bundle: Path) -> None:
    with pytest.raises(LimitError, match=r"5 slots, the bundle allows 1\.\.4 requests"):
        open_parts(small_bundle, slots=5)


def test_decoder_holds_the_length_limit_itself(pair_bundle: Path) -> None:
    parts = open_parts(pair_bundle, slots=1)
    one = request([5] * 1015, 600)
    for _ in engines.decode(parts.decoder(), one):
        pass
    assert (len(one.output), one.finish_reason) == (9, "length")


def test_a_failing_graph_is_a_named_error(small_bundle: Path) -> None:
    parts = open_parts(small_bundle, slots=1)
    parts.slots.admit("r")
    parts.target.prefill("r", PROMPT)
    tokens = parts.engine.allocate((1, 8), "int64")
    tokens.write(99999)
    with pytest.raises(EngineError, match="graph target failed"):
        parts.target.verify(["r"], Rows(parts.slots.view(["r"]), tokens), [7])


def test_a_copied_state_would_be_noticed(small_bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The warning that the test above listens for does come when a state tensor is bound to another output."""
    parts = open_parts(small_bundle, slots=1)
    engine, signature = parts.engine, parts.engine.signatures["context"]
    engine.load(["context"])
    sizes = {"B": 1, "N": 2, "R": 48}
    binding = engine._sessions["context"].io_binding()
    tensors = [
        [engine.allocate(tuple(sizes[d] if isinstance(d, str) else d for d in spec.shape), spec.dtype) for spec in specs]
        for specs in (signature.inputs, signature.outputs)
    ]
    for spec, tensor in zip(signature.inputs, tensors[0], strict=True):
        binding.bind_ortvalue_input(spec.name, tensor.value)
    for spec, tensor in zip(signature.outputs, tensors[1], strict=True):
        binding.bind_ortvalue_output(spec.name, tensor.value)
    engine._sessions["context"].run_with_iobinding(binding)
    assert "in-place optimization not activated" in capfd.readouterr().err


def test_a_reused_slot_shows_nothing_of_its_last_user(small_bundle: Path, greedy: list[int]) -> None:
    parts = open_parts(small_bundle, slots=1)
    decode(parts, None, request((PROMPT * 20)[:90], 20))
    one = request(PROMPT, 30)
    fresh = open_parts(small_bundle, slots=1)
    logits: list[list[np.ndarray]] = [[], []]
    for seen, own in zip(logits, (parts, fresh), strict=True):
        drafter = scripted(own, {"r": greedy}, lambda *_: 3)
        drafter.propose_hook = lambda p, seen=seen: seen.append(p.debug["draft_logits"].read()[0].copy())
        assert decode(own, drafter, request(PROMPT, 30)).output == greedy[:30]
    for ours, theirs in zip(*logits, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert one.output == []


def test_bindings_are_made_once(small_bundle: Path, greedy: list[int]) -> None:
    """Rounds of one shape bind no graph again: tensors that two graphs hand each other must not be new ones each round."""
    parts = open_parts(small_bundle)
    made, bind = [], parts.engine.bind
    parts.engine.bind = lambda graph, tensors: made.append(graph) or bind(graph, tensors)
    decoder, one = parts.decoder(), request(PROMPT, LENGTH)
    parts.slots.admit("r")
    decoder.prefill(one)
    for _ in range(3):
        decoder.round([one])
    before = len(made)
    for _ in range(20):
        decoder.round([one])
    assert len(made) == before


def test_verify_width_is_checked(export: Export, small_pair: Path) -> None:
    """Case F10: both conventions are in the message."""
    bundle = export(small_pair, ctx_window=32, num_speculative_tokens=6, max_chunk=64)
    parts = open_parts(bundle, slots=1)
    parts.slots.admit("r")
    parts.target.prefill("r", PROMPT)
    tokens = Rows(parts.slots.view(["r"]), parts.engine.allocate((1, 8), "int64"))
    with pytest.raises(LimitError, match=r"8 rows to verify: this bundle serves 6 proposals a round, so at most 7 rows .* a block of 7"):
        parts.target.verify(["r"], tokens, [7])
    with pytest.raises(LimitError, match=r"num_speculative_tokens is 7, this bundle serves 1\.\.6 proposals \(verify width 7\)"):
        LLM(bundle, num_speculative_tokens=7)


@pytest.mark.parametrize("served", range(1, 7))
def test_fewer_proposals_than_exported(export: Export, small_pair: Path, greedy: list[int], served: int) -> None:
    """A bundle of 6 proposals serves 1..6; each is lossless, and no round emits more than it may."""
    bundle = export(small_pair, ctx_window=32, num_speculative_tokens=6, max_chunk=64)
    (output,) = LLM(bundle, num_speculative_tokens=served).generate([PROMPT], SamplingParams(max_tokens=60))
    assert output.token_ids == greedy[:60]
    assert max(output.stats.proposed) == served
    parts = open_parts(bundle, slots=1)
    drafter = scripted(parts, {"r": greedy}, lambda *_: 7)
    one = request(PROMPT, 60)
    for _ in engines.decode(parts.decoder(drafter, num_speculative_tokens=served), one):
        pass
    assert one.output == greedy[:60]
    assert one.stats.accepted_per_round[0] == served + 1


def test_served_prefix_drafts_the_same_tokens(export: Export, small_pair: Path) -> None:
    """The backbone runs its whole block whatever is served: 6 proposals are the first 6 of 7."""
    rng, drafted = np.random.default_rng(3), []
    taps = rng.standard_normal((12, 3 * 64)).astype(np.float32)
    for k in (7, 6):
        options = {"debug_outputs": True, "max_batch_size": 4} if k == 7 else {"num_speculative_tokens": 6}
        parts = open_parts(export(small_pair, ctx_window=32, max_chunk=64, **options), slots=1)
        parts.slots.admit("r")
        parts.drafter.write_context("r", taps, np.arange(12))
        drafted.append(parts.drafter.propose(["r"], [3]).tokens()[0])
    np.testing.assert_array_equal(drafted[0][:6], drafted[1])
