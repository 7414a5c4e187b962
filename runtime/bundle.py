"""The bundle format: its manifest, and reading a bundle with every check before anything is loaded.

Owns the format: the exporter writes through the classes below. Knows files and numbers. Does not know how a graph is run.
All faults of a manifest or of the files are reported in one error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dspark.plugins.contract import VERSION as OPS_CONTRACT
from dspark.runtime.config import DrafterConfig, TargetConfig
from dspark.runtime.engines import EngineRecord, engine_path, record_faults
from dspark.runtime.errors import BundleError, LimitError, numbered
from dspark.runtime.graphs import GRAPHS, cache_capacity, ring_capacity
from dspark.runtime.parse import parse

FORMAT_VERSION = 4
MANIFEST = "manifest.json"
WEIGHTS = "weights/model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
DTYPES = ("fp32", "fp16", "bf16")
WEIGHT_BITS = {"float": None, "int8": 8, "int4": 4}
"""How large weights may be kept, with the bits of those that are quantised."""
GROUP_SIZES = (16, 32, 64, 128, 256)
"""Weights that share a scale: what ONNX Runtime's MatMulNBits takes."""
MARKOV_BITS = 8
"""4 bits in the Markov head's output changed 29-61 % of the drafted tokens of random pairs, 8 bits none."""

_HASHED_AT_LOAD = 64 << 20
"""Files of the bundle above this size are checked by size, header and samples when loading; `dspark inspect --hash` reads them whole."""
_SAMPLE = 1 << 16


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a large file without reading it whole: size, sha256 of its first and last and three inner 64 KiB."""

    size: int
    sample_sha256: str


@dataclass(frozen=True)
class FileRecord:
    """A file of the bundle: its fingerprint and the sha256 of all of it."""

    size: int
    sample_sha256: str
    sha256: str


@dataclass(frozen=True)
class CheckpointRecord:
    """A checkpoint a bundle was made from: sha256 of its config.json, fingerprint of each weight file by file name."""

    config_sha256: str
    files: dict[str, Fingerprint]


@dataclass(frozen=True)
class Weights:
    """Where initializers lie: in the bundle (`root` null), or in files below `root`, each with its fingerprint."""

    root: str | None
    files: dict[str, Fingerprint]


@dataclass(frozen=True)
class Quantization:
    """Weight-only quantisation: bits of the layers and head of each model and of the Markov head's output, null where they are float."""

    group_size: int
    target_bits: int | None
    drafter_bits: int | None
    markov_bits: int | None


@dataclass(frozen=True)
class Limits:
    """Largest batch, sequence (tokens of prompt and output) and prefill chunk."""

    max_batch_size: int
    max_seq_len: int
    max_chunk: int

    def seq_len(self, asked: int | None) -> int:
        """Return the longest sequence when `asked` is wanted (None: all that is allowed). Raises LimitError."""
        longest = self.max_seq_len if asked is None else asked
        if not 2 <= longest <= self.max_seq_len:
            raise LimitError(f"max_seq_len is {longest}, the bundle allows 2..{self.max_seq_len}")
        return longest


@dataclass(frozen=True)
class Conventions:
    """What the numbers mean, spelled out for readers of the file and for other tools."""

    proposals: int
    verify_width: int
    positions: str = "absolute, 0-based; the anchor of a draft is at position `total`"
    taps: str = "outputs of these target layers, in this order, not normed; -1 is the embedding's output"
    first_row: str = "row 0 of the block, the anchor's own row, is the first prediction"


@dataclass(frozen=True)
class Manifest:
    """Everything a runtime must know of a bundle besides its graphs and weights."""

    format_version: int
    dspark_version: str
    ops_contract: int
    opset: int
    dtype: str
    target: TargetConfig
    drafter: DrafterConfig
    num_speculative_tokens: int
    markov_topk: int | None
    """Most likely tokens of a row before the Markov correction that a proposal is chosen from; null: all."""
    window: int
    ring_capacity: int
    cache_capacity: int
    limits: Limits
    conventions: Conventions
    debug_outputs: bool
    weights: Weights
    quantization: Quantization | None
    checkpoints: dict[str, CheckpointRecord]
    files: dict[str, FileRecord]
    engines: dict[str, EngineRecord]
    """Compiled engines by the name of their directory below `engines/`."""

    def to_json(self) -> str:
        """Return the manifest as it is written; equal manifests give equal bytes."""
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"


