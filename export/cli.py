"""`dspark-export TARGET DRAFTER OUTPUT`: command line of the exporter.

Knows arguments, messages and exit codes: 0 done, 1 verification failed, 2 refused, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import signal
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.runtime.bundle import DTYPES, WEIGHT_BITS, Manifest
from dspark.runtime.engines import FLAVOURS
from dspark.runtime.errors import DSparkError, ExportError
from dspark.runtime.terminal import ProgressLine

if TYPE_CHECKING:
    from dspark.export.build import BuildOptions


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.ERROR if args.quiet else logging.WARNING)
    line = ProgressLine(sys.stderr, enabled=not args.quiet)
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that unfinished files are removed
    try:
        return _run(args, line)
    except DSparkError as error:
        line.clear()
        print(f"dspark-export: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        line.clear()
        remedy = ": choose an output with more room" if error.errno == errno.ENOSPC else ""
        print(f"dspark-export: {error}{remedy}; no unfinished files are left", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        line.clear()
        print("dspark-export: interrupted; no unfinished files are left", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)


def _run(args: argparse.Namespace, line: ProgressLine) -> int:
    began = time.perf_counter()
    line.show("loading torch")
    try:
        from dspark.export.bundle import ExportOptions, Progress, export_bundle
    except ImportError as error:
        raise ExportError(f'the exporter\'s packages are missing ({error}): pip install "dspark[export]"') from error
    names = set(ExportOptions.__dataclass_fields__)
    build = _build_options(args)
    if args.verify and (args.dtype == "bf16" or (build is not None and args.dtype == "auto")):
        raise ExportError("--verify runs on the CPU, which has no bf16 kernels: verify an export with --dtype fp32 instead")
    options = ExportOptions(**{name: value for name, value in vars(args).items() if name in names}, build=build)
    progress = Progress(line.show, lambda done, total: line.show(f"writing weights {done / total:4.0%} of {total / 1e9:.2f} GB"))
    if args.verbose:
        progress = Progress(lambda text: line.log(f"{time.perf_counter() - began:6.1f} s  {text}"), progress.weights)
    manifest = export_bundle(args.target, args.drafter, args.output, options, progress)
    seconds = time.perf_counter() - began
    report, failed = None, False
    if args.verify:
        line.show("verifying against torch")
        from dspark.export.verify import verify_bundle

        report = verify_bundle(args.output, args.target, args.drafter)
        failed = any(not row.passed for row in report)
    line.clear()
    if args.json:
        summary = {"output": str(args.output), "seconds": round(seconds, 2), "manifest": json.loads(manifest.to_json())}
        if report is not None:
            summary["verify"] = [vars(row) | {"passed": row.passed} for row in report]
        print(json.dumps(summary, indent=2))
    elif not args.quiet:
        print(_summary(args.output, manifest, seconds))
        for row in report or ():
            print(row)
    return 1 if failed else 0


def _build_options(args: argparse.Namespace) -> BuildOptions | None:
    """Return what the arguments say of engines; None without a TensorRT backend. Raises ConfigError or EngineError."""
    from dspark.export.build import BuildOptions, parse_capabilities, parse_pools
    from dspark.export.profiles import KINDS, parse_shapes

    texts = {kind: getattr(args, kind) for kind in KINDS}
    if args.backend == "onnxruntime":
        named = [*(f"--{kind}" for kind in KINDS if texts[kind]), *(f for f, value in _engine_arguments(args).items() if value)]
        if named:
            raise ExportError(f"{', '.join(named)} are about engines: add --backend tensorrt or tensorrt-rtx")
        return None
    return BuildOptions(
        flavour=args.backend,
        compute_capabilities=parse_capabilities(args.compute_capability) if args.compute_capability else (),
        shapes=tuple((kind, parse_shapes(text)) for kind, text in texts.items() if text),
        workspace=parse_pools(args.memPoolSize) if args.memPoolSize else None,
        optimization_level=args.builderOptimizationLevel,
        timing_cache=args.timingCacheFile,
        hardware_compatibility=args.hardwareCompatibilityLevel or "none",
        version_compatible=args.versionCompatible,
        strip_weights=args.strip_weights,
    )


def _engine_arguments(args: argparse.Namespace) -> dict[str, object]:
    names = ("compute_capability", "memPoolSize", "builderOptimizationLevel", "timingCacheFile", "hardwareCompatibilityLevel")
    return {f"--{name.replace('_', '-')}": getattr(args, name) for name in (*names, "versionCompatible", "strip_weights")}


def _summary(output: Path, manifest: Manifest, seconds: float) -> str:
    written = sum(record.size for record in manifest.files.values())
    place = f"by reference from {manifest.weights.root}" if manifest.weights.root else "in the bundle"
    dtype = manifest.dtype if manifest.quantization is None else f"{manifest.dtype} with quantised weights"
    return (
        f"{output}: {dtype}, {manifest.num_speculative_tokens} proposals a round, window {manifest.window}, "
        f"weights {place}; {written / 1e6:.1f} MB written in {seconds:.1f} s"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dspark-export", description="Export a Qwen3 target and its DSpark drafter to a bundle of ONNX graphs."
    )
    parser.add_argument("--version", action="version", version=f"dspark {version('dspark')}")
    parser.add_argument("target", type=Path, help="Hugging Face directory of the Qwen3 target")
    parser.add_argument("drafter", type=Path, help="directory of its DSpark drafter")
    parser.add_argument("output", type=Path, help="bundle directory to write")
    models = parser.add_argument_group("model")
    models.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="dtype of the graphs (default auto: fp32, for the CPU; the checkpoint's for engines)",
    )
    models.add_argument(
        "--weights",
        choices=WEIGHT_BITS,
        default="float",
        help="quantise large weights, for ONNX Runtime on the CPU (default float: do not)",
    )
    models.add_argument("--drafter-weights", choices=WEIGHT_BITS, help="the same for the drafter's own (default: as --weights)")
    models.add_argument(
        "--group-size", type=int, metavar="N", help="quantised weights that share a scale: 16, 32, 64, 128, 256 (default 32)"
    )
    models.add_argument(
        "--markov-topk", type=int, metavar="K", help="propose from the K most likely tokens before the Markov correction (default: all)"
    )
    models.add_argument(
        "--num-speculative-tokens", type=int, metavar="N", help="proposals a round, 1..block (default: the drafter's block)"
    )
    models.add_argument(
        "--ctx-window", type=_window, default=2048, metavar="W|full", help="newest positions the drafter sees (default 2048)"
    )
    models.add_argument("--mask-token-id", type=int, metavar="ID", help="mask token (default: from the drafter's config.json)")
    models.add_argument("--debug-outputs", action="store_true", help="add hidden states and corrected logits of the block as outputs")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-batch-size", type=int, default=8, metavar="B", help="most requests at once (default 8)")
    limits.add_argument(
        "--max-seq-len", type=int, metavar="S", help="most tokens of prompt and output (default: the target's position limit)"
    )
    limits.add_argument("--max-chunk", type=int, default=512, metavar="N", help="most prompt tokens in one step (default 512)")
    files = parser.add_argument_group("files")
    files.add_argument("--copy-weights", action="store_true", help="copy weights into the bundle instead of referring to the checkpoints")
    files.add_argument("--check-finite", action="store_true", help="read all weights and refuse infinities and NaN")
    files.add_argument("--opset", type=int, default=24, help="ONNX opset, 24 or 25 (default 24)")
    files.add_argument("--overwrite", action="store_true", help="replace a bundle that is already at OUTPUT")
    engines = parser.add_argument_group("engines", "spelled as trtexec spells them where it has the option")
    engines.add_argument(
        "--backend", choices=("onnxruntime", *FLAVOURS), default="onnxruntime", help="also build engines (default onnxruntime: none)"
    )
    engines.add_argument(
        "--compute-capability", metavar="8.9,12.0", help="devices to build for (default: the one present); tensorrt-rtx needs none present"
    )
    for kind, what in (("minShapes", "least"), ("optShapes", "most usual"), ("maxShapes", "largest")):
        engines.add_argument(f"--{kind}", metavar="NAME:1x8,..", help=f"{what} shapes of a round (default: from the limits)")
    engines.add_argument("--memPoolSize", metavar="workspace:SIZE", help="most scratch memory, in MiB or with a suffix B, K, M, G")
    engines.add_argument("--builderOptimizationLevel", type=int, choices=range(6), help="time the builder may take, 0..5")
    engines.add_argument("--timingCacheFile", type=Path, metavar="FILE", help="timings to read and to add to")
    engines.add_argument(
        "--hardwareCompatibilityLevel",
        choices=("none", "ampere_plus", "same_compute_capability"),
        help="other devices an engine may run on",
    )
    engines.add_argument("--versionCompatible", action="store_true", help="engines that later versions of TensorRT load")
    engines.add_argument("--strip-weights", action="store_true", help="engines without weights, for tools that refit them")
    output = parser.add_argument_group("output")
    output.add_argument("--verify", action="store_true", help="compare the bundle with torch on random input; exit 1 on a difference")
    output.add_argument("--json", action="store_true", help="print a machine-readable summary")
    output.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    output.add_argument("-v", "--verbose", action="store_true", help="print each step with its time")
    return parser


def _window(text: str) -> int | str:
    try:
        return text if text == "full" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of positions, or full") from None


if __name__ == "__main__":
    sys.exit(main())
