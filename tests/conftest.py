"""Fixtures: exported bundles, made once a session for each set of options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from random_pair import Shape, write_pair

from dspark.export.bundle import ExportOptions, export_bundle
from dspark.runtime.config import DrafterConfig, TargetConfig

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden"
PAIR = ROOT / "examples" / "pair"

Export = Callable[..., Path]

SMALL = Shape(
    hidden=64,
    intermediate=96,
    layers=6,
    heads=4,
    kv_heads=2,
    head_dim=16,
    tied=False,
    taps=(1, 3, 4),
    vocabulary=320,
    drafter_layers=2,
    block=7,
    rank=8,
    positions=512,
    mask=301,
)
"""A small random pair; ids 300..319 stand for rows past the tokenizer, the mask token among them."""

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 512,
    "attention_bias": False,
}
SMALL_TARGET = TargetConfig(**_SIZES, num_hidden_layers=6, tie_word_embeddings=False)
SMALL_DRAFTER = DrafterConfig(
    **_SIZES,
    num_hidden_layers=2,
    block_size=7,
    mask_token_id=301,
    target_layer_ids=(1, 3, 4),
    num_target_layers=6,
    markov_rank=8,
    markov_head_type="vanilla",
    enable_confidence_head=True,
    confidence_head_with_markov=True,
)
"""What the configurations of SMALL are as the runtime knows them."""


@pytest.fixture(scope="session")
def small_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with target/ and drafter/ of the small random pair in float32."""
    directory = tmp_path_factory.mktemp("small")
    write_pair(directory, SMALL, dtype="fp32", deviation=0.15)
    return directory


@pytest.fixture(scope="session")
def export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Export the pair in a directory with target/ and drafter/; the same arguments give the same bundle again."""
    made: dict[tuple[object, ...], Path] = {}

    def run(pair: Path, **options: object) -> Path:
        key = (pair, *sorted(options.items()))
        if key not in made:
            output = tmp_path_factory.mktemp("bundle") / "bundle"
            export_bundle(pair / "target", pair / "drafter", output, ExportOptions(**options))
            made[key] = output
        return made[key]

    return run


@pytest.fixture(scope="session")
def pair_bundle(export: Export) -> Path:
    """The example pair, as the README exports it."""
    return export(PAIR)


@pytest.fixture(scope="session")
def small_bundle(export: Export, small_pair: Path) -> Path:
    """The small random pair with a window of 32, small limits and debug outputs."""
    return export(small_pair, ctx_window=32, debug_outputs=True, max_chunk=64, max_batch_size=4)
