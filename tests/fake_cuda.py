"""A CUDA device made of host memory, with the interface of `runtime.cuda.Cuda`.

Nothing that is enqueued runs before the stream is waited for, so that memory which is used again too early gives wrong values, and memory
which is freed too early is an error. New memory holds NaN. Calls are counted by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from dspark.runtime.errors import EngineError

ALIGNMENT = 256
STREAM = 77


class Recorded(list[Callable[[], None]]):
    """A graph: work that was recorded."""


class FakeCuda:
    """`fail` holds the names of calls that report an error."""

    def __init__(self, capability: str = "8.9") -> None:
        self.capability, self.device = capability, 0
        self.calls: Counter[str] = Counter()
        self.fail: set[str] = set()
        self.live: dict[int, np.ndarray] = {}
        self.queue: list[Callable[[], None]] = []
        self._recording: list[Callable[[], None]] | None = None

    def _called(self, name: str, *, while_capturing: bool = True) -> None:
        self.calls[name] += 1
        if name in self.fail:
            raise EngineError(f"{name} failed: cudaErrorIllegalAddress")
        assert while_capturing or self._recording is None, f"{name} while a stream is captured"

    @property
    def capturing(self) -> bool:
        """Whether the stream is recorded."""
        return self._recording is not None

    def view(self, address: int, size: int) -> np.ndarray:
        """Return device memory as bytes; the addresses must lie in one piece of it."""
        for begin, memory in self.live.items():
            if begin <= address and address + size <= begin + memory.nbytes:
                return memory[address - begin : address - begin + size]
        raise AssertionError(f"{size} bytes at {address} are not in one piece of live device memory")

    def enqueue(self, work: Callable[[], None], stream: int) -> None:
        assert stream == STREAM
        (self.queue if self._recording is None else self._recording).append(work)

    def run_all(self) -> None:
        """Run what was enqueued."""
        while self.queue:
            self.queue.pop(0)()

    def allocate(self, size: int) -> int:
        self._called("allocate", while_capturing=False)
        room = np.full(size + ALIGNMENT, 0xFF, np.uint8)
        skipped = -room.ctypes.data % ALIGNMENT
        memory = room[skipped : skipped + size]
        self.live[memory.ctypes.data] = memory
        return int(memory.ctypes.data)

    def free(self, address: int) -> None:
        self._called("free", while_capturing=False)
        self.run_all()
        del self.live[address]

    def host_memory(self, size: int) -> np.ndarray:
        return np.full(size, 0xFF, np.uint8)

    def available_memory(self) -> int:
        return 1 << 30

    def stream(self) -> int:
        return STREAM

    def synchronize(self, _stream: int) -> None:
        self._called("synchronize", while_capturing=False)
        self.run_all()

    def copy_in(self, address: int, host: np.ndarray, stream: int) -> None:
        self._called("copy_in", while_capturing=False)
        self.enqueue(lambda: np.copyto(self.view(address, host.nbytes), host), stream)

    def copy_out(self, host: np.ndarray, address: int, stream: int) -> None:
        self._called("copy_out", while_capturing=False)
        self.enqueue(lambda: np.copyto(host, self.view(address, host.nbytes)), stream)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        self._called("copy")
        self.enqueue(lambda: np.copyto(self.view(target, size), self.view(source, size)), stream)

    def copy_rows(self, target: int, width: int, source: int, source_pitch: int, rows: int, stream: int) -> None:
        self._called("copy_rows")

        def work() -> None:
            for row in range(rows):
                np.copyto(self.view(target + row * width, width), self.view(source + row * source_pitch, width))

        self.enqueue(work, stream)

    def clear(self, address: int, size: int, stream: int) -> None:
        self._called("clear")
        self.enqueue(lambda: self.view(address, size).fill(0), stream)

    def begin_capture(self, _stream: int) -> None:
        self._called("begin_capture")
        assert self._recording is None
        self._recording = []

    def end_capture(self, _stream: int) -> Any:
        recorded, self._recording = self._recording, None
        self._called("end_capture")
        return Recorded(recorded or ())

    def launch(self, graph: Any, stream: int) -> None:
        self._called("launch")
        for work in graph:
            self.enqueue(work, stream)
