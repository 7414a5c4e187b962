"""What a plugin refuses, by its operator's contract: sizes, dtypes, attributes. No TensorRT."""

from __future__ import annotations

import pytest

from dspark.plugins.contract import BLOCK_ATTENTION, FLOATS, PLUGINS, RING_WRITE
from dspark.plugins.rules import PluginError, check_agreement, checked_attributes, dtype_fits, exact_sizes, sizes, source_of

RING = [(2, 4, 48, 64), (2, 4, 8, 64), (2,)]
BLOCK = [(2, 8, 7, 64), (2, 4, 48, 64), (2, 4, 48, 64), (2, 4, 7, 64), (2, 4, 7, 64), (2,), (2,)]
ATTRIBUTES = {"scale": 0.125, "window": 32, "heads": 8, "kv_heads": 4, "head_dim": 64}


def test_sizes() -> None:
    assert exact_sizes(RING_WRITE, RING) == {"B": 2, "G": 4, "R": 48, "D": 64, "N": 8}
    assert exact_sizes(BLOCK_ATTENTION, BLOCK) == {"B": 2, "Hq": 8, "T": 7, "D": 64, "G": 4, "R": 48}
    open_sizes = sizes(RING_WRITE, [(None, 4, 48, 64), (None, 4, None, 64), (None,)])
    assert open_sizes == {"B": None, "G": 4, "R": 48, "D": 64, "N": None}
    assert exact_sizes(RING_WRITE, [(None, 4, 48, 64), (2, 4, 48, 64), (2,)])["B"] == 2


@pytest.mark.parametrize(
    ("operator", "changes", "message"),
    [
        (RING_WRITE, {0: (2, 4, 48)}, "ring has 3 dimensions, expected 4"),
        (RING_WRITE, {1: (3, 4, 8, 64)}, "rows has B = 3, expected 2"),
        (RING_WRITE, {2: (2, 1)}, "start has 2 dimensions, expected 1"),
        (RING_WRITE, {1: (2, 4, 49, 64)}, "49 rows do not fit a ring of 48"),
        (BLOCK_ATTENTION, {0: (2, 6, 7, 64)}, "6 query heads are no multiple of 4"),
        (BLOCK_ATTENTION, {4: (2, 4, 7, 32)}, "block_value has D = 32, expected 64"),
        (BLOCK_ATTENTION, {2: (2, 4, 32, 64), 6: (1,)}, "ring_value has R = 32, expected 48.*first has B = 1, expected 2"),
    ],
)
def test_shapes_that_are_refused(operator: object, changes: dict[int, tuple[int, ...]], message: str) -> None:
    shapes = [changes.get(i, shape) for i, shape in enumerate(RING if operator is RING_WRITE else BLOCK)]
    with pytest.raises(PluginError, match=message):
        sizes(operator, shapes)


def test_a_missing_input_is_refused() -> None:
    with pytest.raises(PluginError, match="RingWrite has 2 inputs, expected 3: ring, rows, start"):
        sizes(RING_WRITE, RING[:2])


@pytest.mark.parametrize("operator", PLUGINS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_dtypes(operator: object, dtype: str) -> None:
    """Floats are all of one dtype, positions are int64."""
    names = [*operator.inputs, *operator.outputs]
    right = [operator.dtypes.get(name, dtype) for name in names]
    assert all(dtype_fits(operator, i, right[: i + 1]) for i in range(len(names)))
    for i in range(len(names)):
        for wrong in {*FLOATS, "int64", "int32", None} - {right[i]}:
            changed = [*right[:i], wrong]
            assert dtype_fits(operator, i, changed) == (i == 0 and wrong in FLOATS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": 1}, r"attribute scale is 1 \(int\), expected float"),
        ({"window": 32.0}, r"attribute window is 32.0 \(float\), expected int"),
        ({"heads": True}, r"attribute heads is True \(bool\), expected int"),
        ({"heads": None, "kv_heads": None}, "attribute heads is missing, expected int; attribute kv_heads is missing"),
        ({"window": 0}, "attribute window is 0, expected at least 1"),
    ],
)
def test_attributes_that_are_refused(changes: dict[str, object], message: str) -> None:
    given = {name: value for name, value in (ATTRIBUTES | changes).items() if value is not None}
    with pytest.raises(PluginError, match=f"BlockAttention: {message}"):
        checked_attributes(BLOCK_ATTENTION, given)


def test_attributes_repeat_sizes() -> None:
    attributes = checked_attributes(BLOCK_ATTENTION, ATTRIBUTES)
    assert attributes == ATTRIBUTES
    check_agreement(BLOCK_ATTENTION, attributes, exact_sizes(BLOCK_ATTENTION, BLOCK))
    with pytest.raises(PluginError, match="attribute head_dim is 128, the inputs have D = 64"):
        check_agreement(BLOCK_ATTENTION, attributes | {"head_dim": 128}, exact_sizes(BLOCK_ATTENTION, BLOCK))


def test_where_an_output_takes_its_sizes() -> None:
    assert [source_of(BLOCK_ATTENTION, letter) for letter in ("B", "Hq", "T", "D")] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert [source_of(RING_WRITE, letter) for letter in ("R", "N")] == [(0, 2), (1, 2)]
