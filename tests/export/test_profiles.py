"""Profiles from limits and a user's shapes: what they are, and every contradiction in one message."""

from __future__ import annotations

import pytest
from conftest import SMALL_DRAFTER, SMALL_TARGET

from dspark.export.profiles import input_shapes, make_profiles, parse_shapes
from dspark.runtime.bundle import Limits
from dspark.runtime.engines import EngineGraph, EngineProfile
from dspark.runtime.errors import ConfigError, LimitError
from dspark.runtime.graphs import GRAPHS, signatures

SIGNATURES = signatures(SMALL_TARGET, SMALL_DRAFTER, 7, debug_outputs=False)
CAPACITIES = {"R": 48, "S": 528}


def profiles(**asked: str) -> dict[str, tuple[EngineProfile, ...]]:
    shapes = {kind: parse_shapes(text) for kind, text in asked.items()}
    return make_profiles(SIGNATURES, Limits(4, 512, 64), 7, CAPACITIES, shapes)


def test_from_limits() -> None:
    made = profiles()
    assert tuple(made) == tuple(SIGNATURES)
    assert set(made) == set(GRAPHS)
    prefill, decode = made["target"]
    assert (prefill.name, prefill.minimum, prefill.maximum) == ("prefill", {"B": 1, "N": 1, "M": 1}, {"B": 1, "N": 64, "M": 1})
    assert (decode.name, decode.minimum, decode.maximum) == ("decode", {"B": 1, "N": 1, "M": 1}, {"B": 4, "N": 8, "M": 8})
    # A chunk of context rows is never longer than the ring.
    assert made["context"][0].maximum == {"B": 1, "N": 48}
    assert [len(made[graph]) for graph in ("context", "draft", "accept", "truncate")] == [2, 1, 1, 1]
    assert made["accept"][0].maximum == {"B": 4, "M": 8}
    shapes = input_shapes(SIGNATURES["target"], decode, CAPACITIES)
    assert shapes["tokens"] == ((1, 1), (1, 8), (4, 8))
    assert shapes["key_cache.0"] == ((1, 2, 528, 16), (1, 2, 528, 16), (4, 2, 528, 16))


def test_a_shape_sets_its_letters_in_every_graph_that_has_the_tensor() -> None:
    made = profiles(minShapes="tokens:2x2", optShapes="tokens:2x4", maxShapes="tokens:3x4,verify_tokens:2x8")
    decode = made["target"][1]
    assert (decode.minimum, decode.optimum, decode.maximum) == (
        {"B": 2, "N": 2, "M": 1},
        {"B": 2, "N": 4, "M": 8},
        {"B": 3, "N": 4, "M": 8},
    )
    assert made["accept"][0].maximum["B"] == made["logprobs"][0].maximum["B"] == 2
    assert made["draft"][0].maximum == {"B": 4, "N": 8}


@pytest.mark.parametrize(
    ("asked", "messages"),
    [
        ({"maxShapes": "tokens:16x8"}, ["target: B may be 16, the bundle allows 4: export with a larger --max-batch-size"]),
        ({"maxShapes": "tokens:4x9"}, ["target: N may be 9, the bundle allows 8"]),
        ({"minShapes": "tokens:4x4", "maxShapes": "tokens:2x8"}, ["target: B has minimum 4, optimum 4, maximum 2"]),
        ({"optShapes": "tokens:4x8", "maxShapes": "tokens:2x8"}, ["target: B has minimum 1, optimum 4, maximum 2"]),
        ({"minShapes": "tokens:0x1"}, ["target: B has minimum 0"]),
        ({"maxShapes": "tokens:2x8,logit_rows:3x8"}, ["--maxShapes: target has B = 3 in logit_rows, 2 in tokens"]),
        ({"maxShapes": "input_ids:2x8"}, ["--maxShapes: no graph has an input 'input_ids'"]),
        ({"maxShapes": "taps:2x8x191"}, ["--maxShapes: taps is 2x8x191, expected BxNx192"]),
        ({"maxShapes": "key_ring.0:2x2x64x16"}, ["key_ring.0 is 2x2x64x16, expected Bx2x48x16"]),
        ({"maxShapes": "tokens:2", "minShapes": "x:1"}, ["tokens is 2, expected BxN", "no graph has an input 'x'"]),
    ],
)
def test_contradictions(asked: dict[str, str], messages: list[str]) -> None:
    with pytest.raises(ConfigError, match="these profiles cannot be") as error:
        profiles(**asked)
    assert all(message in str(error.value) for message in messages)


@pytest.mark.parametrize("text", ["tokens", "tokens:", ":1x2", "tokens:1xa", "tokens:1x2,", "tokens:-1x2"])
def test_texts_that_are_no_shapes(text: str) -> None:
    with pytest.raises(ConfigError, match="is no shape: expected NAME:1x8"):
        parse_shapes(text)


def test_choice_of_a_profile() -> None:
    engine = EngineGraph(0, profiles()["target"])
    assert engine.profile({"B": 1, "N": 64, "M": 1}) == 0
    assert engine.profile({"B": 4, "N": 8, "M": 8, "S": 528}) == 1
    with pytest.raises(
        LimitError, match=r"(?s)prefill: B = 5, the engine was built for 1..1.*decode: B = 5, the engine was built for 1..4"
    ):
        engine.profile({"B": 5, "N": 8, "M": 8})
