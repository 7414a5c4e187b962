"""The cost model against bytes counted by hand and against the example pair's own files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from conftest import PAIR
from cost_model import Machine, break_even, fitted, main, round_seconds
from random_pair import SHAPES
from work import draft_step, storage, target_step

SHAPE = SHAPES["pair"]
BF16, FP32 = storage("bf16", 4), storage("fp32", 4)
ROW = 2 * 2 * 64
"""Entries of the keys and values of one position in one layer: 2 groups of 64."""


def stored_bytes(directory: Path) -> dict[str, int]:
    """Return the bytes of every tensor of a checkpoint, read from its header."""
    with (directory / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    offsets = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: end - begin for name, (begin, end) in offsets.items()}


def test_a_target_step_reads_the_checkpoint_once() -> None:
    """The tied table is the LM head, read whole; the gathered row comes on top."""
    stored = stored_bytes(PAIR / "target")
    assert sum(stored.values()) == 2 * 3_936_448
    assert target_step(SHAPE, BF16, 1, 1, 0).weights == sum(stored.values()) + 192 * 2


def test_a_draft_step_reads_its_checkpoint_but_for_the_tables() -> None:
    """Tables are gathered from (2 rows of the embedding, 7 of Markov w1); w2 is read 7 times, key and value projections twice."""
    stored = stored_bytes(PAIR / "drafter")
    expected = sum(stored.values()) - stored["embed_tokens.weight"] - stored["markov_head.markov_w1.weight"]
    expected += 6 * stored["markov_head.markov_w2.weight"]
    expected += sum(size for name, size in stored.items() if "k_proj" in name or "v_proj" in name)
    assert draft_step(SHAPE, BF16, 1, 100).weights == expected + (2 * 192 + 7 * 64) * 2


@pytest.mark.parametrize(("dtype", "target", "drafter"), [("int8", 4_440_832, 3_032_836), ("int4", 2_474_752, 2_344_708)])
def test_quantised_weights(dtype: str, target: int, drafter: int) -> None:
    """Counted in the weight files of quantised bundles of the example pair, groups of 32, float32 scales.

    int8: 3,998,464 of the target's layers and norms, 442,368 of its head (2048 x 192 integers, 2048 x 6 scales); of the drafter 1,444,356
    without tables and heads, the same head, 7 x 147,456 of w2, 110,592 of keys and values again, 3,328 of gathered rows. int4 likewise.
    """
    kind = storage(dtype, 4)
    assert target_step(SHAPE, kind, 1, 1, 0).weights == target + 192 * 4
    assert draft_step(SHAPE, kind, 1, 100).weights == drafter


def test_state_and_logits_by_hand() -> None:
    """3 requests of 100 cached tokens, 8 more each: 108 rows are read and 8 written in 8 layers; 8 rows of 2048 logits."""
    step = target_step(SHAPE, FP32, 3, 8, 100)
    assert step.state == 3 * 8 * (108 + 8) * ROW * 4
    assert step.logits == 3 * 8 * 2048 * 4
    draft = draft_step(SHAPE, FP32, 3, 100)  # 2 layers; 100 ring rows and 7 of the block are read, 8 context rows written
    assert draft.state == 3 * 2 * (107 + 8) * ROW * 4
    assert draft.logits == 3 * 7 * 2048 * 4


def test_operations_by_hand() -> None:
    """Two for each entry of a matrix and row, four for each entry of a query and key."""
    layer = 192 * 256 * 2 + 192 * 128 * 2 + 3 * 192 * 512
    assert target_step(SHAPE, FP32, 1, 1, 0).operations == 2 * (8 * layer + 2048 * 192) + 4 * 8 * 1 * 256
    block, context = 2 * layer + 2048 * 192 + 2048 * 64, 2 * 2 * 128 * 192 + 192 * 3 * 192
    assert draft_step(SHAPE, FP32, 1, 93).operations == 2 * (7 * block + 8 * context) + 4 * 2 * 7 * 100 * 256


def test_weights_do_not_grow_with_the_batch() -> None:
    """What makes a batch cheap: of a step's weights only gathered rows are read for each request."""
    one, four = (target_step(SHAPE, FP32, batch, 8, 100) for batch in (1, 4))
    assert four.weights - one.weights == 3 * 8 * 192 * 4
    assert (four.state, four.operations) == (4 * one.state, 4 * one.operations)


