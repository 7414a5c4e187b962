"""Compare engines with a reference, tensor by tensor, over the calls of the scenario; Polygraphy runs and compares.

Proposals are exact but where the reference's own choice is a near tie; what a block chose behind one is its own affair and is not compared.
Knows outputs and tolerances; not what kinds of engines there are. B batch rows, K proposals, V vocabulary rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from polygraphy.comparator import Comparator, IterationResult, OutputCompareResult, SimpleCompareFunc
from polygraphy.logger import G_LOGGER

from dspark.export.runner import EngineRunner, Memory
from dspark.export.scenario import Call, batch_size, scenario
from dspark.export.tolerance import scale, tie_limit, tolerance
from dspark.runtime.bundle import Manifest
from dspark.runtime.engine import Array, Engine
from dspark.runtime.graphs import DRAFT, DRAFT_SAMPLED, TensorSpec

REFERENCE = "reference"


@dataclass
class Measured:
    """The largest difference of one output of one graph, over all calls; relative, and 0 or the number of tokens for integers."""

    graph: str
    output: str
    tolerance: float
    difference: float = 0.0
    step: str = ""
    """Where the difference was largest."""
    passed: bool = True
    near_ties: int = 0
    """Proposals that differ where the reference's choice is a near tie."""


@dataclass
class Tensors:
    """What the comparison of an engine's tensors gave, by graph and output."""

    measured: dict[tuple[str, str], Measured] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether all outputs of all calls are within their tolerances."""
        return all(row.passed for row in self.measured.values())

    def worst(self) -> list[Measured]:
        """Return one row for each graph: that of the output which came closest to its tolerance, or passed it by most."""
        rows: dict[str, Measured] = {}
        for row in self.measured.values():
            if row.graph not in rows or _badness(row) > _badness(rows[row.graph]):
                rows[row.graph] = row
        return list(rows.values())


def compare_tensors(manifest: Manifest, reference: Engine, engines: Mapping[str, Engine], *, seed: int = 0) -> dict[str, Tensors]:
    """Run the scenario on all engines, each with its own state, and return how far each is from the reference. Raises EngineError.

    `manifest` is the bundle's; the reference may compute in another dtype and give more outputs.
    """
    batch, reports = batch_size(manifest), {name: Tensors() for name in engines}
    memories = {name: Memory(engine, batch) for name, engine in {REFERENCE: reference, **engines}.items()}
    calls = scenario(manifest, seed)
    call = next(calls)
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        while True:
            runners = [EngineRunner(name, memory, call.graph) for name, memory in memories.items()]
            results = Comparator.run(runners, data_loader=[call.feed])
            compared = RoundCompare(manifest, call, [*reference.signatures[call.graph].outputs])
            pairs = [(index, 0) for index in range(1, len(runners))]
            (accuracy,) = Comparator.compare_accuracy(results, compare_func=compared, comparisons=pairs)
            for name in engines:
                (outcome,) = accuracy[name, REFERENCE]
                _note(reports[name], call, outcome, compared, compared.near_ties[name])
            try:
                call = calls.send({output: np.asarray(values) for output, values in results[REFERENCE][0].items()})
            except StopIteration:
                return reports


class RoundCompare:
    """Comparison function of Polygraphy for the outputs of one call: an engine's first, the reference's second."""

    def __init__(self, manifest: Manifest, call: Call, outputs: Iterable[TensorSpec]) -> None:
        self._manifest, self._call = manifest, call
        self._outputs = {spec.name: spec for spec in outputs}
        self.tolerances = {n: 0.0 if s.dtype == "int64" else tolerance(manifest, call.graph, n) for n, s in self._outputs.items()}
        self.scales: dict[str, float] = {}
        self.near_ties: Counter[str] = Counter()

    def __call__(self, engine: IterationResult, reference: IterationResult) -> dict[str, OutputCompareResult]:
        """Return a result for each output that both have."""
        names = [name for name in reference if name in engine]
        # Integers too: Polygraphy divides by them, also by 0.
        ours, theirs = ({name: np.asarray(result[name], np.float64) for name in names} for result in (engine, reference))
        if self._call.graph in (DRAFT, DRAFT_SAMPLED):
            complete = {name: np.asarray(values) for name, values in reference.items()}
            ours, self.near_ties[engine.runner_name] = self._walked(ours, complete)
        self.scales = {name: 1.0 if self._outputs[name].dtype == "int64" else scale(self._outputs[name], theirs[name]) for name in names}
        absolute = {name: self.tolerances[name] * self.scales[name] for name in names}
        compare = SimpleCompareFunc(atol=absolute, rtol=0.0, check_error_stat="max")
        return compare(IterationResult(ours, runner_name=engine.runner_name), IterationResult(theirs, runner_name=reference.runner_name))

    def _walked(self, ours: dict[str, Array], reference: dict[str, Array]) -> tuple[dict[str, Array], int]:
        """Return the engine's outputs with the reference's in place of what follows a near tie in each block, and how many there were."""
        near_ties = 0
        ours = {name: values.copy() for name, values in ours.items()}
        differs = ours["verify_tokens"] != reference["verify_tokens"]
        for row in np.flatnonzero(differs.any(1)):
            column = int(differs[row].argmax()) - 1
            if column < 0 or not self._is_near_tie(row, column, int(ours["verify_tokens"][row, column + 1]), reference):
                continue
            near_ties += 1
            ours["verify_tokens"][row, column + 1 :] = reference["verify_tokens"][row, column + 1 :]
            for name in ours.keys() & {"confidence_logits", "draft_logits", "draft_probs"}:
                ours[name][row, column + 1 :] = reference[name][row, column + 1 :]
        return ours, near_ties

    def _is_near_tie(self, row: int, column: int, token: int, reference: dict[str, Array]) -> bool:
        chosen = int(reference["verify_tokens"][row, column + 1])
        if self._call.graph == DRAFT_SAMPLED:
            sums, uniform = reference["draft_probs"][row, column].astype(np.float64).cumsum(), self._call.feed["draft_uniform"][row, column]
            # The draw falls where the running sum passes the uniform number: how far is that from the entry that the engine chose?
            edge = sums[token] if token < chosen else sums[token - 1]
            return abs(float(edge) - float(uniform)) <= tolerance(self._manifest, DRAFT_SAMPLED, "draft_probs")
        if "draft_logits" not in reference:
            return True  # a reference without them cannot tell: a wrong drafter shows in the sampled draft, and costs speed only
        logits = reference["draft_logits"][row, column]
        return float(logits[chosen] - logits[token]) <= tie_limit(self._manifest, DRAFT, "draft_logits", logits)


def _note(report: Tensors, call: Call, outcome: Mapping[str, OutputCompareResult | bool], compared: RoundCompare, near_ties: int) -> None:
    for name, result in outcome.items():
        row = report.measured.setdefault((call.graph, name), Measured(call.graph, name, compared.tolerances[name]))
        # False instead of a result: the shapes differ.
        difference = np.inf if result is False else float(result.max_absdiff) / (compared.scales[name] or 1.0)
        if not row.step or difference > row.difference or np.isnan(difference):
            row.difference, row.step = difference, call.step
        row.passed = row.passed and bool(result)
        if name == "verify_tokens":
            row.near_ties += near_ties


def _badness(row: Measured) -> tuple[bool, float]:
    share = row.difference / row.tolerance if row.tolerance else row.difference
    return not row.passed, float("inf") if np.isnan(share) else share
