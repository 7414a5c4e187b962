"""The C++ plugins (plugins/cpp) against the Python ones: launches, contract, attributes and the life of a plugin.

TensorRT's headers are in no registry, so plugins/cpp is compiled against stand_in/NvInfer.h: that shows syntax and our own logic, not that
TensorRT takes the library. Where nvcc and CMake are installed, a slow test builds the libraries as its README says.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import emulator
import pytest

from dspark.plugins import kernels, launch, registry, rules
from dspark.plugins.contract import BLOCK_ATTENTION, PLUGIN_ATTRIBUTES, PLUGINS, RING_WRITE, Operator

needs_compiler = pytest.mark.skipif(emulator.COMPILER is None, reason="plugins/cpp is compiled with g++, which is not installed")
SOURCES = kernels.SOURCES / "cpp"
STAND_IN = Path(__file__).parent / "stand_in"
STRICT = ["-std=c++17", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]

FLOAT32, FLOAT64, INT32, INT64 = 1, 2, 5, 10
"""PluginFieldType."""
DATA_TYPES = {"fp32": 0, "fp16": 1, "bf16": 7}
"""TensorRT's DataType."""
ATTRIBUTES = {"scale": 0.125, "window": 2048, "heads": 32, "kv_heads": 8, "head_dim": 128}
SIZES = {"B": 2, "Hq": 32, "G": 8, "T": 7, "R": 2064, "N": 8, "D": 128}


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The library's sources but the kernels, with a driver."""
    place = tmp_path_factory.mktemp("cpp") / "probe.so"
    sources = [SOURCES / "plugin.cpp", SOURCES / "library.cpp", STAND_IN / "probe.cpp"]
    includes = [f"-I{folder}" for folder in (SOURCES, STAND_IN, STAND_IN / "cuda")]
    command = [*STRICT, "-O1", "-g", "-fsanitize=undefined", "-fno-sanitize-recover", "-shared", "-fPIC", *includes]
    emulator._compile([*command, *map(str, sources), "-o", str(place)])
    loaded = ctypes.CDLL(str(place))
    loaded.play.restype = loaded.describe.restype = ctypes.c_char_p
    return loaded


def plan(probe: ctypes.CDLL, shape: kernels.AttentionShape, multiprocessors: int) -> list[int]:
    dtype, *sizes = vars(shape).values()
    given = (ctypes.c_int64 * 8)(list(kernels.ELEMENTS).index(dtype), *sizes)
    found = (ctypes.c_int64 * 12)()
    probe.attention_plan(given, multiprocessors, found)
    return list(found)