def test_break_even_is_where_both_ways_take_the_same_time() -> None:
    """At the accepted length it returns, a round and plain decoding of its tokens take equally long."""
    machine = Machine("", 1e10, 1e11, 4)
    plain, verify, draft = round_seconds(machine, SHAPES["0.6b"], "fp32", 2, 500, 2048)
    assert plain == pytest.approx(target_step(SHAPES["0.6b"], FP32, 2, 1, 500).bytes / 1e10 + 2 * 1.191e9 / 1e11, rel=0.02)
    assert break_even(plain, verify, draft) * plain == pytest.approx(verify + draft)


def test_a_machine_is_recovered_from_its_step_times() -> None:
    """Times made with a machine give it back; times that no machine has are refused."""
    machine, shape, kind = Machine("", 3e10, 2e11, 4), SHAPES["1.7b"], storage("int8", 4)
    times = {f"target {rows}": machine.seconds(target_step(shape, kind, 1, rows, 544)) for rows in (1, 8)}
    found = fitted("", shape, "int8", times, 1, 544)
    assert (found.bandwidth, found.rate) == (pytest.approx(3e10), pytest.approx(2e11))
    with pytest.raises(SystemExit, match="fit no bandwidth"):
        fitted("x", shape, "int8", {"target 1": 0.2, "target 8": 0.1}, 1, 544)


def test_published_sizes() -> None:
    """Parameters of the published targets in bf16, to what their names and model cards say."""
    for name, billions in [("0.6b", 0.596), ("1.7b", 1.721), ("4b", 4.022), ("8b", 8.191 - 0.622), ("14b", 14.768 - 0.778)]:
        assert target_step(SHAPES[name], BF16, 1, 1, 0).weights / 2e9 == pytest.approx(billions, rel=1e-3)


def test_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured steps that a machine of 30 GB/s and 200 GFLOP/s would take give that machine, and its draft, in the table."""
    machine, shape, kind = Machine("", 3e10, 2e11, 4), SHAPES["0.6b"], storage("int8", 4)
    seconds = {f"target {rows}": machine.seconds(target_step(shape, kind, 1, rows, 544)) for rows in (1, 8)}
    draft = machine.seconds(draft_step(shape, kind, 1, 544))
    record = {"machine": "here", "batch": 1, "cache": 544, "ring": 544, "bundles": {"q": seconds | {"draft 544": 2 * draft}}}
    (tmp_path / "steps.json").write_text(json.dumps(record))
    monkeypatch.setattr(
        "sys.argv", ["", "--shapes", "8b", "--batches", "1", "--measured", "0.6b", "int8", str(tmp_path / "steps.json"), "q"]
    )
    main()
    lines = capsys.readouterr().out.splitlines()
    plain, verify = seconds.values()
    cells = [f"{1e3 * plain:.1f}", f"{1e3 * verify:.1f}", f"{2e3 * draft:.1f}", f"{(verify + 2 * draft) / plain:.2f}"]
    assert f"| {' | '.join(cells)} | 30.0 | 200 | {1e3 * draft:.1f} |" in lines
    (row,) = [
        line for line in lines[lines.index("H200-class, 4.8 TB/s, 1024 cached tokens (computed, not measured)") :][:8] if "| bf16 |" in line
    ]
    assert row.startswith("| 8b | bf16 | 1 | 3.2 |"), "15.3 GB at 4.8 TB/s and 15.7 GFLOP at 0.99 PFLOP/s"
