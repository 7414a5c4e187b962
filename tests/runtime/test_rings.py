"""Rings shorter than the context, against an oracle that sees only the newest positions with their absolute phases.

Draft logits are compared, not only tokens: several real faults change no token.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import oracle
import pytest
from conftest import Export
from engines import Parts, open_parts

from dspark.runtime.errors import ConfigError, LimitError, RequestError, UnknownRequestError
from dspark.runtime.state import GROWTH, Rows

WINDOW = 32
WIDTH = 8
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def drafter(small_pair: Path) -> oracle.Drafter:
    return oracle.Drafter(small_pair / "drafter")


@pytest.fixture
def parts(small_bundle: Path) -> Parts:
    return open_parts(small_bundle)


def taps_of(parts: Parts, rows: int, seed: int = 0) -> np.ndarray:
    """Return random taps `[rows, m*H]`."""
    width = parts.engine.manifest.drafter.taps_width
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def draft_logits(parts: Parts, name: str, anchor: int, **more: object) -> np.ndarray:
    proposals = parts.drafter.propose([name], [anchor], **more)
    return proposals.debug["draft_logits"].read()[0].copy()


def assert_equals(parts: Parts, drafter: oracle.Drafter, name: str, taps: np.ndarray, *, first: int = 0, window: int = WINDOW) -> None:
    """Draft behind all of `taps` and compare logits, tokens and confidence with the windowed oracle."""
    expected = drafter.windowed(taps, len(taps), 17, window=window, first=first)
    proposals = parts.drafter.propose([name], [17], positions=[len(taps)])
    np.testing.assert_allclose(proposals.debug["draft_logits"].read()[0], expected["logits"], atol=TOLERANCE)
    np.testing.assert_array_equal(proposals.tokens()[0], expected["tokens"])
    assert proposals.confidence_logits is not None
    np.testing.assert_allclose(proposals.confidence_logits.read()[0], expected["confidence_logits"], atol=TOLERANCE)


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 40, 64, 65, 100, 150])
def test_one_chunk(parts: Parts, drafter: oracle.Drafter, rows: int) -> None:
    """Partly full, exactly full, one past, a chunk longer than window and ring, several wraps (case A5)."""
    taps = taps_of(parts, rows)
    parts.slots.admit("r")
    parts.drafter.write_context("r", taps, np.arange(rows))
    assert_equals(parts, drafter, "r", taps)


@pytest.mark.parametrize("chunk", [20, 40, 60])
def test_taps_of_the_engine(parts: Parts, drafter: oracle.Drafter, chunk: int) -> None:
    """Chunks of one length in tensors of their own, as a target may give them: shorter than the window, the ring, and longer."""
    taps = taps_of(parts, 2 * chunk)
    parts.slots.admit("r")
    for begin in (0, chunk):
        tensor = parts.engine.allocate((1, chunk, taps.shape[1]), "model")
        tensor.write(taps[None, begin : begin + chunk])
        parts.drafter.write_context("r", Rows(parts.slots.view(["r"]), tensor), np.arange(begin, begin + chunk))
    assert_equals(parts, drafter, "r", taps)


def test_ring_rows_lie_at_their_position_modulo_capacity(parts: Parts, drafter: oracle.Drafter) -> None:
    taps = taps_of(parts, 100)
    parts.slots.admit("r")
    parts.drafter.write_context("r", taps, np.arange(100))
    capacity = parts.engine.manifest.ring_capacity
    assert parts.drafter.rings.capacity == capacity == 48
    keys, values = drafter.context(taps[68:], np.arange(68, 100))[0]
    ring_keys, ring_values, *_ = (t.read()[0] for t in parts.drafter.rings.tensors(parts.slots.view(["r"])).values())
    for i, position in enumerate(range(68, 100)):
        np.testing.assert_allclose(ring_keys[:, position % capacity], keys[i], atol=TOLERANCE)
        np.testing.assert_allclose(ring_values[:, position % capacity], values[i], atol=TOLERANCE)


def test_empty_context(parts: Parts, drafter: oracle.Drafter) -> None:
    """Without any context row the block sees itself alone, whatever lies in the ring."""
    parts.slots.admit("before")
    parts.drafter.write_context("before", taps_of(parts, 40), np.arange(40))
    parts.drafter.release("before")
    parts.slots.release("before")
    parts.slots.admit("r")
    expected = drafter.windowed(taps_of(parts, 1)[:0], 0, 17, window=WINDOW)
    np.testing.assert_allclose(draft_logits(parts, "r", 17), expected["logits"], atol=TOLERANCE)


@pytest.mark.parametrize("chunks", [[50], [16, 16, 16, 2], [1] * 50])
def test_chunks_give_the_same_ring(parts: Parts, drafter: oracle.Drafter, chunks: list[int]) -> None:
    """Positions are absolute, whatever the chunk (case A4)."""
    taps, begin = taps_of(parts, 50), 0
    parts.slots.admit("r")
    for rows in chunks:
        parts.drafter.write_context("r", taps[begin : begin + rows], np.arange(begin, begin + rows))
        begin += rows
    assert_equals(parts, drafter, "r", taps)


@pytest.mark.parametrize("later", [0, 20])
def test_unseen_prefix_is_masked(parts: Parts, drafter: oracle.Drafter, later: int) -> None:
    """Positions that were never seeded are left out, not read as zeros; also when later rows have overwritten the hole (case A7)."""
    taps = taps_of(parts, 40 + later)
    parts.slots.admit("r")
    parts.drafter.write_context("r", taps[20:40], np.arange(20, 40))
    for begin in range(40, 40 + later, 5):
        parts.drafter.propose(["r"], [3], taps[None, begin : begin + 5], [5])
    assert_equals(parts, drafter, "r", taps, first=20)
    with_zero_rows = drafter.windowed(np.concatenate([0 * taps[:20], taps[20:]]), len(taps), 17, window=64)
    assert np.abs(draft_logits(parts, "r", 17) - with_zero_rows["logits"]).max() > 1e-3


def test_a_gap_hides_what_lies_before_it(parts: Parts, drafter: oracle.Drafter) -> None:
    taps = taps_of(parts, 30)
    parts.slots.admit("r")
    parts.drafter.write_context("r", taps[:10], np.arange(10))
    parts.drafter.write_context("r", taps[14:], np.arange(14, 30))
    assert_equals(parts, drafter, "r", taps, first=14)


def test_junk_rows_are_never_visible(parts: Parts, drafter: oracle.Drafter) -> None:
    """Every round writes 8 rows of which 1..8 count; what lies behind them is huge, and must not show."""
    rng, taps = np.random.default_rng(5), taps_of(parts, 6)
    parts.slots.admit("r")
    parts.drafter.write_context("r", taps, np.arange(6))
    for count in [1, 8, 3, 2, 7, 1, 1, 5, 8, 8, 4, 6, 1, 2, 3]:
        new = rng.standard_normal((8, taps.shape[1])).astype(np.float32)
        taps = np.concatenate([taps, new[:count]])
        new[count:] = 1e3 if count % 2 else np.nan
        expected = drafter.windowed(taps, len(taps), 17, window=WINDOW)
        logits = draft_logits(parts, "r", 17, taps=new[None], counts=[count], positions=[len(taps)])
        np.testing.assert_allclose(logits, expected["logits"], atol=TOLERANCE)


@pytest.fixture(scope="module")
def narrow_bundle(export: Export, small_pair: Path) -> Path:
    """The smallest window there is: block + 2."""
    return export(small_pair, ctx_window=9, debug_outputs=True, max_chunk=64, max_batch_size=4)


def test_two_requests_wrap_at_different_steps(narrow_bundle: Path, drafter: oracle.Drafter) -> None:
    """All or nothing accepted in turn, 30 rounds, two requests out of step, window 9 (case A6)."""
    parts, rng = open_parts(narrow_bundle), np.random.default_rng(1)
    taps = {"a": taps_of(parts, 5, seed=1), "b": taps_of(parts, 8, seed=2)}
    for name, rows in taps.items():
        parts.slots.admit(name)
        parts.drafter.write_context(name, rows, np.arange(len(rows)))
    for r in range(30):
        counts = [8, 1] if r % 2 else [1, 8]
        new = rng.standard_normal((2, 8, taps["a"].shape[1])).astype(np.float32)
        for i, name in enumerate(taps):
            taps[name] = np.concatenate([taps[name], new[i, : counts[i]]])
        proposals = parts.drafter.propose(["a", "b"], [5, 9], new, counts, [len(rows) for rows in taps.values()])
        for row, (name, anchor) in enumerate((("a", 5), ("b", 9))):
            expected = drafter.windowed(taps[name], len(taps[name]), anchor, window=9)
            np.testing.assert_allclose(proposals.debug["draft_logits"].read()[row], expected["logits"], atol=TOLERANCE)


@pytest.mark.parametrize("window", [5, 8])
def test_window_below_block_plus_two_is_refused(export: Export, small_pair: Path, window: int) -> None:
    with pytest.raises(ConfigError, match=r"the minimum is 9 \(block \+ 2\)"):
        export(small_pair, ctx_window=window)


def test_shifting_everything_changes_nothing(parts: Parts, drafter: oracle.Drafter) -> None:
    """Rotary phases are relative; a block one position off is not (case B1). Both through the bundle's graphs."""
    taps, logits = taps_of(parts, 20), []
    for name, shift in (("here", 0), ("there", 50)):
        parts.slots.admit(name)
        parts.drafter.write_context(name, taps, np.arange(shift, shift + 20))
        logits.append(draft_logits(parts, name, 17))
    np.testing.assert_allclose(logits[0], logits[1], atol=TOLERANCE)
    early = drafter.draft(taps, np.arange(20), 17, 19)
    assert np.abs(logits[0] - early["logits"]).max() > 1e-2


