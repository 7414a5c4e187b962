"""The cache of packed weights: the same outputs, other names for other files, nothing half written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dspark.runtime import LLM, SamplingParams, prepacked
from dspark.runtime.bundle import load_bundle
from dspark.runtime.errors import EngineError
from dspark.runtime.onnxruntime import OnnxRuntimeEngine
from dspark.runtime.prepacked import MODEL, PACKED, PrepackedCache

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_outputs_are_the_same(pair_bundle: Path, tmp_path: Path) -> None:
    """With the bundle's graphs, with those just written, and with those found; a found cache is not written again."""
    cache = tmp_path / "deep" / "cache"
    expected = LLM(pair_bundle).generate([[5, 6, 7]], PARAMS)[0].token_ids
    assert LLM(pair_bundle, prepacked_cache=cache).generate([[5, 6, 7]], PARAMS)[0].token_ids == expected
    written = contents(cache)
    assert {Path(name).name for name in written} == {MODEL, PACKED}
    assert {Path(name).parts[0].rsplit("-", 1)[0] for name in written} == {"context", "draft", "target", "accept"}
    assert not list(cache.glob(".*"))
    assert LLM(pair_bundle, prepacked_cache=str(cache)).generate([[5, 6, 7]], PARAMS)[0].token_ids == expected
    assert contents(cache) == written


def test_the_bundle_is_not_read_again(pair_bundle: Path, tmp_path: Path) -> None:
    """What is found is used: the graph and its weights could be gone."""
    bundle = load_bundle(pair_bundle)
    OnnxRuntimeEngine(bundle, prepacked=tmp_path).load(["target"])
    (place,) = tmp_path.iterdir()
    engine = OnnxRuntimeEngine(type(bundle)(tmp_path / "nowhere", bundle.manifest), prepacked=tmp_path)
    engine.load(["target"])
    (place / PACKED).unlink()
    with pytest.raises(EngineError, match=f"cannot load {place}(.|\n)*; remove {place}, which is written again"):
        OnnxRuntimeEngine(bundle, prepacked=tmp_path).load(["target"])


def test_what_its_name_depends_on(pair_bundle: Path, small_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: set[str] = set()

    def name(bundle: Path = pair_bundle, version: str = "1.32.0", graph: str = "draft") -> str:
        made = PrepackedCache(tmp_path, load_bundle(bundle), version).model(graph, lambda _: None)
        return made.parent.name

    assert name() == name()
    names |= {name(), name(version="1.33.0"), name(graph="accept"), name(small_bundle)}
    monkeypatch.setattr(prepacked, "cpu_kind", lambda: "another CPU")
    names.add(name())
    assert len(names) == 5


def test_nothing_is_left_of_a_failed_write(pair_bundle: Path, tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / MODEL).write_text("half")
        raise OSError(28, "No space left on device")

    cache = PrepackedCache(tmp_path / "cache", load_bundle(pair_bundle), "1.32.0")
    with pytest.raises(EngineError, match=r"cannot be written \(.*No space left on device\): name another folder"):
        cache.model("draft", fails)
    assert list((tmp_path / "cache").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match="cannot be written"):
        LLM(pair_bundle, prepacked_cache=tmp_path / "file")


def test_a_full_disk_is_told_as_one(pair_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime calls it a graph that cannot be loaded."""

    def fails(*_: object) -> None:
        raise EngineError("ONNX Runtime cannot load draft.onnx: Failed to write external initializers")

    engine = OnnxRuntimeEngine(load_bundle(pair_bundle), prepacked=tmp_path)
    monkeypatch.setattr(engine, "_open", fails)
    with pytest.raises(
        EngineError, match=f"packed weights cannot be written below {tmp_path}: name a folder with more room.*Failed to write"
    ):
        engine.load(["draft"])
    assert list(tmp_path.iterdir()) == []


def test_two_processes_at_once(pair_bundle: Path, tmp_path: Path) -> None:
    """The other one is faster: its files are taken, ours are thrown away."""
    cache = PrepackedCache(tmp_path, load_bundle(pair_bundle), "1.32.0")

    def write(text: str, folder: Path) -> None:
        (folder / MODEL).write_text(text)

    def slower(folder: Path) -> None:
        write("ours", folder)
        cache.model("draft", lambda other: write("theirs", other))

    assert cache.model("draft", slower).read_text() == "theirs"
    assert len(list(tmp_path.iterdir())) == 1
    shutil.rmtree(tmp_path)
