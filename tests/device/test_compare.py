"""The comparison of engines, on made-up outputs, and its two feeds: ONNX Runtime agrees with itself, and not after a changed input."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from device import compare, engines

from dspark.export import cli as export_cli
from dspark.runtime.bundle import load_bundle
from dspark.runtime.graphs import DRAFT
from dspark.runtime.onnxruntime import OnnxRuntimeEngine


def outputs(tokens: list[int], **changes: float) -> dict[str, np.ndarray]:
    """A round of three proposals; in each, token 1 is ahead of token 2 by a tenth."""
    logits = np.tile(np.array([0.0, 100.0, 99.9, -50.0], np.float32), (1, 3, 1))
    made = {
        "verify_tokens": np.array([[9, *tokens]]),
        "draft_logits": logits,
        "confidence_logits": np.ones((1, 3), np.float32),
        "key_ring.0.updated": np.ones((1, 1, 4, 2), np.float32),
    }
    for name, value in changes.items():
        made[name].reshape(-1)[-1] += value
    return made


def test_equal_outputs() -> None:
    worst, faults = compare.differences(outputs([1, 1, 1]), outputs([1, 1, 1], draft_logits=0.05))
    assert worst == pytest.approx(0.0005, rel=1e-3)
    assert faults == []


@pytest.mark.parametrize("change", [{"draft_logits": 0.15}, {"confidence_logits": 0.002}, {"key_ring.0.updated": np.nan}])
def test_a_difference_is_found(change: dict[str, float]) -> None:
    _, faults = compare.differences(outputs([1, 1, 1]), outputs([1, 1, 1], **change))
    assert len(faults) == 1 and next(iter(change)) in faults[0]


def test_another_token_needs_a_near_tie() -> None:
    _, faults = compare.differences(outputs([1, 1, 1]), outputs([1, 2, 3]))
    assert faults == ["proposal 2 is 2, expected 1, ahead by 1.00e-01"]
    actual = outputs([1, 2, 3], confidence_logits=5.0)  # behind the first difference: not compared
    actual["draft_logits"][0, 1, 2] += 0.06
    assert compare.differences(outputs([1, 1, 1]), actual)[1] == []


class Device:
    """Stands for DeviceGraph: torch tensors in front of ONNX Runtime."""

    def __init__(self, cpu: OnnxRuntimeEngine, sizes: dict[str, int]) -> None:
        torch = pytest.importorskip("torch")
        signature = cpu.signatures[DRAFT]
        specs = [spec for spec in (*signature.inputs, *signature.outputs) if spec.name not in signature.aliases]
        held = {spec.name: cpu.allocate(tuple(sizes.get(size, size) for size in spec.shape), spec.dtype) for spec in specs}
        self.tensors = {name: torch.from_numpy(tensor.array) for name, tensor in held.items()}
        self.tensors |= {output: self.tensors[source] for output, source in signature.aliases.items()}
        self.run = cpu.bind(DRAFT, held).run


def test_rounds_of_a_text(small_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    cpu = OnnxRuntimeEngine(load_bundle(small_bundle), threads=1)
    signature, sizes = cpu.signatures[DRAFT], {"B": 1, "N": compare.ROWS, "R": cpu.manifest.ring_capacity}
    rounds = compare.rounds_of(cpu, [token % 300 for token in range(5, 400, 7)])
    assert len(rounds) == compare.ROUNDS
    expected = list(compare.play_on_cpu(cpu, signature, rounds, sizes))
    device = Device(cpu, sizes)
    for _ in range(2):  # a second time, from rings of zeros again
        for wanted, actual in zip(expected, compare.play(device, signature, rounds, device.run), strict=True):
            assert compare.differences(wanted, actual) == (0.0, [])
    assert np.abs(expected[-1]["key_ring.0.updated"]).sum() > np.abs(expected[0]["key_ring.0.updated"]).sum() > 0
    rounds[2]["start"] += 1
    found = [compare.differences(*pair)[1] for pair in zip(expected, compare.play(device, signature, rounds, device.run), strict=True)]
    assert not any(found[:2]) and all(found[2:])


def test_the_recorded_text_is_long_enough() -> None:
    assert len(compare.recorded_text()) > compare.ROUNDS * compare.ROWS


def test_the_export_is_one_that_can_be_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command parses, and asks for what the CPU can compute and for the logits of proposals."""
    asked: list[str] = []

    def note(program: str, *arguments: str) -> None:
        asked.extend([program, *arguments])
        (tmp_path / engines.BUNDLE / "engines" / "tensorrt-sm89").mkdir(parents=True)

    monkeypatch.setattr(engines, "command", note)
    monkeypatch.setattr(engines, "need", lambda *_: None)
    monkeypatch.setattr(engines, "flavour", lambda: "tensorrt")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 9))
    assert engines.run(tmp_path) == "tensorrt-sm89, 0 graphs, 0 MB"
    args = export_cli._parser().parse_args(asked[1:])
    assert asked[0] == "dspark-export"
    assert (args.backend, args.compute_capability, args.dtype, args.debug_outputs) == ("tensorrt", "8.9", "fp32", True)
    assert args.target.is_dir() and args.drafter.is_dir()


def test_engines_that_refuse_to_run_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = compare.DeviceGraph.__new__(compare.DeviceGraph)
    graph._context = SimpleNamespace(execute_async_v3=lambda _: False)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: SimpleNamespace(cuda_stream=0))
    with pytest.raises(compare.Failed, match="refused to enqueue"):
        graph.run()
