"""A target and its drafter: whether they belong together, and which stored tensor each parameter takes.

Knows both configurations and both headers. Reads no tensor data.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dspark.export.checkpoint import Checkpoint, StoredTensor, open_checkpoint, select_tensors
from dspark.export.configs import read_drafter_config, read_json, read_target_config
from dspark.export.drafter import Drafter
from dspark.export.target import Target
from dspark.runtime.config import DrafterConfig, TargetConfig
from dspark.runtime.errors import CheckpointError, ConfigError, numbered

logger = logging.getLogger(__name__)

SHARED = ("embed_tokens.weight", "lm_head.weight")
"""Parameters that a drafter may lack: it then takes the target's."""


@dataclass(frozen=True)
class Pair:
    """A checked pair: configurations, checkpoints, and the stored tensor of each parameter of both models."""

    target: TargetConfig
    drafter: DrafterConfig
    target_checkpoint: Checkpoint
    drafter_checkpoint: Checkpoint
    target_tensors: dict[str, StoredTensor]
    drafter_tensors: dict[str, StoredTensor]


def load_pair(target_directory: Path, drafter_directory: Path, mask_token_id: int | None = None) -> Pair:
    """Read and check two model directories. Raises ConfigError or CheckpointError, each with all faults of its kind."""
    target, drafter = read_target_config(target_directory), read_drafter_config(drafter_directory, mask_token_id)
    check_pair(target, drafter, target_directory, drafter_directory)
    target_checkpoint, drafter_checkpoint = open_checkpoint(target_directory), open_checkpoint(drafter_directory)
    drafter = replace(drafter, confidence_head_bias="confidence_head.proj.bias" in drafter_checkpoint.tensors)
    target_tensors = tensors_of_target(target, target_checkpoint)
    drafter_tensors = tensors_of_drafter(drafter, drafter_checkpoint, target_tensors)
    return Pair(target, drafter, target_checkpoint, drafter_checkpoint, target_tensors, drafter_tensors)


def check_pair(target: TargetConfig, drafter: DrafterConfig, target_directory: Path, drafter_directory: Path) -> None:
    """Raise ConfigError with every reason why the drafter was not trained for the target."""
    faults = [
        f"{what}: the target has {ours}, the drafter expects {theirs}"
        for what, ours, theirs in (
            ("hidden_size", target.hidden_size, drafter.hidden_size),
            ("vocab_size", target.vocab_size, drafter.vocab_size),
            ("number of target layers", target.num_hidden_layers, drafter.num_target_layers),
        )
        if ours != theirs
    ]
    if drafter.mask_token_id >= target.vocab_size:
        faults.append(f"mask_token_id {drafter.mask_token_id} is outside the target embedding's {target.vocab_size} rows")
    beyond = [i for i in drafter.target_layer_ids if i >= target.num_hidden_layers - 1]
    if beyond:
        faults.append(f"target_layer_ids {beyond} are no layers before the last of the target's {target.num_hidden_layers}")
    ours, theirs = (_token_strings(directory) for directory in (target_directory, drafter_directory))
    if ours and max(ours) >= target.vocab_size:
        faults.append(f"the target's tokenizer has id {max(ours)}, its embedding only {target.vocab_size} rows")
    if ours and theirs:
        differing = [i for i in sorted(ours.keys() & theirs.keys()) if ours[i] != theirs[i]]
        faults += [f"token id {i} is {ours[i]!r} for the target and {theirs[i]!r} for the drafter" for i in differing[:5]]
    if faults:
        raise ConfigError(f"{drafter_directory} is no drafter for {target_directory}:{numbered(faults)}")


def tensors_of_target(config: TargetConfig, checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """Return the stored tensor of each parameter of the target; a tied head is the embedding."""
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in Target(config, ()).named_parameters()}
    stored_names = {name: name if name == "lm_head.weight" else f"model.{name}" for name in shapes}
    expected = {stored_names[name]: shape for name, shape in shapes.items()}
    stored = select_tensors(checkpoint, expected, ignored=["lm_head.weight"] if config.tie_word_embeddings else [])
    tensors = {name: stored[stored_names[name]] for name in shapes}
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    return tensors


def tensors_of_drafter(
    config: DrafterConfig, checkpoint: Checkpoint, target_tensors: dict[str, StoredTensor] | None
) -> dict[str, StoredTensor]:
    """Return the stored tensor of each parameter of the drafter; a missing embedding or head is the target's."""
    with torch.device("meta"):
        model = Drafter(config, config.block_size, config.block_size)
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    absent = [name for name in SHARED if name not in checkpoint.tensors]
    if absent and target_tensors is None:
        raise CheckpointError(f"{checkpoint.directory} holds no {' and no '.join(absent)}: pass the target they are shared with")
    unused = [n for n in checkpoint.tensors if n.startswith("confidence_head.")] if not config.enable_confidence_head else []
    if unused:
        logger.warning("%s: enable_confidence_head is false; ignoring %s", checkpoint.directory, ", ".join(sorted(unused)))
    own = {name: shape for name, shape in expected.items() if name not in absent}
    tensors = select_tensors(checkpoint, own, ignored=unused)
    return {name: target_tensors[name] if name in absent and target_tensors else tensors[name] for name in expected}


def _token_strings(directory: Path) -> dict[int, str] | None:
    """Return the token string of each id of a directory's tokenizer.json, or None when it has none."""
    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    tokenizer = read_json(path)
    try:
        vocabulary = {int(i): str(token) for token, i in tokenizer["model"]["vocab"].items()}
        return vocabulary | {int(t["id"]): str(t["content"]) for t in tokenizer.get("added_tokens", [])}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is no tokenizer with a vocabulary by token ({error!r})") from None