@pytest.mark.parametrize("start", [6, 100, 400])
def test_far_positions(export: Export, small_pair: Path, drafter: oracle.Drafter, start: int) -> None:
    """Full-context ring, contexts up to 400 rows: the ring grows on the way (case B1)."""
    parts = open_parts(export(small_pair, ctx_window="full", debug_outputs=True), slots=1)
    assert parts.drafter.rings.capacity < 400
    taps = taps_of(parts, start)
    parts.slots.admit("r")
    for begin in range(0, start, 50):
        parts.drafter.write_context("r", taps[begin : begin + 50], np.arange(begin, min(begin + 50, start)))
    assert_equals(parts, drafter, "r", taps, window=1 << 30)
    assert parts.drafter.rings.capacity >= start


def test_growing_keeps_the_rows(export: Export, small_pair: Path) -> None:
    parts = open_parts(export(small_pair, ctx_window="full", debug_outputs=True), slots=2)
    taps = taps_of(parts, 300)
    parts.slots.admit("r")
    parts.drafter.write_context("r", taps[:100], np.arange(100))
    before = [t.read()[0, :, :100].copy() for t in parts.drafter.rings.tensors(parts.slots.view(["r"])).values()]
    parts.drafter.write_context("r", taps[100:], np.arange(100, 300))
    after = [t.read()[0, :, :100] for t in parts.drafter.rings.tensors(parts.slots.view(["r"])).values()]
    assert parts.drafter.rings.capacity > GROWTH
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


