"""Safetensors checkpoints on disk: where each tensor lies, and whether all tensors of a model are there.

Knows files, headers and offsets; reads no tensor data except on request. Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dspark.export.configs import read_json
from dspark.runtime.errors import CheckpointError, numbered

STORED_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
"""The dtypes a weight may be stored in."""

_MAX_HEADER = 100_000_000  # the limit of the safetensors library
_CHUNK = 1 << 22  # elements


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place in a safetensors file; `offset` counts from the file's first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    length: int

    def chunks(self, row: int = 1) -> Iterator[NDArray[np.generic]]:
        """Yield the elements in order, a few million at a time, whole rows of `row` elements."""
        dtype = STORED_DTYPES[self.dtype]
        elements = max(row, _CHUNK // row * row)
        with self.file.open("rb") as handle:
            handle.seek(self.offset)
            left = self.length
            while left:
                wanted = min(left, elements * dtype.itemsize)
                data = handle.read(wanted)
                if len(data) < wanted:
                    raise CheckpointError(f"{self.file} ended inside tensor {self.name}: download the file again")
                left -= len(data)
                yield np.frombuffer(data, dtype)

    def is_finite(self) -> bool:
        """Whether no element is infinite or not a number."""
        return all(np.isfinite(chunk.astype(np.float32)).all() for chunk in self.chunks())

    def same_content(self, other: StoredTensor) -> bool:
        """Whether both hold the same bytes in the same shape and dtype; stops reading at the first difference."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        pairs = zip(self.chunks(), other.chunks(), strict=True)
        return all(a.tobytes() == b.tobytes() for a, b in pairs)


@dataclass(frozen=True)
class Checkpoint:
    """A model directory: its safetensors files and the tensors in them."""

    directory: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read the headers of a model directory with one file or several shards. Raises CheckpointError naming the bad file."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
            raise CheckpointError(f"{index} has no weight_map of file names: download the file again")
        files = [directory / name for name in sorted(set(weight_map.values()))]
    elif single.exists():
        weight_map, files = None, [single]
    else:
        raise CheckpointError(f"{directory} holds neither {single.name} nor {index.name}: expected a safetensors checkpoint")
    absent = [str(file) for file in files if not file.exists()]
    if absent:
        raise CheckpointError(f"{index} names files that do not exist:{numbered(absent)}")
    tensors = {tensor.name: tensor for file in files for tensor in read_header(file)}
    lost = sorted(set(weight_map or ()) - set(tensors))
    if lost:
        raise CheckpointError(f"{index} names tensors that its files do not hold:{numbered(lost[:10])}")
    return Checkpoint(directory, tuple(files), tensors)


def read_header(file: Path) -> list[StoredTensor]:
    """Return the tensors of one safetensors file, checked against the file's size."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        prefix = handle.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise CheckpointError(f"{file} is no safetensors file, or is truncated: its header length is {length}, its size {size} bytes")
        raw = handle.read(length)
    try:
        header = json.loads(raw)
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        tensors = [_stored_tensor(name, entry, file, 8 + length) for name, entry in entries]
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is no safetensors file: its header does not parse ({error!r:.200})") from None
    end = max((tensor.offset + tensor.length for tensor in tensors), default=8 + length)
    if end != size:
        raise CheckpointError(f"{file} is {'truncated' if size < end else 'too long'}: {size} bytes, its header says {end}")
    return tensors


def _stored_tensor(name: str, entry: dict[str, Any], file: Path, data_offset: int) -> StoredTensor:
    """Return a header's entry; raises ValueError, KeyError or TypeError where it is malformed."""
    begin, end = entry["data_offsets"]
    sizes = [begin, end, *entry["shape"]]
    if not all(type(size) is int and size >= 0 for size in sizes) or end < begin or not isinstance(entry["dtype"], str):
        raise ValueError(f"{name}: {entry}")
    return StoredTensor(name, entry["dtype"], tuple(entry["shape"]), file, data_offset + begin, end - begin)


def select_tensors(
    checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], *, ignored: Iterable[str] = ()
) -> dict[str, StoredTensor]:
    """Return the expected tensors by name.

    Raises CheckpointError with all that are missing, unexpected, misshaped or of no float dtype.
    """
    found, faults = checkpoint.tensors, []
    for name, shape in expected.items():
        tensor = found.get(name)
        if tensor is None:
            faults.append(f"{name} is missing, expected shape {list(shape)}")
        elif tensor.shape != shape:
            faults.append(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
        elif tensor.dtype not in STORED_DTYPES:
            faults.append(
                f"{name} is stored as {tensor.dtype}, expected {', '.join(STORED_DTYPES)}: quantised checkpoints are not supported"
            )
        elif tensor.length != STORED_DTYPES[tensor.dtype].itemsize * int(np.prod(shape, dtype=np.int64)):
            faults.append(f"{name} holds {tensor.length} bytes, not what its shape {list(shape)} and {tensor.dtype} need")
    ignored = set(ignored)
    unexpected = [n for n in found if n not in expected and n not in ignored and not n.endswith("rotary_emb.inv_freq")]
    faults += [f"{name} is unexpected" for name in sorted(unexpected)]
    if faults:
        more = [f"and {len(faults) - 20} more"] if len(faults) > 20 else []
        raise CheckpointError(f"{checkpoint.directory}: the tensors are not those of its config.json:{numbered(faults[:20] + more)}")
    return {name: found[name] for name in expected}