def expected_plan(shape: kernels.AttentionShape, multiprocessors: int) -> list[int]:
    """The same numbers off plugins/kernels.py and plugins/launch.py."""
    attend, *merged = kernels.block_attention(shape, 1.0, multiprocessors)
    scalars = {scalar.name: int(scalar.value) for scalar in attend.scalars}
    tile_rows = int(re.findall(r", (\d+)>", attend.kernel)[0])
    rows = -(-shape.batch * shape.heads * shape.block // 4)
    if merged:
        assert merged[0].grid == (rows, 1, 1)
    names = dict(zip(("B", "Hq", "G", "T", "R", "D"), list(vars(shape).values())[1:7], strict=True))
    dtype = next(short for short, name in launch._KERNEL_DTYPES.items() if name == shape.dtype)
    most = launch.workspace(BLOCK_ATTENTION, dtype, names, {"window": shape.window})
    workspace = kernels.block_attention_workspace(shape, multiprocessors)
    return [scalars["query_rows"], tile_rows, scalars["splits"], attend.shared_bytes, *attend.grid, rows, 1, 1, workspace, most]


def shapes() -> Iterator[tuple[kernels.AttentionShape, int]]:
    groups = [(1, 1), (4, 2), (10, 2), (32, 8), (40, 8), (64, 2), (8, 8)]
    rings = [(5, 3), (48, 40), (2064, 2048), (2064, 1 << 62), (40960, 2048)]
    chosen = itertools.product(kernels.ELEMENTS, kernels.HEAD_DIMS, groups, rings, (1, 7, 16), (1, 3, 8, 32))
    for number, (dtype, head_dim, (heads, kv_heads), (capacity, window), block, batch) in enumerate(chosen):
        shape = kernels.AttentionShape(dtype, batch, heads, kv_heads, block, capacity, head_dim, window)
        yield shape, (1, 46, 132, 256)[number % 4 if number % 3 else number % 7 % 4]


@needs_compiler
def test_launches_of_the_attention(probe: ctypes.CDLL) -> None:
    seen = set()
    for shape, multiprocessors in shapes():
        expected = expected_plan(shape, multiprocessors)
        assert plan(probe, shape, multiprocessors) == expected, shape
        seen.add((expected[1], expected[2] > 1))
    assert seen == set(itertools.product((16, 32, 48, 64), (False, True)))


@needs_compiler
def test_launches_of_the_write(probe: ctypes.CDLL) -> None:
    for (number, dtype), head_dim, batch, rows in itertools.product(enumerate(kernels.ELEMENTS), kernels.HEAD_DIMS, (1, 8), (1, 8, 512)):
        expected = kernels.ring_write(dtype, batch, 8, 2064, rows, head_dim)
        found = (ctypes.c_int64 * 4)()
        probe.write_plan(number, batch, 8, 2064, rows, head_dim, found)
        assert (*found[:3],) == expected.grid
        assert found[3] == expected.scalars[-1].value


def test_constants_are_the_same() -> None:
    text = (SOURCES / "launches.h").read_text()
    assert f"MOST_MULTIPROCESSORS = {launch.MOST_MULTIPROCESSORS};" in text
    assert " || ".join(f"head_dim == {dim}" for dim in kernels.HEAD_DIMS) in text
    contract = (SOURCES / "contract.h").read_text()
    assert f'NAMESPACE = "{registry.NAMESPACE}"' in contract
    assert f'VERSION = "{PLUGIN_ATTRIBUTES["plugin_version"]}"' in contract


def test_arguments_of_the_kernels_are_in_order() -> None:
    """kernels.cu passes addresses of variables: the same names in the same order, of the same types, as plugins/kernels.py."""
    text = (SOURCES / "kernels.cu").read_text()
    written = kernels.ring_write("float16", 1, 8, 2064, 8, 128)
    attend, merge = kernels.block_attention(kernels.AttentionShape("float16", 1, 32, 8, 7, 2064, 128, 2048), 1.0, 132)
    for array, one in (("arguments", written), ("attend", attend), ("merge", merge)):
        (listed,) = re.findall(rf"void\* {array}\[\] = \{{(.*?)\}};", text, re.DOTALL)
        names = [name.strip().removeprefix("&").removeprefix("p.") for name in listed.split(",")]
        assert names == [*one.pointers, *(scalar.name.replace("scale", "log2_scale") for scalar in one.scalars)]
        for scalar in one.scalars:
            name = scalar.name.replace("scale", "log2_scale")
            assert re.search(rf"^    {scalar.c_type} (?:\w+ = [^;]*, )?{name} = ", text, re.MULTILINE), name


@needs_compiler
def test_the_contract(probe: ctypes.CDLL) -> None:
    """Names, letters, dtypes, aliases and attributes of the creators that the library hands out."""
    lines = []
    for operator in PLUGINS:
        kinds = "".join(f" {name}={FLOAT32 if kind is float else INT64}" for name, kind in operator.attributes.items())
        lines.append(f"dspark::{operator.name} {registry.VERSION}{kinds}")
        lines += [f"{name} {letters} {int(operator.dtypes.get(name) == 'int64')}" for name, letters in operator.inputs.items()]
        ((output, letters),) = operator.outputs.items()
        source = operator.aliases.get(output)
        lines.append(f"{output} {letters} {-1 if source is None else list(operator.inputs).index(source)}")
    assert probe.describe().decode().splitlines() == lines


def play(
    probe: ctypes.CDLL,
    operator: Operator,
    dtype: str = "fp16",
    sizes: dict[str, int] = SIZES,
    fields: Sequence[tuple[str, int, object]] | None = None,
    changed: dict[str, tuple[int, ...]] | None = None,
    dynamic: bool = True,
) -> list[str]:
    """Let the probe play a plugin's life; return what it noted."""
    if fields is None:
        given = [(name, FLOAT32 if kind is float else INT64, ATTRIBUTES[name]) for name, kind in operator.attributes.items()]
    else:
        given = list(fields)
    types = {FLOAT32: ctypes.c_float, FLOAT64: ctypes.c_double, INT32: ctypes.c_int32, INT64: ctypes.c_int64}
    values = [types[kind](value) for _, kind, value in given]
    dims = [(changed or {}).get(name) or tuple(sizes[letter] for letter in rules.letters(text)) for name, text in operator.inputs.items()]
    flat = [size for shape in dims for size in (*shape, *(-1,) * (4 - len(shape)))]
    count = len(given)
    text = probe.play(
        PLUGINS.index(operator),
        count,
        (ctypes.c_char_p * count)(*(name.encode() for name, _, _ in given)),
        (ctypes.c_int * count)(*(kind for _, kind, _ in given)),
        (ctypes.c_void_p * count)(*(ctypes.addressof(value) for value in values)),
        DATA_TYPES[dtype],
        (ctypes.c_int64 * len(flat))(*flat),
        ctypes.c_bool(dynamic),
    )
    return text.decode().splitlines()


FIRST, OTHER = "1001", "1000"
"""supportsFormatCombination for the right tensor, another format, int32, another float: only the first tensor may be any float."""


@needs_compiler
@pytest.mark.parametrize("dtype", list(DATA_TYPES))
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_ring_write_lives(probe: ctypes.CDLL, dtype: str, dynamic: bool) -> None:
    number = list(DATA_TYPES).index(dtype)
    assert play(probe, RING_WRITE, dtype, dynamic=dynamic) == [
        f"output 0 1 2 3 type {DATA_TYPES[dtype]} alias 0 of 1",
        f"formats {FIRST} {OTHER} {OTHER} {OTHER}",
        "workspace 0",
        f"write {number} 2 8 2064 8 128 at 0xa00 0x200 0x300 on 0xc00",
        "enqueue 0",
    ]


@needs_compiler
@pytest.mark.parametrize("dtype", list(DATA_TYPES))
def test_a_block_attention_lives(probe: ctypes.CDLL, dtype: str) -> None:
    """Everything against what the Python plugins ask and launch; more multiprocessors than an engine's scratch memory is sized for."""
    for count in (20, 132, 10**6):
        probe.set_device(count, 0)
        launches = launch.plan(BLOCK_ATTENTION, dtype, SIZES, ATTRIBUTES, count)
        workspace = launch.workspace(BLOCK_ATTENTION, dtype, SIZES, ATTRIBUTES)
        addresses = " ".join(f"{0x100 * i:#x}" for i in range(1, 8))
        assert play(probe, BLOCK_ATTENTION, dtype) == [
            f"output 0 1 2 3 type {DATA_TYPES[dtype]} alias -1 of 1",
            f"formats {FIRST}" + f" {OTHER}" * 7,
            f"workspace {workspace}",
            f"prepare {launches[0].shared_bytes}",
            f"attend {list(DATA_TYPES).index(dtype)} 2 32 8 7 2064 128 2048 scale 0.125 splits {launches[0].grid[0]} "
            f"at {addresses} 0xa00 0xb00 on 0xc00",
            "enqueue 0",
        ]
    probe.set_device(132, 0)


@needs_compiler
@pytest.mark.parametrize(
    ("operator", "changed"),
    [
        (RING_WRITE, {"rows": (2, 8, 4096, 128)}),
        (RING_WRITE, {"rows": (2, 4, 8, 64)}),
        (RING_WRITE, {"start": (2, 1)}),
        (BLOCK_ATTENTION, {"ring_key": (2, 8, 2064)}),
        (BLOCK_ATTENTION, {"query": (2, 33, 7, 128)}),
        (BLOCK_ATTENTION, {"block_value": (2, 8, 6, 128), "first": (3,)}),
        (BLOCK_ATTENTION, {"query": (2, 64, 7, 128)}),
    ],
)
def test_faults_are_the_same_sentences(probe: ctypes.CDLL, operator: Operator, changed: dict[str, tuple[int, ...]]) -> None:
    shapes = [changed.get(name) or tuple(SIZES[letter] for letter in rules.letters(text)) for name, text in operator.inputs.items()]
    with pytest.raises(rules.PluginError) as expected:
        rules.check_agreement(operator, ATTRIBUTES if operator is BLOCK_ATTENTION else {}, rules.sizes(operator, shapes))
    assert play(probe, operator, changed=changed, dynamic=False) == [f"error {expected.value}"]


@needs_compiler
def test_attributes(probe: ctypes.CDLL) -> None:
    given = [(name, FLOAT32 if name == "scale" else INT64, value) for name, value in ATTRIBUTES.items()]
    narrow = [(name, FLOAT64 if name == "scale" else INT32, value) for name, value in ATTRIBUTES.items()]
    assert play(probe, BLOCK_ATTENTION, fields=narrow) == play(probe, BLOCK_ATTENTION, fields=given)
    with pytest.raises(rules.PluginError) as expected:
        rules.checked_attributes(BLOCK_ATTENTION, {name: value for name, value in ATTRIBUTES.items() if name != "window"} | {"heads": 0})
    faulty = [("heads", INT64, 0) if name == "heads" else (name, kind, value) for name, kind, value in given if name != "window"]
    assert play(probe, BLOCK_ATTENTION, fields=faulty) == [f"error {expected.value}"]
    wrong = [("scale", INT64, 1), ("window", FLOAT32, 2048.0), *given[2:]]
    assert play(probe, BLOCK_ATTENTION, fields=wrong) == [
        "error BlockAttention: attribute scale is of field type 10, expected float; attribute window is of field type 1, expected int"
    ]


@needs_compiler
def test_errors_of_the_device_are_reported(probe: ctypes.CDLL) -> None:
    probe.set_device(132, 700)
    assert play(probe, RING_WRITE)[-2:] == ["error RingWrite: CUDA error 700", "enqueue -1"]
    assert play(probe, BLOCK_ATTENTION)[-1] == "error BlockAttention: CUDA error 700"
    probe.set_device(132, 0)
    assert play(probe, RING_WRITE, sizes=SIZES | {"D": 72})[-1] == (
        "error head dimension 72 has no kernels: expected one of 64, 80, 96, 128, 256"
    )


NVCC, CMAKE = shutil.which("nvcc"), shutil.which("cmake")


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(NVCC is None or CMAKE is None, reason="nvcc or cmake is not installed")
def test_the_build_of_the_readme(tmp_path: Path) -> None:
    """Both libraries, kernels for two architectures, against the stand-in: they export what TensorRT asks for, and nothing else."""
    root = tmp_path / "tensorrt"
    (root / "include").mkdir(parents=True)
    shutil.copy(STAND_IN / "NvInfer.h", root / "include")
    (root / "lib").mkdir()
    (tmp_path / "registry.cpp").write_text(
        "#include <NvInfer.h>\nnvinfer1::IPluginRegistry* getPluginRegistry() noexcept { return nullptr; }\n"
    )
    includes = [f"-I{root / 'include'}", f"-I{STAND_IN / 'cuda'}"]
    emulator._compile(["-shared", "-fPIC", *includes, str(tmp_path / "registry.cpp"), "-o", str(root / "lib" / "libnvinfer.so")])
    build = tmp_path / "build"
    options = [f"-DTENSORRT_ROOT={root}", "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CUDA_ARCHITECTURES=89;120"]
    for command in (["-S", str(SOURCES), "-B", str(build), *options], ["--build", str(build)]):
        result = subprocess.run([str(CMAKE), *command], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    for name, exported in (
        ("dspark_plugins", {"getCreators", "setLoggerFinder"}),
        ("dspark_plugins_registered", {"dspark_plugins_registered"}),
    ):
        listed = subprocess.run(["nm", "-D", "--defined-only", str(build / f"lib{name}.so")], capture_output=True, text=True, check=True)
        ours = {line.split()[-1] for line in listed.stdout.splitlines() if " T " in line}
        assert ours == exported
    assert ctypes.CDLL(str(build / "libdspark_plugins.so")).getCreators  # loads without a driver
