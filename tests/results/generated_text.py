"""Files of a device for generated or given text, equal to their references; tests change them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import numpy as np

from farm.builds.bundles.bundle import Bundle, Generation, Manifest, TensorSpec
from farm.devices.execution.raw import RawResult
from farm.results.attempt import Attempt
from farm.results.judge import judge
from farm.suites.generate import Generate
from farm.suites.suite import Case, Expectation, Job, Target, Tolerance

MS = 1_000_000
KINDS = ("fp32", "quantized")


class GeneratedText:
    """Prompts with the rows of each, [positions, columns]."""

    def __init__(
        self, root: Path, generation: Generation, rows: Sequence[np.ndarray], tokens: Sequence[tuple[int, ...]], *,
        outputs: int = 1, generate: Generate | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.bundle_folder, self.generate = root / "raw", root / "bundle", generate or Generate()
        for folder in (
            self.folder,
            *(self.bundle_folder / name for name in ("inputs", *map("reference_{}".format, KINDS))),
        ):
            folder.mkdir(parents=True)
        self.tolerance: Tolerance | None = None
        self.expect: tuple[Expectation, ...] = ()
        self.simulated, self.run_seconds, self.backend = False, 1.0, "htp"
        self.manifest = Manifest(
            key="0123456789abcdef", job_id="llm/tiny[SM8650-htp-16a8w]", soc="SM8650", backend="htp", precision="16a8w",
            samples=len(rows), inputs=(TensorSpec((4,), "int32"), TensorSpec((len(rows[0]),), "int32")),
            outputs=(TensorSpec(rows[0].shape, "float32"),) * outputs, pte_bytes=1000, delegates={"QnnBackend": 1},
            delegated_ops=7, fallback_ops={}, seconds={}, versions={}, files={}, generation=generation,
        )  # fmt: skip
        for sample, one in enumerate(rows):
            for index in range(outputs):
                self.set_output(sample, one, index)
                for kind in KINDS:
                    self.set_reference(sample, one, kind, index)
        self.generated: list[dict[str, Any]] = []
        for line, chosen in enumerate(tokens):
            self.add(line, chosen)

    def add(self, line: int, tokens: Sequence[int], ended: str = "new") -> None:
        """Add tokens of a prompt, of the first round or of a later one."""
        prompt, steps = self.generation.prompt_tokens[line], len(tokens) - 1
        self.generated.append({
            "line": line, "prompt_tokens": prompt, "tokens": list(tokens), "prefill_ns": [MS] * prompt,
            "steps_ns": [2 * MS] * steps, "first_token_ns": prompt * MS, "total_ns": (prompt + 2 * steps) * MS,
            "ended": ended,
        })  # fmt: skip

    @property
    def generation(self) -> Generation:
        assert self.manifest.generation is not None
        return self.manifest.generation

    def output(self, sample: int, index: int = 0) -> np.ndarray:
        rows = np.fromfile(self.folder / f"output_{sample}_{index}.raw", np.float32)
        return rows.reshape(self.manifest.outputs[0].shape)

    def set_output(self, sample: int, rows: np.ndarray, index: int = 0) -> None:
        rows.astype(np.float32).tofile(self.folder / f"output_{sample}_{index}.raw")

    def set_reference(self, sample: int, rows: np.ndarray, kind: str, index: int = 0) -> None:
        rows.astype(np.float32).tofile(self.bundle_folder / f"reference_{kind}/output_{sample}_{index}.raw")

    def without_references(self) -> None:
        """Make it a ready program."""
        self.manifest = msgspec.structs.replace(self.manifest, references=(), delegated_ops=None)

    def judge(self) -> Attempt:
        spec = self.manifest.outputs[0]
        written = {"shape": list(spec.shape), "dtype": spec.dtype, "nbytes": spec.nbytes}
        report = {
            "schema": 1, "ok": True, "exit_code": 0, "error": None, "method": "kv_forward", "load_ns": 9 * MS,
            "verification_ns": MS, "inputs": [], "outputs": [written] * len(self.manifest.outputs),
            "inferences": [
                {"line": line, "iterations_ns": one["steps_ns"] or [one["total_ns"]]}
                for line, one in enumerate(self.generated[: self.manifest.samples])
            ],
            "generated": self.generated, "method_loads_ns": {"kv_forward": 8 * MS},
        }  # fmt: skip
        (self.folder / "result.json").write_text(json.dumps(report))
        tolerances = {"16a8w": self.tolerance} if self.tolerance else {}
        case = Case("llm", "tiny", "", (), samples=2, tolerances=tolerances, expect=self.expect, generate=self.generate)
        job = Job(case, Target("SM8650", self.backend, "16a8w"))
        raw = RawResult(
            job_id=job.id, serial="emulator-5554", workspace=PurePosixPath("/device"), folder=self.folder, started_ms=1,
            exit_code=0, run_seconds=self.run_seconds, simulated=self.simulated,
        )  # fmt: skip
        return judge(job, Bundle(self.bundle_folder, self.manifest), raw)
