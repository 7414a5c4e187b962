"""Fixtures: exported bundles, made once a session for each set of options."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from random_pair import Shape, write_pair

from dspark.export.bundle import ExportOptions, export_bundle
from dspark.runtime import onnxruntime as backend
from dspark.runtime.config import DrafterConfig, TargetConfig

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden"
PAIR = ROOT / "examples" / "pair"

Export = Callable[..., Path]

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    backend.DEFAULT_THREADS = 1  # the workers share the cores: threads that wait for each other would take them from the others

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
    return once(shared_directory(tmp_path_factory) / "small", lambda place: write_pair(place, SMALL, dtype="fp32", deviation=0.15))


@pytest.fixture(scope="session")
def export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Export the pair in a directory with target/ and drafter/; the same arguments give the same bundle, in all processes of a run."""

    def run(pair: Path, **options: object) -> Path:
        name = hashlib.sha256(repr((str(pair), sorted(options.items()))).encode()).hexdigest()[:16]
        made = ExportOptions(**options)
        return once(shared_directory(tmp_path_factory) / name, lambda place: export_bundle(pair / "target", pair / "drafter", place, made))

    return run


def shared_directory(factory: pytest.TempPathFactory) -> Path:
    """Return a directory of this test run, whichever of its processes asks."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def once(place: Path, make: Callable[[Path], object]) -> Path:
    """Make something at `place` unless another process of the run has, or is about to: then wait for it."""
    try:
        lock = os.open(f"{place}.lock", os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        while not Path(f"{place}.made").exists():
            assert not Path(f"{place}.failed").exists(), f"another process could not make {place}"
            time.sleep(0.2)
        return place
    try:
        make(place)
        Path(f"{place}.made").touch()
    except BaseException:
        Path(f"{place}.failed").touch()
        raise
    finally:
        os.close(lock)
    return place


@pytest.fixture(scope="session")
def pair_bundle(export: Export) -> Path:
    """The example pair, as the README exports it."""
    return export(PAIR)


SMALL_OPTIONS = {"ctx_window": 32, "debug_outputs": True, "max_chunk": 64, "max_batch_size": 4}
"""A window of 32, small limits and debug outputs."""


@pytest.fixture(scope="session")
def small_bundle(export: Export, small_pair: Path) -> Path:
    """The small random pair with SMALL_OPTIONS."""
    return export(small_pair, **SMALL_OPTIONS)


@pytest.fixture(scope="session", params=["float", "int8", "int4"])
def each_bundle(request: pytest.FixtureRequest, export: Export, small_pair: Path, small_bundle: Path) -> Path:
    """`small_bundle`, and the same with its weights quantised."""
    return small_bundle if request.param == "float" else export(small_pair, **SMALL_OPTIONS, weights=request.param)
