"""ExecuTorch's text generator `qnn_llama_runner`, built by the user.

A process takes one prompt. The first process gives times and writes no logits; a second one writes the logits from
which tokens are read, because the program prints none; a third takes a scored sequence as its prompt, so that its
logits belong to that text. The program writes logits of `kv_forward` alone (ExecuTorch 1.5).
More: docs/guides/language_models.md.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from farm.base.errors import DeviceError
from farm.base.text import clean_text, count_of
from farm.builds.bundles.bundle import MODEL, Bundle, Generation, read_tensor
from farm.builds.bundles.generation import NO_TOKEN
from farm.builds.runtime.runtime import LLAMA_RUNNER
from farm.devices.execution.raw import Observed, ObservedError, read_observed
from farm.devices.execution.runner_process import NOTHING, OneShot, answered, refusal, report_of

if TYPE_CHECKING:
    from farm.devices.execution.runner_process import RunnerEnding

TOKENIZER = "tokenizer"
"""The folder of the runtime that has it, alone."""

LOGITS = np.dtype("<u2")
"""Type of the logits in its files, for every program."""
OWN_FLAGS = frozenset(
    ("model_path", "tokenizer_path", "tokenized_prompt", "prompt", "seq_len", "eval_mode", "temperature",
     "output_path", "performance_output_path", "dump_logits_path", "num_iters")
)  # fmt: skip
"""Flags that farm sets."""
_KV, _HYBRID = "0", "1"
_SHELL_SECONDS = 30.0


class Dumped(msgspec.Struct, frozen=True):
    """Part of the report that only such a job has; written on this machine."""

    observed: tuple[Observed, ...] = ()
    """Observed times by prompt."""
    notes: tuple[str, ...] = ()


class _EndedError(Exception):
    """A process that was no success."""

    def __init__(self, ending: RunnerEnding) -> None:
        super().__init__()
        self.ending = ending


def ids_of(bundle: Bundle, sample: int, index: int) -> tuple[int, ...]:
    """Return a prompt (0) of a bundle, or the sequence that is scored (1). Raises OSError, ValueError."""
    found = read_tensor(bundle.input_files(sample)[index], bundle.manifest.inputs[index]).ravel()
    return tuple(token for token in map(int, found) if token != NO_TOKEN)


def run_prompts(job: OneShot) -> RunnerEnding:
    """Generate after each prompt of a bundle, and return how that ended, with the logits in the workspace.

    The time limit of the job is for all prompts together. Raises DeviceError.
    """
    runs = _Runs(job)
    manifest, generation = job.workspace.bundle.manifest, job.workspace.bundle.manifest.generation
    if generation is None:
        return answered(NOTHING, report_of(1, error=_refused(f"{LLAMA_RUNNER} does nothing but generate text")))
    generated: list[dict[str, Any]] = []
    observed: list[Observed] = []
    notes: list[str] = []
    try:
        for sample in range(manifest.samples):
            tokens, observation = runs.generate(generation, sample)
            if len(tokens) != observation.generated_tokens + 1:
                # With its prompt taken in one piece it may well choose others.
                notes.append(
                    f"prompt {sample}: {observation.generated_tokens + 1} tokens were timed, and {len(tokens)} chosen "
                    f"where logits were written"
                )
            generated.append(_entry(generation, sample, tokens))
            observed.append(observation)
            if manifest.outputs:
                runs.score(sample, f"output_{sample}_0.raw", generation.vocabulary)
    except _EndedError as ended:
        return ended.ending
    shapes = [{"shape": one.shape, "dtype": one.dtype, "nbytes": one.nbytes} for one in manifest.outputs[:1]]
    inferences = [{"line": sample, "iterations_ns": [], "untimed": 1} for sample in range(manifest.samples)]
    report = report_of(
        0, load_ns=None, outputs=shapes, inferences=inferences, generated=generated, observed=observed, notes=notes
    )
    return answered(runs.ending, report)


def _entry(generation: Generation, sample: int, tokens: list[int]) -> dict[str, Any]:
    """Return the report entry of one prompt; the tokenizer alone knows the end token of the text."""
    stop = next((place + 1 for place, token in enumerate(tokens) if token in generation.stop), 0)
    tokens = tokens[:stop] if stop else tokens
    prompt, ended = generation.prompt_tokens[sample], "stop"
    if not stop and len(tokens) == generation.new:
        ended = "new"
    elif not stop and prompt + len(tokens) >= generation.context:
        ended = "context"
    return {"line": sample, "prompt_tokens": prompt, "tokens": tokens, "ended": ended}


def _refused(message: str) -> dict[str, str]:
    return {"stage": "execute", "message": message}


class _Runs:
    """The processes of one job."""

    def __init__(self, job: OneShot) -> None:
        self._job, self._transport, self._workspace = job, job.transport, job.workspace
        self._deadline = time.monotonic() + job.options.timeout_s
        self.ending = NOTHING
        """Ending of the last process."""

    def generate(self, generation: Generation, sample: int) -> tuple[list[int], Observed]:
        """Return the tokens after a prompt, and the times of another process that wrote no logits.

        Raises DeviceError where the logits do not arrive whole.
        """
        prompt = ids_of(self._workspace.bundle, sample, 0)
        length = min(len(prompt) + generation.new, generation.context)
        times = self._run(prompt, length, mode=_HYBRID if generation.prefill else _KV)
        dump = f"generated_{sample}.raw"
        observation = self._run(prompt, length, dump=dump)
        rows = len(prompt) + observation.generated_tokens
        size = rows * generation.vocabulary * LOGITS.itemsize
        self._require_size(dump, size)
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder) / dump
            self._transport.pull({self._workspace.folder / dump: local}, max_bytes=size + 1)
            if (arrived := local.stat().st_size) != size:
                # The program wrote all of them: the connection is at fault.
                raise DeviceError(self._transport.serial, f"{dump} arrived with {arrived} bytes, and has {size}")
            logits = np.fromfile(local, LOGITS)
        self._transport.run(["rm", "-f", dump], cwd=self._workspace.folder, timeout_s=_SHELL_SECONDS)
        return logits.reshape(rows, -1)[len(prompt) - 1 :].argmax(axis=1).tolist(), times

    def score(self, sample: int, dump: str, vocabulary: int) -> None:
        """Leave the logits of the sequence that is scored in the workspace."""
        tokens = ids_of(self._workspace.bundle, sample, 1)
        self._run(tokens, len(tokens) + 1, dump=dump)
        self._require_size(dump, len(tokens) * vocabulary * LOGITS.itemsize)

    def _run(self, prompt: tuple[int, ...], length: int, *, mode: str = _KV, dump: str = "") -> Observed:
        """Run a process to its end, with a text of `length` tokens in all. Raises _EndedError."""
        folder = self._workspace.folder
        self._transport.push({folder / "prompt.raw": np.array(prompt, "<u8").tobytes()})
        runtime = self._job.runtime
        [tokenizer] = (name for name in runtime.files if name.startswith(f"{TOKENIZER}/"))
        flags = {
            "model_path": MODEL, "tokenizer_path": str(self._job.libraries / tokenizer),
            "tokenized_prompt": "prompt.raw", "seq_len": str(length), "eval_mode": mode, "temperature": "0",
            "output_path": "text.txt", "performance_output_path": "speed.txt",
            **({"dump_logits_path": dump} if dump else {}),
        }  # fmt: skip
        started = time.monotonic()
        left_s = max(0.0, self._deadline - started)
        self.ending = ending = self._job.run(0, ".", flags | runtime.flags, left_s)
        if ending.code is None:
            raise _EndedError(ending)
        if ending.code != 0:
            report = refusal(ending.stderr, ending.code)
            raise _EndedError(ending if report is None else answered(ending, report))
        try:
            # The program returns 0 also after an error.
            return read_observed(ending.stderr, len(prompt), length - len(prompt), time.monotonic() - started)
        except ObservedError as error:
            raise self._failed(f"{error}, and ended with 0") from None

    def _require_size(self, name: str, size: int) -> None:
        done = self._transport.run(
            ["sh", "-c", 'wc -c <"$1"', "sh", name], cwd=self._workspace.folder, timeout_s=_SHELL_SECONDS
        )
        found = count_of(done.stdout.decode(errors="replace").strip()) if done.code == 0 else 0
        if found != size:
            raise self._failed(f"it wrote {found or 'no'} bytes of logits, expected {size}")

    def _failed(self, problem: str) -> _EndedError:
        words = [line for line in self.ending.stderr.splitlines() if line.strip() and "PyTorchObserver" not in line]
        last = f": {clean_text(words[-1], 200)}" if words else ""
        return _EndedError(answered(self.ending, report_of(1, error=_refused(f"{problem}{last}"))))
