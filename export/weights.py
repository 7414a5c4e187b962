"""Where a bundle's weights lie: by reference in the checkpoints' own files, or converted, quantised or copied once into the bundle.

Knows files, dtypes and offsets. Does not know the graphs: it hands out tensors by parameter name. Never holds more than a few
million elements of any weight in memory.

In a quantised bundle a weight is kept in the forms that its graphs need: quantised for a product, as it is stored for a table of which
rows are gathered (an exact row costs nothing, the file is mapped), in float32 for everything else. A tied embedding has two.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from dspark.export.checkpoint import STORED_DTYPES, StoredTensor
from dspark.export.layers import inverse_frequencies
from dspark.export.pair import SHARED, Pair
from dspark.export.quantize import packed_shape, quantize_rows, quantized_bits
from dspark.runtime.bundle import WEIGHTS, Quantization, fingerprint
from dspark.runtime.bundle import Weights as WeightsRecord
from dspark.runtime.config import TransformerConfig
from dspark.runtime.errors import CheckpointError, ExportError

WANTED = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
FILE_DTYPES = STORED_DTYPES | {"U8": np.dtype(np.uint8)}
"""The dtypes of the bundle's weight file: those a weight may be stored in, and that of packed integers."""
GATHERED = ("embed_tokens.weight", "markov_head.markov_w1.weight")
"""Parameters of which rows are gathered."""
Kind = str | int
"""How a weight is kept: in a float dtype, or quantised to a number of bits."""
_IR_DTYPES = {"F32": ir.DataType.FLOAT, "F16": ir.DataType.FLOAT16, "BF16": ir.DataType.BFLOAT16, "U8": ir.DataType.UINT8}
_HEADER_ALIGNMENT = 4096  # data begins on a page
_INLINED = 1 << 16  # bytes of a tensor; all such together at most a hundredth of the weights


@dataclass(frozen=True)
class Place:
    """Where a weight lies for the graphs: a location below the root, and its bytes there."""

    location: str
    offset: int
    length: int
    dtype: str


