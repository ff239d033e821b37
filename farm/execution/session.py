"""Bundle + Device -> RawResult: stage the files, run the runner, collect what it left. No judgement."""

from __future__ import annotations

import os
import time
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from farm.errors import DeviceError, DeviceTimeoutError
from farm.execution.raw import ETDUMP_FILE, RESULT_FILE, RawResult

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farm.build.bundle import Bundle
    from farm.devices.transport import Transport
    from farm.runtime.runtime import Runtime

# Where an ordinary adb user may write and execute; everything of the farm is below.
DEVICE_ROOT = PurePosixPath("/data/local/tmp/farm")

_STDERR_BYTES = 64 * 1024
_RESULT_BYTES = 1 << 20
# An ETDump of a whole model with per-operator events is a few MB.
_ETDUMP_BYTES = 256 << 20
_SHELL_SECONDS = 30.0
_COMPLETE = ".complete"


class RunnerOptions:
    """How often the runner executes each sample, and its runtime options."""

    def __init__(
        self, *, iterations: int = 3, warm_up: int = 1, timeout_s: float = 300.0, flags: Mapping[str, str] | None = None
    ) -> None:
        self.iterations, self.warm_up, self.timeout_s = iterations, warm_up, timeout_s
        self.flags = dict(flags or {})