@dataclass(frozen=True)
class Bundle:
    """A bundle directory that passed every check."""

    directory: Path
    manifest: Manifest

    def graph_path(self, graph: str) -> Path:
        """Path of a graph's ONNX file."""
        return self.directory / f"{graph}.onnx"

    def engine_path(self, engine: str, graph: str) -> Path:
        """Path of a graph's compiled engine in the directory `engine` of the manifest."""
        return self.directory / engine_path(engine, graph)


def load_bundle(directory: Path | str, *, references: bool = True) -> Bundle:
    """Read and check a bundle, the checkpoint files it refers to included unless `references` is false.

    Raises BundleError with every fault found at the first stage that has any.
    """
    directory = Path(directory)
    path = directory / MANIFEST
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise BundleError(f"{path} does not exist: expected a bundle directory made by dspark-export") from None
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is not JSON ({error}): export the bundle again") from None
    manifest = _manifest_from_json(raw, path)
    _raise(directory, _value_faults(manifest))
    _raise(directory, [*_file_faults(directory, manifest), *(reference_faults(manifest) if references else [])])
    return Bundle(directory, manifest)


def fingerprint(path: Path) -> Fingerprint:
    """Return the fingerprint of a file: five reads, whatever its size."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        for part in range(5):
            handle.seek(max(0, size - _SAMPLE) * part // 4)
            digest.update(handle.read(_SAMPLE))
    return Fingerprint(size, digest.hexdigest())


def file_sha256(path: Path) -> str:
    """Return the sha256 of a whole file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def record_file(path: Path) -> FileRecord:
    """Return what the manifest keeps of a file of the bundle."""
    quick = fingerprint(path)
    return FileRecord(quick.size, quick.sample_sha256, file_sha256(path))


def state_bytes(manifest: Manifest) -> tuple[int, int]:
    """Return the bytes of rings and of key/value caches that one request takes at full capacity."""
    itemsize = 4 if manifest.dtype == "fp32" else 2
    ring, cache = (
        2 * config.num_hidden_layers * config.num_key_value_heads * rows * config.head_dim * itemsize
        for config, rows in ((manifest.drafter, manifest.ring_capacity), (manifest.target, manifest.cache_capacity))
    )
    return ring, cache


def full_hash_faults(bundle: Bundle) -> list[str]:
    """Hash every file of the bundle whole and return what differs."""
    records = bundle.manifest.files.items()
    return [f"{name} has changed" for name, record in records if file_sha256(bundle.directory / name) != record.sha256]


def _raise(directory: Path, faults: list[str]) -> None:
    if faults:
        raise BundleError(f"{directory} is not a usable bundle:{numbered(faults)}")


def _manifest_from_json(raw: Any, path: Path) -> Manifest:
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version != FORMAT_VERSION:
        raise BundleError(f"{path} has format version {version!r}, this dspark reads {FORMAT_VERSION}: export the bundle again")
    faults: list[str] = []
    manifest = parse(Manifest, raw, "manifest", faults)
    if faults:
        raise BundleError(f"{path} does not hold what a manifest must:{numbered(faults)}")
    assert isinstance(manifest, Manifest)
    return manifest