@dataclass(frozen=True)
class Entry:
    """A tensor of the bundle's weight file: its name, dtype and shape there."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def length(self) -> int:
        """Bytes."""
        return FILE_DTYPES[self.dtype].itemsize * int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Forms:
    """The tensors that a graph may use for one weight; None where the bundle keeps no such form for the graph's model.

    `product` has the packed integers, then the scales, of `bits` bits each.
    """

    plain: ir.TensorProtocol | None
    table: ir.TensorProtocol | None
    product: tuple[ir.TensorProtocol, ir.TensorProtocol] | None
    bits: int | None


class Weights:
    """The weights of a pair for one export.

    `tensors` maps a weight's unique name (`target.…`, `drafter.…`) to its stored tensor; a weight shared by both models, or by a
    tied embedding and head, has one name. `tables` are parameters that are gathered from and never multiplied with.
    """

    def __init__(
        self, pair: Pair, dtype: str, *, copy: bool, quantization: Quantization | None = None, tables: Sequence[str] = GATHERED
    ) -> None:
        self.dtype = WANTED[dtype]
        self.pair = pair
        self.quantization = quantization
        every = [*pair.target_tensors.values(), *pair.drafter_tensors.values()]
        self.converted = not _can_inline([tensor for tensor in every if tensor.dtype != self.dtype], every)
        self.inside = copy or self.converted or quantization is not None
        self._names: dict[str, dict[str, str]] = {"target": {}, "drafter": {}}
        self._kinds: dict[tuple[str, str], list[Kind]] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for model, tensors in (("target", pair.target_tensors), ("drafter", pair.drafter_tensors)):
            for name, tensor in tensors.items():
                unique = self._shared_name(name, tensor) or f"{model}.{name}"
                self._names[model][name] = unique
                self.tensors[unique] = tensor
                self._kinds.setdefault((model, unique), []).append(self._kind(model, name, tensor, tables))
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

    def _kind(self, model: str, name: str, tensor: StoredTensor, tables: Sequence[str]) -> Kind:
        """Return the bits that a parameter is quantised to, else the dtype that it is kept in."""
        if self.quantization is None:
            return self.dtype
        return tensor.dtype if name in tables else quantized_bits(model, name, self.quantization) or self.dtype

    def resolver(self, model: str, config: TransformerConfig) -> Callable[[str], ir.TensorProtocol]:
        """Return the function that gives a graph of `model` its tensor for a parameter name.

        In a quantised bundle that is a stand-in under the weight's unique name, to be replaced by one of its `forms`.
        """

        def weight(parameter: str) -> ir.TensorProtocol:
            if parameter == "rotary.inv_freq":
                return ir.tensor(inverse_frequencies(config.head_dim, config.rope_theta).numpy(), name=parameter)
            name = self._names[model][parameter]
            if self.quantization is not None:
                return ir.LazyTensor(_unread, _IR_DTYPES[self.dtype], ir.Shape(self.tensors[name].shape), name=name)
            if not self.inside and self.tensors[name].dtype != self.dtype:
                return self._inline(name)
            return self._external(name, name, self.tensors[name].shape)

        return weight

    def forms(self, model: str) -> Callable[[str], Forms]:
        """Return the function that gives a graph of `model` the forms of a weight by its unique name."""

        def of(name: str) -> Forms:
            kinds = self._kinds[model, name]
            bits = next((kind for kind in kinds if isinstance(kind, int)), None)
            kept = {kind: [self._external(e.name, e.name, e.shape) for e in self._entries(name, kind)] for kind in kinds}
            floats = {kind: tensors[0] for kind, tensors in kept.items() if not isinstance(kind, int)}
            product = None if bits is None else (kept[bits][0], kept[bits][1])
            return Forms(floats.get(self.dtype), next(iter(floats.values()), None), product, bits)

        return of

    def _external(self, name: str, place_name: str, shape: tuple[int, ...]) -> ir.ExternalTensor:
        place = self._places[place_name]
        return ir.ExternalTensor(place.location, place.offset, place.length, _IR_DTYPES[place.dtype], shape=ir.Shape(shape), name=name)

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
        header, _ = self._layout()
        total = sum(place.length for place in self._places.values())
        free = shutil.disk_usage(directory).free
        if total > free:
            raise ExportError(
                f"the weights take {total / 1e9:.2f} GB, {directory.parent} has {free / 1e9:.2f} GB free: choose another output"
            )
        path, done = directory / WEIGHTS, 0
        path.parent.mkdir(parents=True)
        with path.open("wb") as out:
            out.write(header)
            for name, kind in self._kept():
                offsets = [self._places[entry.name].offset for entry in self._entries(name, kind)]
                for parts in self._converted(self.tensors[name], kind):
                    for i, part in enumerate(parts):
                        out.seek(offsets[i])
                        out.write(part.view(np.uint8))
                        offsets[i] += part.nbytes
                        done += part.nbytes
                    progress(done, total)
            out.flush()
            os.fsync(out.fileno())

    def _kept(self) -> list[tuple[str, Kind]]:
        """Return every weight and kind that the bundle's weight file holds, once each."""
        return list(dict.fromkeys((name, kind) for (_, name), kinds in self._kinds.items() for kind in kinds))

    def _entries(self, name: str, kind: Kind) -> list[Entry]:
        """Return the entries of the weight file for one kind of a weight."""
        shape = self.tensors[name].shape
        if isinstance(kind, str):
            return [Entry(name if kind == self.dtype else f"{name}.{kind.lower()}", kind, shape)]
        assert self.quantization is not None
        packed = packed_shape(shape, kind, self.quantization.group_size)
        return [Entry(f"{name}.int{kind}", "U8", packed), Entry(f"{name}.int{kind}.scales", "F32", packed[:2])]

    def _converted(self, tensor: StoredTensor, kind: Kind) -> Iterator[list[np.ndarray]]:
        """Yield the next part of each entry of a weight."""
        if isinstance(kind, str):
            for chunk in tensor.chunks():
                yield [_convert(chunk, kind, tensor)]
            return
        assert self.quantization is not None
        columns = tensor.shape[1]
        for chunk in tensor.chunks(columns):
            rows = chunk.astype(np.float32).reshape(-1, columns)
            yield list(quantize_rows(rows, kind, self.quantization.group_size, tensor.name))

    def _layout(self) -> tuple[bytes, list[Entry]]:
        """Return the safetensors header and the entries in order, so that each begins aligned for its dtype.

        Those come first whose lengths are multiples of 64 bytes, which is nearly all of them, the largest first.
        """
        every = [entry for name, kind in self._kept() for entry in self._entries(name, kind)]
        order = sorted(every, key=lambda entry: (-math.gcd(entry.length, 64), -entry.length, entry.name))
        entries, begin = {}, 0
        for entry in order:
            end = begin + entry.length
            entries[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
            begin = end
        raw = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
        raw += b" " * (-(8 + len(raw)) % _HEADER_ALIGNMENT)
        return struct.pack("<Q", len(raw)) + raw, order

    def _inside_places(self) -> dict[str, Place]:
        header, order = self._layout()
        places, offset = {}, len(header)
        for entry in order:
            places[entry.name] = Place(WEIGHTS, offset, entry.length, entry.dtype)
            offset += entry.length
        return places

    def _reference_places(self, root: Path) -> dict[str, Place]:
        return {
            name: Place(tensor.file.resolve().relative_to(root).as_posix(), tensor.offset, tensor.length, tensor.dtype)
            for name, tensor in self.tensors.items()
        }


def _unread() -> ir.TensorProtocol:
    raise AssertionError("a quantised weight is replaced before it is read")


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
