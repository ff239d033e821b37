"""A user's text generator on a device, with a stub of it: the end of an execution names the party at fault."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import numpy as np
import pytest
from watched_transport import Watched

import farm
from farm.builds.bundles.bundle import Bundle, Generation, TensorSpec
from farm.builds.runtime.runtime import LLAMA_RUNNER, Runtime
from farm.devices.execution.raw import RunnerOptions
from farm.devices.execution.session import DeviceSession
from farm.results.attempt import Ending, Verdict
from farm.results.outcome import outcome

STUB = Path(farm.__file__).parent.parent / "tests" / "qnn_llama_runner_stub.py"


class ShortTransport(Watched):
    """Transport that loses the end of logits on their way, or adds to them."""

    change = -1

    def pull(self, files: Mapping[PurePosixPath, Path], **options: Any) -> None:
        super().pull(files, **options)
        for path in files.values():
            if path.name.startswith("generated_"):
                content = path.read_bytes()
                path.write_bytes(content[: self.change] if self.change < 0 else content + b"\0" * self.change)


@pytest.mark.parametrize("change", [-2, -1, 1])
def test_logits_of_another_size_than_on_the_device_are_no_failure_of_the_program(
    device_port: tuple[str, int, Path], make_bundle: Callable[..., Bundle], tmp_path: Path, change: int
) -> None:
    program, tokenizer = tmp_path / "program", tmp_path / "tokenizer.json"
    program.write_text(f"#!{sys.executable} -IS\n{STUB.read_text()}")
    tokenizer.write_text(json.dumps({"mode": "fine", "vocabulary": 24}))
    files = {LLAMA_RUNNER: program, "tokenizer/tokenizer.json": tokenizer}
    hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    runtime = Runtime(files, "d" * 64, LLAMA_RUNNER, {}, "simulator", False, hashes, one_shot=True)
    made = make_bundle(b"decoder", [np.array([1, 2, 3], np.int32).tobytes()])
    generation = Generation("kv", 16, 0, 1, 2, 24, 16, 4, prompt_tokens=(3,))
    manifest = msgspec.structs.replace(
        made.manifest, inputs=(TensorSpec((3,), "int32"),), outputs=(), generation=generation, references=()
    )
    transport = ShortTransport(*device_port[:2])
    transport.change = change
    session = DeviceSession(transport, runtime, "r", transport.serial)
    try:
        bundle = msgspec.structs.replace(made, manifest=manifest)
        raw = session.execute("s/c", session.stage(bundle), tmp_path / "raw", RunnerOptions(timeout_s=60))
    finally:
        session.close()
    ending = outcome(raw)
    assert isinstance(ending, Ending), "the tokens of other logits were accepted"
    assert ending.verdict is Verdict.INFRA, ending.reason
    assert f"arrived with {6 * 24 * 2 + change} bytes" in ending.reason
