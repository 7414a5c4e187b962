"""The drafter, driven as a serving worker drives one: the golden cases of NVIDIA/TensorRT-LLM pull request 16813 and what they miss.

Seeding, masked back-fill, the newest row with the draft, slots, wrap-around, at that request's sizes. Every draft and the ring rows that it
saw are compared with the float64 oracle. Prefill chunks here are longer than `max_chunk`; `test_rings.py` has rings of one request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import oracle
import pytest
from conftest import Export
from engines import open_parts
from random_pair import Shape, write_pair

from dspark.runtime.errors import LimitError, RequestError, UnknownRequestError
from dspark.runtime.state import View

K, WINDOW, CAPACITY, LIMIT, WIDTH = 3, 32, 48, 512, 96
SIZES = {"vocabulary": 97, "drafter_layers": 2, "block": K, "rank": 16, "theta": 1e4, "positions": LIMIT, "mask": 90}
SHAPE = Shape(hidden=32, intermediate=48, layers=6, heads=4, kv_heads=2, head_dim=8, tied=False, taps=(0, 2, 4), **SIZES)
TAPS = dict(zip("abc", np.random.default_rng(0).standard_normal((3, LIMIT + 8, WIDTH)).astype(np.float32), strict=True))
"""The captured row of every position of three requests."""
GARBAGE = np.resize([1e30, np.nan, -np.inf], WIDTH)
WAYS = ["whole", "newest"]
"""How a step hands its rows over: all with the draft, or the newest, behind a back-fill of those before."""


class Worker:
    """Four slots of a drafter, and what a draft must be. `first` holds each request's first seeded position."""

    def __init__(self, bundle: Path, expected: oracle.Drafter, way: str) -> None:
        self.parts, self.expected, self.way, self.first = open_parts(bundle), expected, way, {}
        self.slots, self.drafter = self.parts.slots, self.parts.drafter

    def totals(self, names: Sequence[str]) -> np.ndarray:
        return np.array([self.drafter.total(name) for name in names])

    def seed(self, start: int = 0, **stops: int | Sequence[int]) -> None:
        """Admit each request and write its rows from `start` on, if any, in chunks that end at its `stops`."""
        for name, own in stops.items():
            self.slots.admit(name)
            self.first[name] = start
            for begin, end in pairwise((start, *np.atleast_1d(own))):
                if end > begin:
                    self.drafter.write_context(name, TAPS[name][begin:end], np.arange(begin, end))

    def backfill(self, names: Sequence[str], counts: Sequence[int], gap: int = 0) -> None:
        """Write the next `counts` rows of each in one call, the first request's behind a gap; masked entries hold garbage."""
        begins, mask = self.totals(names), np.arange(max(K + 1, *counts)) < np.array(counts)[:, None]
        begins[0] += gap
        positions = begins[:, None] + np.arange(mask.shape[1])
        taps = np.stack([TAPS[name][place] for name, place in zip(names, positions, strict=True)])
        taps[~mask], positions[~mask] = GARBAGE, np.resize([-7, 1 << 40, 3], (~mask).sum())
        self.drafter.write_context_batched(names, taps, positions, mask)

    def step(self, names: Sequence[str], counts: Sequence[int], anchors: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Draft behind `counts` newly accepted rows (the bonus included; all 0: right after seeding) and return each request's draft.

        Drafts and the ring rows that they saw are those of the oracle.
        """
        ends, width = self.totals(names) + counts, K + 1
        if self.way == "newest" and max(counts):
            self.backfill(names, [count - 1 for count in counts])
            counts, width = [1] * len(names), 1
        taps = np.full((len(names), width, WIDTH), GARBAGE, np.float32)
        for row, name, end, count in zip(taps, names, ends, counts, strict=True):
            row[:count] = TAPS[name][end - count : end]
        new = (taps, counts) if max(counts) else (None, None)
        proposals = self.drafter.propose(names, anchors, *new, ends.tolist())
        outputs, drafts = {"hidden": proposals.debug["block_hidden"], "logits": proposals.debug["draft_logits"]}, []
        outputs["confidence_logits"] = proposals.confidence_logits
        for name, row, tokens, anchor, end in zip(names, proposals.view.rows, proposals.tokens(), anchors, ends, strict=True):
            drafts.append({"tokens": tokens} | {key: tensor.read()[row].copy() for key, tensor in outputs.items()})
            for key, value in self.expected.windowed(TAPS[name], end, anchor, window=WINDOW, first=self.first[name]).items():
                np.testing.assert_allclose(drafts[-1][key], value, atol=1e-4, err_msg=f"{key} of {name!r} at {end}")
            seen = np.arange(max(self.first[name], end - WINDOW), end)
            rows = [part.swapaxes(0, 1) for layer in self.expected.context(TAPS[name][seen], seen) for part in layer]
            np.testing.assert_allclose(self.visible(name), rows, atol=1e-4)
        return drafts

    def rings(self) -> np.ndarray:
        """Return a copy of all state `[2*layers, slots, G, R, D]`."""
        return np.stack([tensor.read() for tensor in self.drafter.rings.tensors(View(0, 4, (0, 1, 2, 3))).values()])

    def visible(self, name: str, total: int | None = None) -> np.ndarray:
        """Return the rows `[2*layers, G, n, D]` that a draft sees, now or at `total`, by position."""
        total = self.drafter.total(name) if total is None else total
        return self.rings()[:, self.slots.slot(name)][:, :, np.arange(max(self.first[name], total - WINDOW), total) % CAPACITY]


@pytest.fixture(scope="module")
def fresh(export: Export, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Worker]:
    """Make a worker."""
    pair = tmp_path_factory.mktemp("worker")
    write_pair(pair, SHAPE, dtype="fp32", deviation=0.3)
    bundle = export(pair, ctx_window=WINDOW, debug_outputs=True, max_chunk=10, max_batch_size=4)
    return lambda way=WAYS[0]: Worker(bundle, oracle.Drafter(pair / "drafter"), way)


@pytest.fixture(params=WAYS)
def worker(request: pytest.FixtureRequest, fresh: Callable[..., Worker]) -> Worker:
    return fresh(request.param)


def test_worker_protocol(fresh: Callable[..., Worker]) -> None:
    """The request in slot 1, 6 rows of prompt, then 1, 3 and 2 accepted; both ways of handing rows over leave the same state."""
    states, neighbours, tokens = [], [], set()
    for way in WAYS:
        worker, anchor = fresh(way), 13
        worker.seed(a=40, b=6)
        assert worker.slots.slot("b") == 1
        neighbours.append(worker.rings()[:, 0])
        for count in (1, 3, 2):
            (draft,) = worker.step("b", [count], [anchor])
            assert draft["tokens"].shape == (K,)
            tokens |= set(draft["tokens"].tolist())
            anchor = (7 * anchor + 3) % SHAPE.vocabulary
        assert worker.totals("ab").tolist() == [40, 12]
        np.testing.assert_array_equal(worker.rings()[:, 0], neighbours[-1])
        states.append(worker.visible("b"))
    np.testing.assert_allclose(*states, atol=1e-5)
    assert len(tokens) > K


@pytest.mark.parametrize("order", ["abc", "cab"])
def test_batched_equals_singletons(worker: Worker, fresh: Callable[..., Worker], order: str) -> None:
    contexts, counts, anchors = {"a": 4, "b": 7, "c": 5}, {"a": 1, "b": 4, "c": 2}, {"a": 13, "b": 94, "c": 0}
    worker.seed(**contexts)
    drafts = worker.step(order, [counts[name] for name in order], [anchors[name] for name in order])
    for name, draft in zip(order, drafts, strict=True):
        alone = fresh(worker.way)
        alone.seed(**{name: contexts[name]})
        for key, value in alone.step(name, [counts[name]], [anchors[name]])[0].items():
            np.testing.assert_allclose(draft[key], value, atol=1e-5)
        np.testing.assert_allclose(worker.visible(name), alone.visible(name), atol=1e-5)


@pytest.mark.parametrize("stops", [(32, 41), (9, 41), (41,), range(1, 42), (20, 80), (7, 107)], ids=lambda stops: str(list(stops)[:3]))
def test_wraparound(fresh: Callable[..., Worker], stops: Sequence[int]) -> None:
    """Only the newest 32 positions show, with their absolute phases, in whatever chunks they came: also one longer than the ring."""
    parted, whole = fresh(), fresh()
    for worker, own in ((parted, stops), (whole, stops[-1:])):
        worker.seed(a=own)
        worker.step("a", [0], [13])
    np.testing.assert_allclose(parted.visible("a"), whole.visible("a"), atol=1e-5)


@pytest.mark.parametrize("counts", [(41, 0, 33), (7, 49, 100)])
def test_a_long_chunk_in_a_batch(fresh: Callable[..., Worker], counts: Sequence[int]) -> None:
    """A masked call may be longer than window and ring, too."""
    worker = fresh()
    worker.seed(a=5, b=30, c=0)
    worker.backfill("abc", counts)
    assert worker.totals("abc").tolist() == [5 + counts[0], 30 + counts[1], counts[2]]
    worker.step("abc", [0, 0, 0], [1, 2, 3])


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize(("count", "skipped"), [(4, 0), (9, 0), (4, 5)])
def test_prefix_reuse(worker: Worker, before: int, count: int, skipped: int) -> None:
    """Rows never captured are left out, not read as zeros, now and when later rows follow; the other request of the call lacks none."""
    worker.seed(a=before, b=8)
    worker.first["a"] = first = before + 5
    if skipped:
        worker.drafter.skip_to("a", first)
    worker.backfill("ab", [count, 2], gap=5 - skipped)
    draft, _ = worker.step("ab", [0, 0], [13, 94])
    zeroed = np.where(np.arange(LIMIT + 8)[:, None] < first, 0, TAPS["a"])
    assert np.abs(draft["logits"] - worker.expected.windowed(zeroed, first + count, 13, window=WINDOW)["logits"]).max() > 1e-3
    for counts in ([3, 1], [1, 4]):
        worker.step("ab", counts, [13, 94])


@pytest.mark.parametrize("total", [45, 46, 47, 48])
def test_backfill_across_the_wrap(fresh: Callable[..., Worker], total: int) -> None:
    """Rows that a mask hides change no visible bit: of the request itself, of one all masked, of one that is not in the call."""
    worker, totals = fresh(), {"a": total, "b": total + 1, "c": total - 1}
    worker.seed(**totals)
    before = {name: worker.visible(name) for name in totals}
    worker.backfill("ab", [2, 0])
    for name, rows in totals.items():
        np.testing.assert_array_equal(worker.visible(name, rows), before[name])
    assert worker.totals("abc").tolist() == [total + 2, total + 1, total - 1]
    worker.step("abc", [0, 0, 0], [1, 2, 3])


def test_two_requests_wrap_at_different_steps(worker: Worker) -> None:
    """Any count in any step, and every fifth step without one of the two."""
    rng, laps = np.random.default_rng(1), []
    worker.seed(a=30, b=3)
    for number in range(48):
        names = "ab" if number % 5 else "ab"[number % 2]
        worker.step(names, rng.integers(1, K + 2, len(names)), rng.integers(0, SHAPE.vocabulary, len(names)))
        laps.append(worker.totals("ab") // CAPACITY)
    assert min(laps[-1]) >= 2
    assert not np.diff(laps, axis=0).all(1).any()


@pytest.mark.parametrize("total", [LIMIT - 2, LIMIT - 1, LIMIT])
def test_a_block_beyond_the_last_position(worker: Worker, total: int) -> None:
    """The drafter's own block may pass max_position_embeddings; its phases are not clamped."""
    worker.seed(start=total - 42, a=total - 2)
    worker.step("a", [2], [13])


@pytest.mark.parametrize("rows", [2, 60])
def test_a_slot_used_again(worker: Worker, fresh: Callable[..., Worker], rows: int) -> None:
    """Nothing of the last user shows: all is bitwise as in a worker that had none. The next user begins without a row."""
    worker.seed(start=5, c=rows + 5)
    worker.step("c", [4], [1])
    worker.drafter.release("c")
    worker.slots.release("c")
    runs = []
    for used in (worker, fresh(worker.way)):
        used.seed(a=0, b=4)
        drafts = [draft for counts in ([1, 4], [3, 1], [2, 2]) for draft in used.step("ab", counts, [5, 6])]
        runs.append([array for draft in drafts for array in draft.values()] + [used.visible(name) for name in "ab"])
    for ours, clean in zip(*runs, strict=True):
        np.testing.assert_array_equal(ours, clean)


def test_a_refused_call_writes_nothing(fresh: Callable[..., Worker]) -> None:
    """One fault in a call for two requests: neither the faultless one's state nor any other slot's changes by a bit."""
    worker, both = fresh(), np.stack([TAPS["a"], TAPS["b"]])
    worker.seed(a=20, b=30, c=40, gone=0)
    worker.slots.release("gone")
    before = worker.rings()

    def write(names: Sequence[str], rows: int, begin: int) -> None:
        worker.drafter.write_context_batched(names, both[:, :rows], np.add.outer([20, begin], np.arange(rows)))

    def propose(names: Sequence[str], rows: int, count: int, *positions: int) -> None:
        worker.drafter.propose(names, [1, 1], both[:, :rows], [2, count], positions or None)

    for error, message, call, *arguments in (
        *((UnknownRequestError, f"'{name}' holds no slot", propose, ["a", name], 2, 2) for name in ("ghost", "gone")),
        *((UnknownRequestError, "'ghost' holds no slot", write, ["a", "ghost"], rows, 30) for rows in (2, 40)),
        *((RequestError, "begin at 29, but rows up to 29 are written", write, "ab", rows, 29) for rows in (2, 40)),
        *((LimitError, "end at 512, the bundle allows sequences of 512", write, "ab", rows, 513 - rows) for rows in (2, 40)),
        *((RequestError, rf"'b' committed {n} rows, expected 1\.\.4", propose, "ab", 4, n) for n in (0, -1, 5)),
        (RequestError, r"expected \[requests, 1\.\.4, 96\]", propose, "ab", 5, 5),
        (RequestError, "its context ends at 33", propose, "ab", 4, 3, 22, 32),
    ):
        with pytest.raises(error, match=message):
            call(*arguments)
        np.testing.assert_array_equal(worker.rings(), before)
        assert worker.totals("abc").tolist() == [20, 30, 40]