class DeviceSession:
    """What one worker does on one device: the runtime is staged once, every job gets a workspace of its own."""

    def __init__(self, transport: Transport, runtime: Runtime, run_id: str, serial: str) -> None:
        self._transport, self._runtime, self._serial = transport, runtime, serial
        self._runtime_folder = DEVICE_ROOT / f"runtime-{runtime.digest[:16]}"
        # With the process id, as a worker that replaces one that died must not meet what that left.
        self._workspace = DEVICE_ROOT / f"run-{run_id}-{os.getpid()}"
        self._count = 0
        self._staged = False

    def stage_runtime(self) -> None:
        """Push runner and libraries unless they are there. Raises DeviceError."""
        if self._staged:
            return
        marker = self._runtime_folder / _COMPLETE
        if self._transport.run(["test", "-e", str(marker)], timeout_s=_SHELL_SECONDS).code != 0:
            # Pushed beside and renamed, so that a broken push or a second user never shows half a runtime.
            partial = self._runtime_folder.with_name(f"{self._runtime_folder.name}.{time.time_ns():x}")
            files: dict[PurePosixPath, Path | bytes] = {
                partial / name: path for name, path in self._runtime.files.items()
            }
            files[partial / _COMPLETE] = b""
            self._transport.push(files)
            self._check(["chmod", "755", str(partial / self._runtime.runner)])
            moved = self._transport.run(["mv", "-T", str(partial), str(self._runtime_folder)], timeout_s=_SHELL_SECONDS)
            if moved.code != 0:
                self._transport.run(["rm", "-rf", str(partial)], timeout_s=_SHELL_SECONDS)
                # Another session may have been faster; anything else is an error.
                self._check(["test", "-e", str(marker)])
        self._staged = True

    def execute(self, job_id: str, bundle: Bundle, folder: Path, options: RunnerOptions) -> RawResult:
        """Run `bundle` once and leave what came back in the local `folder`, which is made.

        Never raises for what the device does: a DeviceError becomes `error` and `error_stage` of the result.
        """
        folder.mkdir(parents=True, exist_ok=True)
        started_ms = time.time_ns() // 1_000_000
        clock = _Clock()
        stage = "push"
        code: int | None = None
        stderr, error, timed_out = "", "", False
        self._count += 1
        workspace = self._workspace / str(self._count)
        try:
            self.stage_runtime()
            self._transport.push(_workspace_files(bundle, workspace))
            clock.lap("push")
            stage = "execute"
            try:
                done = self._transport.run(
                    self._command(options),
                    cwd=workspace,
                    env={"LD_LIBRARY_PATH": str(self._runtime_folder), "ADSP_LIBRARY_PATH": str(self._runtime_folder)},
                    timeout_s=options.timeout_s,
                )
                code, stderr = done.code, _text(done.stderr + done.stdout)
            except DeviceTimeoutError as timeout:
                timed_out, stderr = True, str(timeout)
            clock.lap("execute")
            stage = "pull"
            if not timed_out:
                self._collect(bundle, workspace, folder)
            self._transport.run(["rm", "-rf", str(workspace)], timeout_s=_SHELL_SECONDS)
            clock.lap("pull")
        except DeviceError as problem:
            clock.lap(stage)
            error = str(problem)
        return RawResult(
            job_id=job_id,
            serial=self._serial,
            folder=folder,
            started_ms=started_ms,
            exit_code=code,
            stderr=stderr,
            push_seconds=clock.seconds.get("push", 0.0),
            run_seconds=clock.seconds.get("execute", 0.0),
            pull_seconds=clock.seconds.get("pull", 0.0),
            timed_out=timed_out,
            error=error,
            error_stage=stage if error else "",  # type: ignore[arg-type]
        )

    def close(self) -> None:
        """Remove the workspaces of this run from the device. A device that does not answer keeps them."""
        try:
            self._transport.run(["rm", "-rf", str(self._workspace)], timeout_s=_SHELL_SECONDS)
        except DeviceError:
            return

    def _command(self, options: RunnerOptions) -> list[str]:
        flags = {
            "model_path": "model.pte",
            "input_list_path": "input_list.txt",
            "output_folder_path": "outputs",
            "etdump_path": ETDUMP_FILE,
            "result_path": RESULT_FILE,
            "iteration": str(options.iterations),
            "warm_up": str(options.warm_up),
            **options.flags,
        }
        runner = str(self._runtime_folder / self._runtime.runner)
        return [runner, *(f"--{name}={value}" for name, value in flags.items())]

    def _collect(self, bundle: Bundle, workspace: PurePosixPath, folder: Path) -> None:
        # Only names that we chose; one listing tells which of them are there.
        sizes: dict[str, int] = {RESULT_FILE: _RESULT_BYTES, ETDUMP_FILE: _ETDUMP_BYTES}
        for sample in range(bundle.manifest.samples):
            for index, spec in enumerate(bundle.manifest.outputs):
                sizes[f"outputs/output_{sample}_{index}.raw"] = spec.nbytes + 1
        present = self._present(workspace, list(sizes))
        self._transport.pull(
            {workspace / name: folder / PurePosixPath(name).name for name in present},
            max_bytes={workspace / name: sizes[name] for name in present},
        )

    def _present(self, workspace: PurePosixPath, names: list[str]) -> list[str]:
        script = 'for f in "$@"; do [ -f "$f" ] && echo "$f"; done; true'
        listed = self._transport.run(["sh", "-c", script, "sh", *names], cwd=workspace, timeout_s=_SHELL_SECONDS)
        there = set(listed.stdout.decode(errors="replace").split("\n"))
        return [name for name in names if name in there]

    def _check(self, argv: list[str]) -> None:
        done = self._transport.run(argv, timeout_s=_SHELL_SECONDS)
        if done.code != 0:
            raise DeviceError(self._serial, "staging failed", argv=argv, code=done.code, stderr=_text(done.stderr))


def _workspace_files(bundle: Bundle, workspace: PurePosixPath) -> dict[PurePosixPath, Path | bytes]:
    files: dict[PurePosixPath, Path | bytes] = {workspace / "model.pte": bundle.model}
    lines = []
    for sample in range(bundle.manifest.samples):
        paths = bundle.input_files(sample)
        files.update({workspace / path.name: path for path in paths})
        lines.append(" ".join(path.name for path in paths))
    files[workspace / "input_list.txt"] = ("\n".join(lines) + "\n").encode()
    # The runner wants its output folder to exist, and a push makes folders.
    files[workspace / "outputs" / ".keep"] = b""
    return files


def _text(data: bytes) -> str:
    if len(data) > _STDERR_BYTES:
        half = _STDERR_BYTES // 2
        data = data[:half] + b"\n[...]\n" + data[-half:]
    return data.decode("utf-8", errors="replace")


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now