def test_batched_write_equals_single_writes(parts: Parts, small_bundle: Path) -> None:
    """Masked entries may hold anything; they leave the visible rows as they were."""
    taps = taps_of(parts, 24).reshape(3, 8, -1)
    names, lengths, valid = ["a", "b", "c"], [4, 7, 30], [3, 0, 8]
    for name, length in zip(names, lengths, strict=True):
        parts.slots.admit(name)
        parts.drafter.write_context(name, taps_of(parts, length, seed=length), np.arange(length))
    positions = np.array([[n + i for i in range(8)] for n in lengths])
    mask = np.array([[i < count for i in range(8)] for count in valid])
    positions[~mask] = -7
    taps[~mask] = np.nan
    parts.drafter.write_context_batched(names, taps, positions, mask)
    single = open_parts(small_bundle)
    for name, length in zip(names, lengths, strict=True):
        single.slots.admit(name)
        single.drafter.write_context(name, taps_of(single, length, seed=length), np.arange(length))
    for row, (name, count, length) in enumerate(zip(names, valid, lengths, strict=True)):
        if count:
            single.drafter.write_context(name, taps[row, :count], np.arange(length, length + count))
        assert parts.drafter.total(name) == length + count
    for name in names:
        np.testing.assert_allclose(draft_logits(parts, name, 17), draft_logits(single, name, 17), atol=1e-5)


