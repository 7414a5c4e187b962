"""The float form of a quantised bundle: the same pair, options and limits, with every weight as its checkpoint has it.

Knows manifests and checkpoints. What both forms give is compared elsewhere.
"""

from __future__ import annotations

from pathlib import Path

from dspark.export.bundle import ExportOptions, export_bundle, identity
from dspark.export.checkpoint import open_checkpoint
from dspark.runtime.bundle import Manifest, load_bundle
from dspark.runtime.errors import CheckpointError


def export_unquantized(bundle: Path | str, target: Path | str, drafter: Path | str, output: Path | str) -> Manifest:
    """Export the two model directories that `bundle` was made from to `output`, its weights in float32, and return the manifest.

    Raises CheckpointError if a directory is not the one that the bundle records, and what `export_bundle` raises.
    """
    manifest = load_bundle(bundle, references=False).manifest
    for model, directory in (("target", Path(target)), ("drafter", Path(drafter))):
        if identity(open_checkpoint(directory)) != manifest.checkpoints[model]:
            raise CheckpointError(f"{directory} is not the {model} that {bundle} was exported from: pass the one that it was")
    options = ExportOptions(
        dtype=manifest.dtype,
        num_speculative_tokens=manifest.num_speculative_tokens,
        markov_topk=manifest.markov_topk,
        ctx_window=manifest.window,
        max_batch_size=manifest.limits.max_batch_size,
        max_seq_len=manifest.limits.max_seq_len,
        max_chunk=manifest.limits.max_chunk,
        mask_token_id=manifest.drafter.mask_token_id,
        debug_outputs=manifest.debug_outputs,
        opset=manifest.opset,
    )
    return export_bundle(target, drafter, output, options)
