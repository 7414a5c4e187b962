"""Where a bundle's weights lie: by reference in the checkpoints' own files, or converted or copied once into the bundle.

Knows files, dtypes and offsets. Does not know the graphs: it hands out tensors by parameter name. Never holds more than a few
million elements of any weight in memory.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from dspark.export.checkpoint import STORED_DTYPES, StoredTensor
from dspark.export.layers import inverse_frequencies
from dspark.export.pair import SHARED, Pair
from dspark.runtime.bundle import WEIGHTS, fingerprint
from dspark.runtime.bundle import Weights as WeightsRecord
from dspark.runtime.config import TransformerConfig
from dspark.runtime.errors import CheckpointError, ExportError

WANTED = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
_IR_DTYPES = {"F32": ir.DataType.FLOAT, "F16": ir.DataType.FLOAT16, "BF16": ir.DataType.BFLOAT16}
_HEADER_ALIGNMENT = 4096  # data begins on a page
_INLINED = 1 << 16  # bytes of a tensor; all such together at most a hundredth of the weights


@dataclass(frozen=True)
class Place:
    """Where a weight lies for the graphs: a location below the root, and its bytes there."""

    location: str
    offset: int
    length: int
    dtype: str


class Weights:
    """The weights of a pair for one export.

    `tensors` maps a weight's unique name (`target.…`, `drafter.…`) to its stored tensor; a weight shared by both models, or by a
    tied embedding and head, has one name.
    """

    def __init__(self, pair: Pair, dtype: str, *, copy: bool) -> None:
        self.dtype = WANTED[dtype]
        self.pair = pair
        every = [*pair.target_tensors.values(), *pair.drafter_tensors.values()]
        self.converted = not _can_inline([tensor for tensor in every if tensor.dtype != self.dtype], every)
        self.inside = copy or self.converted
        self._names: dict[str, dict[str, str]] = {"target": {}, "drafter": {}}
        self.tensors: dict[str, StoredTensor] = {}
        for model, tensors in (("target", pair.target_tensors), ("drafter", pair.drafter_tensors)):
            for name, tensor in tensors.items():
                unique = self._shared_name(name, tensor) or f"{model}.{name}"
                self._names[model][name] = unique
                self.tensors[unique] = tensor
        self._root = None if self.inside else common_root([tensor.file for tensor in self.tensors.values()])
        self._places = self._inside_places() if self._root is None else self._reference_places(self._root)

    def _shared_name(self, name: str, tensor: StoredTensor) -> str | None:
        """Return the name of the weight already known that holds the same data, if any.

        The published drafters carry byte copies of the target's embedding and head: worth a comparison where the alternative is
        a second copy on disk.
        """
        for known, other in self.tensors.items():
            if other == tensor:
                return known
        if self.inside and name in SHARED:
            for known in ("target.embed_tokens.weight", "target.lm_head.weight"):
                if known in self.tensors and self.tensors[known].same_content(tensor):
                    return known
        return None

    def resolver(self, model: str, config: TransformerConfig) -> Callable[[str], ir.TensorProtocol]:
        """Return the function that gives a graph of `model` its tensor for a parameter name."""

        def weight(parameter: str) -> ir.TensorProtocol:
            if parameter == "rotary.inv_freq":
                return ir.tensor(inverse_frequencies(config.head_dim, config.rope_theta).numpy(), name=parameter)
            name = self._names[model][parameter]
            if not self.inside and self.tensors[name].dtype != self.dtype:
                return self._inline(name)
            place = self._places[name]
            shape = ir.Shape(self.tensors[name].shape)
            dtype = _IR_DTYPES[place.dtype]
            return ir.ExternalTensor(place.location, place.offset, place.length, dtype, shape=shape, name=name)

        return weight

    def _inline(self, name: str) -> ir.TensorProtocol:
        """Return a small weight of another dtype as data of the graph itself: a float32 norm copies no 16 GB of bf16."""
        tensor = self.tensors[name]
        values = np.concatenate([_convert(chunk, self.dtype, tensor) for chunk in tensor.chunks()]).reshape(tensor.shape)
        return ir.Tensor(values, dtype=_IR_DTYPES[self.dtype], name=name)

    def record(self) -> WeightsRecord:
        """Return what the manifest says of the weights."""
        if self._root is None:
            return WeightsRecord(None, {})
        files = sorted({tensor.file.resolve() for tensor in self.tensors.values()})
        return WeightsRecord(str(self._root), {file.relative_to(self._root).as_posix(): fingerprint(file) for file in files})

    def write(self, directory: Path, progress: Callable[[int, int], None]) -> None:
        """Write the weights that lie inside the bundle; `progress` is told bytes done and bytes in all."""
        if not self.inside:
            return
        header, order = self._layout()
        total = sum(self._places[name].length for name in order)
        free = shutil.disk_usage(directory).free
        if total > free:
            raise ExportError(
                f"the weights take {total / 1e9:.2f} GB, {directory.parent} has {free / 1e9:.2f} GB free: choose another output"
            )
        path, done = directory / WEIGHTS, 0
        path.parent.mkdir(parents=True)
        with path.open("wb") as out:
            out.write(header)
            for name in order:
                tensor = self.tensors[name]
                for chunk in tensor.chunks():
                    converted = _convert(chunk, self.dtype, tensor)
                    out.write(converted.view(np.uint8))
                    done += converted.nbytes
                    progress(done, total)
            out.flush()
            os.fsync(out.fileno())

    def _layout(self) -> tuple[bytes, list[str]]:
        """Return the safetensors header and the order of the tensors: largest first, so that each begins well aligned."""
        size = STORED_DTYPES[self.dtype].itemsize
        lengths = {name: size * int(np.prod(t.shape, dtype=np.int64)) for name, t in self.tensors.items()}
        order = sorted(lengths, key=lambda name: (-lengths[name], name))
        entries, begin = {}, 0
        for name in order:
            end = begin + lengths[name]
            entries[name] = {"dtype": self.dtype, "shape": list(self.tensors[name].shape), "data_offsets": [begin, end]}
            begin = end
        raw = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
        raw += b" " * (-(8 + len(raw)) % _HEADER_ALIGNMENT)
        return struct.pack("<Q", len(raw)) + raw, order

    def _inside_places(self) -> dict[str, Place]:
        header, order = self._layout()
        places, offset, size = {}, len(header), STORED_DTYPES[self.dtype].itemsize
        for name in order:
            length = size * int(np.prod(self.tensors[name].shape, dtype=np.int64))
            places[name] = Place(WEIGHTS, offset, length, self.dtype)
            offset += length
        return places

    def _reference_places(self, root: Path) -> dict[str, Place]:
        return {
            name: Place(tensor.file.resolve().relative_to(root).as_posix(), tensor.offset, tensor.length, tensor.dtype)
            for name, tensor in self.tensors.items()
        }


def _can_inline(odd: Sequence[StoredTensor], every: Sequence[StoredTensor]) -> bool:
    """Whether tensors of another dtype are few and small enough to be data of the graphs."""
    size = sum(tensor.length for tensor in odd)
    return all(tensor.length <= _INLINED for tensor in odd) and size * 100 <= sum(tensor.length for tensor in every)


def common_root(files: list[Path]) -> Path:
    """Return the folder that holds all files, links resolved: ONNX Runtime opens no weight through a link or above one folder."""
    parents = {str(file.resolve().parent) for file in files}
    try:
        root = Path(os.path.commonpath(parents))
    except ValueError:
        root = Path(files[0].resolve().anchor)
    if root == Path(root.anchor):
        raise ExportError(
            f"the checkpoints' files share no folder below {root} ({', '.join(sorted(parents))}), so one graph cannot refer to both: "
            "put them under one folder, or pass --copy-weights"
        )
    return root


def check_finite(tensors: Mapping[str, StoredTensor]) -> None:
    """Read every weight; raise CheckpointError naming those that hold infinities or NaN."""
    bad = [name for name, tensor in tensors.items() if not tensor.is_finite()]
    if bad:
        raise CheckpointError(f"weights with infinite or not-a-number entries: {', '.join(bad)}")


def _convert(chunk: np.ndarray, wanted: str, tensor: StoredTensor) -> np.ndarray:
    if tensor.dtype == wanted:
        return chunk
    if wanted == "F16":
        with np.errstate(over="ignore"):
            converted = chunk.astype(np.float32).astype(np.float16)
        if np.isinf(converted).any() and np.isfinite(chunk.astype(np.float32)).all():
            raise ExportError(f"{tensor.name} holds values beyond float16's 65504: export with --dtype fp32 or bf16")
        return converted
    return chunk.astype(np.float32).astype(STORED_DTYPES[wanted])