def test_misuse_leaves_the_state_unchanged(parts: Parts) -> None:
    """Unknown requests and impossible counts are refused before any write (cases A2, A10)."""
    taps = taps_of(parts, 8)
    parts.slots.admit("r")
    parts.drafter.write_context("r", taps[:5], np.arange(5))
    before = [t.read().copy() for t in parts.drafter.rings.tensors(parts.slots.view(["r"])).values()]
    with pytest.raises(UnknownRequestError, match="'ghost' holds no slot"):
        parts.drafter.propose(["ghost"], [1])
    with pytest.raises(UnknownRequestError):
        parts.drafter.write_context("ghost", taps[:1], [0])
    with pytest.raises(UnknownRequestError):
        parts.drafter.write_context_batched(["r", "ghost"], np.stack([taps, taps]), np.stack([np.arange(5, 13)] * 2))
    for count in (0, -1, 9):
        with pytest.raises(ValueError, match=r"committed -?\d+ rows, expected 1\.\.8"):
            parts.drafter.propose(["r"], [1], taps[None], [count])
    for wrong in (
        lambda: parts.drafter.propose(["r"], [1], np.zeros((1, 9, taps.shape[1]), np.float32), [9]),
        lambda: parts.drafter.propose(["r"], [1], np.zeros((1, 2, 7), np.float32), [1]),
        lambda: parts.drafter.propose(["r"], [320]),
        lambda: parts.drafter.propose(["r"], [1.5]),
        lambda: parts.drafter.propose(["r"], [1], None, [2]),
        lambda: parts.drafter.propose(["r"], [1, 2]),
        lambda: parts.drafter.propose(["r", "r"], [1, 2]),
        lambda: parts.drafter.propose(["r"], [1], positions=[6]),
        lambda: parts.drafter.write_context("r", taps, np.arange(4, 12)),
        lambda: parts.drafter.write_context("r", taps, np.arange(5, 21, 2)),
        lambda: parts.drafter.write_context("r", taps[:0], []),
        lambda: parts.drafter.write_context_batched(["r"], taps[None], np.arange(5, 13)[None], [[True, False] * 4]),
    ):
        with pytest.raises(RequestError):
            wrong()
    assert parts.drafter.total("r") == 5
    after = [t.read() for t in parts.drafter.rings.tensors(parts.slots.view(["r"])).values()]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


def test_positions_beyond_the_limit_are_refused(parts: Parts) -> None:
    """The ring is sized by the longest sequence: behind it junk rows would come into sight."""
    limit = parts.engine.manifest.limits.max_seq_len
    parts.slots.admit("r")
    with pytest.raises(LimitError, match=rf"positions end at {limit}, the bundle allows sequences of {limit} tokens"):
        parts.drafter.write_context("r", taps_of(parts, 2), [limit - 1, limit])
    parts.drafter.write_context("r", taps_of(parts, 1), [limit - 1])
    with pytest.raises(LimitError):
        parts.drafter.propose(["r"], [1], taps_of(parts, 1)[None], [1])
    assert parts.drafter.total("r") == limit


def test_admission_clears_the_slot(parts: Parts, drafter: oracle.Drafter) -> None:
    """Also when the last user was never released from the drafter."""
    parts.slots.admit("before")
    parts.drafter.write_context("before", taps_of(parts, 40), np.arange(40))
    parts.slots.release("before")
    parts.slots.admit("r")
    assert parts.drafter.total("r") == 0
    expected = drafter.windowed(taps_of(parts, 1)[:0], 0, 17, window=WINDOW)
    np.testing.assert_allclose(draft_logits(parts, "r", 17), expected["logits"], atol=TOLERANCE)