def _value_faults(m: Manifest) -> list[str]:
    k, block = m.num_speculative_tokens, m.drafter.block_size
    longest = min(m.window, m.limits.max_seq_len)
    checks = [
        (m.ops_contract == OPS_CONTRACT, f"ops_contract is {m.ops_contract}, this dspark has {OPS_CONTRACT}: export again"),
        (m.dtype in DTYPES, f"dtype is {m.dtype!r}, expected one of {', '.join(DTYPES)}"),
        (1 <= k <= block, f"num_speculative_tokens is {k}, expected 1..{block} (the block)"),
        (
            (m.conventions.proposals, m.conventions.verify_width) == (k, k + 1),
            f"conventions say {m.conventions.proposals} proposals and verify width {m.conventions.verify_width}; "
            f"num_speculative_tokens {k} means {k} and {k + 1}",
        ),
        (m.window >= block + 2, f"window is {m.window}, expected at least {block + 2} (block + 2)"),
        (
            m.ring_capacity == ring_capacity(longest, k),
            f"ring_capacity is {m.ring_capacity}, expected {ring_capacity(longest, k)}",
        ),
        (
            m.cache_capacity == cache_capacity(m.limits.max_seq_len, k),
            f"cache_capacity is {m.cache_capacity}, expected {cache_capacity(m.limits.max_seq_len, k)}",
        ),
        (min(dataclasses.astuple(m.limits)) >= 1, f"limits are {m.limits}, expected at least 1 each"),
        (
            0 <= m.drafter.mask_token_id < m.drafter.vocab_size,
            f"mask_token_id {m.drafter.mask_token_id} is outside the vocabulary",
        ),
        (m.target.vocab_size == m.drafter.vocab_size, "the vocabularies of target and drafter differ"),
        (
            m.markov_topk is None or (m.drafter.markov_rank > 0 and 1 <= m.markov_topk <= m.drafter.vocab_size),
            f"markov_topk is {m.markov_topk}, expected null, or 1..{m.drafter.vocab_size} where there is a Markov head",
        ),
    ]
    faults = [fault for holds, fault in checks if not holds]
    needed = [f"{graph}.onnx" for graph in GRAPHS] + ([WEIGHTS] if m.weights.root is None else [])
    needed += [engine_path(name, graph) for name in m.engines for graph in GRAPHS]
    faults += [f"files lacks {name}" for name in needed if name not in m.files]
    faults += [] if m.quantization is None else _quantization_faults(m, m.quantization)
    for name, record in m.engines.items():
        faults += record_faults(name, record, GRAPHS, m.ring_capacity, m.cache_capacity)
    if m.weights.root is not None and not Path(m.weights.root).is_absolute():
        faults.append(f"weights.root is {m.weights.root!r}, expected an absolute path")
    inside = [*m.files, *m.weights.files]
    faults += [f"path {name!r} leaves its folder" for name in inside if not _is_inside(name)]
    return faults


def _quantization_faults(m: Manifest, q: Quantization) -> list[str]:
    bits = (q.target_bits, q.drafter_bits, q.markov_bits)
    walks_all = q.drafter_bits is not None and m.drafter.markov_rank > 0 and m.markov_topk is None
    markov_bits = MARKOV_BITS if walks_all else None
    checks = [
        (q.group_size in GROUP_SIZES, f"quantization.group_size is {q.group_size}, expected one of {GROUP_SIZES}"),
        (all(b in WEIGHT_BITS.values() for b in bits), f"quantization has bits {bits}, expected 4, 8 or null each"),
        (
            q.target_bits is not None or q.drafter_bits is not None,
            "quantization has neither target_bits nor drafter_bits, expected null for a bundle that is not quantised",
        ),
        (q.markov_bits == markov_bits, f"quantization.markov_bits is {q.markov_bits}, expected {markov_bits}"),
        (m.dtype == "fp32", f"dtype is {m.dtype!r} and the weights are quantised, expected 'fp32'"),
        (m.weights.root is None, "weights.root is set and the weights are quantised, expected null: they lie in the bundle"),
        (not m.engines, "engines of quantised weights, expected none: MatMulNBits is ONNX Runtime's own operator"),
    ]
    return [fault for holds, fault in checks if not holds]


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "\\" not in name


def _file_faults(directory: Path, manifest: Manifest) -> list[str]:
    faults = []
    for name, record in manifest.files.items():
        path = directory / name
        if not path.is_file():
            faults.append(f"{name} is missing")
        elif path.is_symlink() or not path.resolve().is_relative_to(directory.resolve()):
            faults.append(f"{name} is a link out of the bundle")
        elif (size := path.stat().st_size) != record.size:
            faults.append(f"{name} has {size} bytes, expected {record.size}")
        elif record.size > _HASHED_AT_LOAD:
            if fingerprint(path).sample_sha256 != record.sample_sha256:
                faults.append(f"{name} has changed: export the bundle again")
        elif file_sha256(path) != record.sha256:
            faults.append(f"{name} has changed: export the bundle again")
    return faults


def reference_faults(manifest: Manifest) -> list[str]:
    """Return what is wrong with the checkpoint files that a bundle refers to."""
    if manifest.weights.root is None:
        return []
    faults = []
    for name, expected in manifest.weights.files.items():
        path = Path(manifest.weights.root) / name
        if not path.is_file():
            faults.append(f"checkpoint file {path} is missing: put it back, or export again with --copy-weights")
        elif path.resolve() != path:
            faults.append(f"checkpoint file {path} is behind a link, which ONNX Runtime does not open: export again")
        elif fingerprint(path) != expected:
            faults.append(f"checkpoint file {path} is not the one the bundle was exported from: export again")
    return faults
