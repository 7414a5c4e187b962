"""`dspark-verify BUNDLE`: compare every engine of a bundle that runs on this machine with the reference.

Knows arguments, the report and exit codes: 0 the same within tolerances, 1 a real mismatch, 2 refused, 130 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.runtime.bundle import TOKENIZER_FILES, Bundle, load_bundle
from dspark.runtime.cli import positive
from dspark.runtime.errors import DSparkError, EngineError, ExportError, RequestError, numbered
from dspark.runtime.prompts import Prompt, read_prompts
from dspark.runtime.terminal import ProgressLine

if TYPE_CHECKING:
    from dspark.export.accuracy import Measured, Tensors
    from dspark.export.difference import Difference
    from dspark.export.greedy import Divergence, Tokens

_TEXTS = ("The capital of France is", "def fibonacci(n):\n    ")
"""Prompts besides the seeded ones, where the bundle has a tokenizer."""


@dataclass
class Report:
    """What a run found: by engine, tensors (None for the reference itself) and tokens; the engines that did not run, with reasons."""

    bundle: Bundle
    reference: str
    tensors: Mapping[str, Tensors]
    tokens: Mapping[str, Tokens]
    not_run: Mapping[str, str]
    difference: Difference | None = None
    """Of a quantised target from the float32 one, where that was asked for."""

    @property
    def passed(self) -> bool:
        """Whether no engine has a real mismatch."""
        return all(part.passed for part in (*self.tensors.values(), *self.tokens.values()))


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    args = _parser().parse_args(argv)
    line = ProgressLine(sys.stderr)
    try:
        report = verify(args.bundle, args.tokens, line, args.checkpoints, args.prompt_file)
    except (DSparkError, OSError) as error:
        line.clear()
        print(f"dspark-verify: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        line.clear()
        print(file=sys.stderr)
        return 130
    line.clear()
    try:
        print(json.dumps(_as_json(report), indent=2) if args.json else _table(report), flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if report.passed else 1


def verify(
    directory: Path, tokens: int, line: ProgressLine, checkpoints: Sequence[Path] | None = None, prompt_file: Path | None = None
) -> Report:
    """Compare the engines of a bundle, with those of its float form where `checkpoints`, target and drafter, are given.

    Raises DSparkError where that cannot be done.
    """
    line.show("loading the reference")
    try:
        import polygraphy  # noqa: F401
    except ImportError as error:
        raise ExportError(f'Polygraphy, which runs the comparison, is missing ({error}): pip install "dspark[polygraphy]"') from error
    from dspark.export.accuracy import compare_tensors
    from dspark.export.candidates import open_engines, open_reference
    from dspark.export.greedy import compare_tokens, plain_tokens, seeded_prompts

    bundle = load_bundle(directory)
    if checkpoints is not None and bundle.manifest.quantization is None:
        raise ExportError(f"{directory} is not quantised, so nothing differs from the float target: leave out --checkpoints")
    if checkpoints is not None:
        from dspark.export.difference import check_origin, compare_with_float

        check_origin(bundle, *checkpoints)
    has_tokenizer = (bundle.directory / TOKENIZER_FILES[0]).exists()
    texts = _encoded(bundle, read_prompts(prompt_file) if prompt_file is not None else _TEXTS if has_tokenizer else ())
    engines, not_run = open_engines(bundle)
    if not engines:
        reasons = numbered(f"{name}: {reason}" for name, reason in not_run.items())
        raise EngineError(f"no engine of {directory} can run on this machine, so nothing was compared:{reasons}")
    name, reference = open_reference(bundle)
    line.show("comparing tensors")
    others = {other: engine for other, engine in engines.items() if other != name}
    tensors = compare_tensors(bundle.manifest, reference, others) if others else {}
    prompts = seeded_prompts(bundle.manifest) + texts
    compared = {}
    for other, engine in engines.items():
        # What is lossless is decoding on one set of weights with one arithmetic: products that round their inputs are an engine's own.
        own = engine if bundle.manifest.quantization is not None else reference
        line.show(f"decoding {tokens} tokens on {other}")
        compared[other] = compare_tokens(bundle.manifest, own, engine, prompts, plain_tokens(own, prompts, tokens))
    difference = None
    if checkpoints is not None:
        line.show("comparing with the float target")
        difference = compare_with_float(bundle, next(iter(engines.values())), *checkpoints, texts or prompts)
    return Report(bundle, name, tensors, compared, not_run, difference)


def _encoded(bundle: Bundle, prompts: Iterable[Prompt]) -> list[list[int]]:
    """Return prompts as token ids, cut where a sequence could not go on behind them. Raises RequestError."""
    from dspark.runtime.tokenizer import load_tokenizer

    tokenizer, encoded, longest = load_tokenizer(bundle.directory), [], max(1, bundle.manifest.limits.max_seq_len // 2)
    for number, prompt in enumerate(prompts, 1):
        if not isinstance(prompt, str):
            ids = [token for token in prompt if isinstance(token, int) and 0 <= token < bundle.manifest.target.vocab_size]
            if not ids or len(ids) != len(prompt):
                raise RequestError(f"prompt {number}: expected text, or token ids below {bundle.manifest.target.vocab_size}")
        elif tokenizer is None:
            raise RequestError(f"prompt {number} is text, and this bundle has no tokenizer: give token ids")
        else:
            ids = tokenizer.encode(prompt)
        encoded.append(ids[:longest])
    return [ids for ids in encoded if ids]


def _table(report: Report) -> str:
    """Return a line for each graph of each engine, with the output that came closest to its tolerance, and one for its tokens."""
    manifest = report.bundle.manifest
    lines = [f"{report.bundle.directory}: {manifest.dtype}; the reference is {report.reference} in float32"]
    for name, tokens in report.tokens.items():
        tensors = report.tensors.get(name)
        rows = [] if tensors is None else [_measured(row) for row in tensors.worst()]
        if tensors is None:
            rows.append('     tensors not compared: it is the reference; pip install "dspark[export]" to compare it with torch')
        near = sum(divergence.is_near_tie for divergence in tokens.divergences)
        real = len(tokens.divergences) - near
        counts = f"{tokens.compared} greedy tokens, speculative against plain: {real} mismatches, {near} near ties"
        rows += [f"{_verdict(tokens.passed)} {counts}", *(_divergence(d, manifest.dtype) for d in tokens.divergences)]
        lines += [name, *(f"  {row}" for row in rows)]
    lines += [f"{name}\n  not run: {reason}" for name, reason in report.not_run.items()]
    if report.difference is not None:
        d = report.difference
        lines.append(
            f"quantised against float32 target, {d.positions} positions\n  logits differ by {d.mean_logit:.3f} in the mean, "
            f"{d.max_logit:.2f} at most, of {d.largest:.1f}\n  same most likely token at {d.same_tokens:.1%}\n"
            f"  perplexity {d.perplexity:.3f}, float32 {d.float_perplexity:.3f}"
        )
    return "\n".join(lines)


def _verdict(passed: bool) -> str:
    return "ok  " if passed else "FAIL"


def _measured(row: Measured) -> str:
    ties = f", {row.near_ties} near ties" if row.near_ties else ""
    allowed = f"{row.difference:.1e} of {row.tolerance:.1e}" if row.tolerance else f"{row.difference:g}, exact expected"
    return f"{_verdict(row.passed)} {row.graph:<15} {row.output:<24} {allowed} ({row.step}{ties})"


def _divergence(d: Divergence, dtype: str) -> str:
    kind = "near tie" if d.is_near_tie else "MISMATCH"
    return (
        f"     {kind}: prompt {d.prompt}, token {d.position}: expected {d.expected}, got {d.got}; the reference's top-2 gap is {d.gap:.2e} "
        f"({d.gap_in_ulps:.1f} {dtype} ULP), {d.lead:.2e} to the token got, near up to {d.limit:.2e}"
    )


def _as_json(report: Report) -> dict[str, Any]:
    engines = {}
    for name, tokens in report.tokens.items():
        tensors = report.tensors.get(name)
        rows = [] if tensors is None else [_finite(dataclasses.asdict(row)) for row in tensors.measured.values()]
        divergences = [_finite(dataclasses.asdict(d)) | {"near_tie": d.is_near_tie} for d in tokens.divergences]
        passed = tokens.passed and (tensors is None or tensors.passed)
        engines[name] = {"passed": passed, "tensors": rows, "tokens": {"compared": tokens.compared, "divergences": divergences}}
    return {
        "bundle": str(report.bundle.directory),
        "dtype": report.bundle.manifest.dtype,
        "reference": report.reference,
        "passed": report.passed,
        "engines": engines,
        "not_run": dict(report.not_run),
        "difference": None if report.difference is None else dataclasses.asdict(report.difference),
    }


def _finite(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields with infinities and NaN as text, which JSON has no numbers for."""
    return {key: str(value) if isinstance(value, float) and not math.isfinite(value) else value for key, value in fields.items()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dspark-verify", description="Compare every engine of a bundle that runs on this machine, tensor by tensor and token by token."
    )
    parser.add_argument("--version", action="version", version=f"dspark {version('dspark')}")
    parser.add_argument("bundle", type=Path, help="bundle directory made by dspark-export")
    parser.add_argument("--tokens", type=positive, default=64, metavar="N", help="greedy tokens of each prompt (default 64)")
    parser.add_argument("--prompt-file", type=Path, help="prompts instead of built-in texts: a text, or .jsonl with ids or text")
    parser.add_argument(
        "--checkpoints",
        type=Path,
        nargs=2,
        metavar=("TARGET", "DRAFTER"),
        help="of a quantised bundle, print how far its target is from the float32 one of these",
    )
    parser.add_argument("--json", action="store_true", help="print machine-readable results, every output included")
    return parser


if __name__ == "__main__":
    sys.exit(main())