def test_slots_run_out(parts: Parts) -> None:
    for name in range(4):
        parts.slots.admit(name)
    with pytest.raises(LimitError, match="all 4 slots are taken"):
        parts.slots.admit("one more")
    with pytest.raises(RequestError, match="already holds slot 2"):
        parts.slots.admit(2)
    parts.slots.release(1)
    assert parts.slots.admit("one more") == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_numbers_that_are_none_stay_with_their_request(small_bundle: Path, bad: float) -> None:
    """A request whose taps overflow harms neither its neighbours nor the next user of its slot, whose drafts are those of a fresh one."""
    taps = np.random.default_rng(0).standard_normal((40, 3 * 64)).astype(np.float32)

    def drafts(parts: Parts, *names: str) -> list[np.ndarray]:
        drafted = parts.drafter.propose(names, [3] * len(names))
        return [drafted.debug["draft_logits"].read()[row].copy() for row in drafted.view.rows]

    parts, fresh = open_parts(small_bundle), open_parts(small_bundle)
    for name in "xr":
        parts.slots.admit(name)
    fresh.slots.admit("r")
    for own in (parts, fresh):
        own.drafter.write_context("r", taps, np.arange(40))
    parts.drafter.write_context("x", np.full_like(taps, bad), np.arange(40))
    np.testing.assert_allclose(drafts(parts, "x", "r")[1], drafts(fresh, "r")[0], atol=1e-5)
    parts.target.prefill("x", [1, 2, 3])
    for cache in parts.target.caches.tensors(parts.slots.view(["x"])).values():
        cache.write(bad)
    parts.drafter.release("x")
    parts.slots.release("x")
    for own in (parts, fresh):
        own.slots.admit("next")
        own.drafter.write_context("next", taps[:5], np.arange(5))
    for names in (("next",), ("next", "r")):
        np.testing.assert_allclose(drafts(parts, *names), drafts(fresh, *names), atol=1e-5)
    logits = [own.target.prefill("next", [5, 6]).logits.tensor.read() for own in (parts, fresh)]
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize(
    ("taps", "positions", "message"),
    [
        ((3, 192), [5, 6, 7], r"positions have shape \[3\], expected \[1, M\]"),
        ((1, 0, 192), [[]], r"positions have shape \[1, 0\]"),
        ((1, 2, 192), [[5.0, 6.0]], "expected consecutive absolute positions"),
        ((2, 2, 192), [[5, 6], [5, 6]], r"positions have shape \[2, 2\], expected \[1, M\]"),
    ],
)
def test_shapes_of_a_batched_write(small_bundle: Path, taps: tuple[int, ...], positions: list[object], message: str) -> None:
    parts = open_parts(small_bundle)
    parts.slots.admit("r")
    with pytest.raises(RequestError, match=message):
        parts.drafter.write_context_batched(["r"], np.zeros(taps, np.float32), positions)
    assert parts.drafter.total("r") == 0


def test_numbers_of_a_draft(small_bundle: Path) -> None:
    """Counts, anchors and positions of any sequence type; what is no number is refused by name, also as an array."""
    parts, taps = open_parts(small_bundle), np.zeros((2, 3, 192), np.float32)
    for name in "ab":
        parts.slots.admit(name)
    for options in ({"counts": [1.5, 1]}, {"counts": ["1", 1]}, {"positions": np.array([2, 1])}, {"positions": np.array([0, 0])}):
        with pytest.raises(RequestError, match=r"committed|is at position"):
            parts.drafter.propose("ab", [1, 2], taps, **{"counts": [1, 1], **options})
    for anchor in ("q", None, float("nan"), 2.0, -1):
        with pytest.raises(RequestError, match="anchors"):
            parts.drafter.propose("ab", [1, anchor], taps, [1, 1])
    parts.drafter.propose("ab", np.array([1, 2]), taps, np.array([1, 2]), np.array([1, 2]))
    assert [parts.drafter.total(name) for name in "ab"] == [1, 2]
