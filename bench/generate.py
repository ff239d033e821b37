"""Cost of text generation beyond the executions of the program: a step of the runner, and a step driven by the host.

    python bench/generate.py            a decoder of two layers on the HTP simulator: minutes, one more to compile it
    python bench/generate.py --quick    a stub of a decoder on the CPU

The production runner is used for both. Its own time of a step is the time between two tokens less the execution: choice
of the token, caches, mask, the file of tokens; the median of many texts. The host's loop has the same program on a
virtual device, and generates the same tokens: each step is a job of a session, as in a run. The loop stages token,
mask, position and caches, requests an execution from a running runner that keeps the program loaded, and pulls logits
and new columns of the caches. Memory is the resident size over 4,000 steps of one process.

The last line is JSON: `loop_overhead_us` a step, `host_loop_ratio` (time of a step from the host to one in the runner),
`rss_growth_bytes_per_1000_tokens`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from collections.abc import Iterator

from made_decoders import compiled, tiny_decoder

from farm.base.hashes import sha256_of
from farm.base.processes import Supervisor
from farm.builds.bundles.bundle import INPUTS, MODEL, Bundle, Manifest, TensorSpec
from farm.builds.program.pte import read_pte
from farm.builds.runtime.runtime import Runtime, simulator_runtime
from farm.devices.adb.server import start_adb_server
from farm.devices.adb.transport import AdbTransport
from farm.devices.execution.raw import RunnerOptions
from farm.devices.execution.session import DeviceSession
from farm.devices.virtual.boot import boot

STEPS = 4000
_MOST_STEPS = 1_000_000
_PROMPT = (3, 1, 4, 1)
# Values of a mask as the runner writes it: for attended positions, and for masked ones.
_MASK = {"float32": (0, -255), "uint8": (255, 0), "uint16": (65535, 0)}


@dataclass(frozen=True)
class Place:
    """A folder with a program, and the runtime beside it."""

    runtime: Runtime
    libraries: Path
    folder: Path
    model: Path

    def start(self, *flags: str, **pipes: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.libraries / "farm_runner"), *flags],
            cwd=self.folder,
            env={"LD_LIBRARY_PATH": str(self.libraries)},
            stderr=(self.folder / "stderr.txt").open("w"),
            text=True,
            **pipes,
        )

    def ended(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """Return the result of a run that must have gone well."""
        code = process.wait()
        assert code == 0, (code, (self.folder / "stderr.txt").read_text(errors="replace")[-2000:])
        result: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return result

    def write_prompts(self, count: int, prompt: tuple[int, ...] = _PROMPT) -> None:
        np.array(prompt, np.int32).tofile(self.folder / "prompt.raw")
        (self.folder / "input_list.txt").write_text("prompt.raw\n" * count)


def generating(new: int, *flags: str) -> list[str]:
    return ["--model_path=model.pte", f"--generate={new}", "--tokens_path=tokens.txt", *flags]


def step_times(generated: dict[str, Any]) -> tuple[float, float]:
    """Return the time of a step of one text, and what of it is not the execution; nanoseconds."""
    steps = len(generated["steps_ns"])
    time_ns = (generated["total_ns"] - generated["first_token_ns"]) / steps
    return time_ns, time_ns - sum(generated["steps_ns"]) / steps


def overhead_us(place: Place, texts: int) -> float:
    place.write_prompts(texts)
    result = place.ended(place.start(*generating(16)))
    overheads = [step_times(one)[1] for one in result["generated"]]
    quarter, median, three = statistics.quantiles(overheads, n=4)
    execution = statistics.median(ns for one in result["generated"] for ns in one["steps_ns"])
    print(
        f"a step of the runner's own: {median / 1e3:.1f} µs (quartiles {quarter / 1e3:.1f} and {three / 1e3:.1f}, "
        f"{texts} texts of 16 tokens) beside {execution / 1e3:,.0f} µs of execution",
        flush=True,
    )
    return median / 1e3


def resident_bytes(process: subprocess.Popen[str]) -> int:
    pages = Path(f"/proc/{process.pid}/statm").read_text().split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if len(pages) > 1 else 0


def growth(place: Place, new: int, steps: int) -> float:
    """Return by how many bytes a process grows in 1000 tokens: the slope of all but the first quarter of `steps`."""
    place.write_prompts(-(-steps // (new - 1)))
    file = place.folder / "tokens.txt"
    file.unlink(missing_ok=True)
    seen: list[tuple[int, int]] = []
    with place.start(*generating(new)) as process:
        while process.poll() is None:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                seen.append((file.read_bytes().count(b" "), resident_bytes(process)))
            time.sleep(0.002)
        generated = place.ended(process)["generated"]
    tokens = sum(len(one["tokens"]) for one in generated)
    # The last samples of an ending process are left out, as it frees its memory.
    kept = np.array([(count, size) for count, size in seen if tokens / 4 < count < tokens and size > 0])
    if len(kept) <= 5 and steps < _MOST_STEPS:
        # A busy machine leaves few samples of a short process.
        return growth(place, new, 4 * steps)
    assert len(kept) > 5, "too fast to be looked at"
    slope = float(np.polyfit(kept[:, 0], kept[:, 1], 1)[0]) * 1000
    print(
        f"resident memory: {kept[0, 1] / 2**20:.2f} MiB after {kept[0, 0]} tokens, {kept[-1, 1] / 2**20:.2f} MiB after "
        f"{kept[-1, 0]}, in texts of {new}",
        flush=True,
    )
    return slope


class HostLoop:
    """Decoder on a virtual device, driven by the host, which keeps mask and caches and stages them with each job."""

    def __init__(self, place: Place, transport: AdbTransport, folder: Path) -> None:
        methods = read_pte(place.model).methods
        index = [method.name for method in methods].index("kv_forward")
        specs, self.outputs = methods[index].inputs, methods[index].outputs
        windows = [method.outputs[0].number for method in methods if method.name == "get_sliding_window"]
        self.window = int(windows[0] or 0) if windows else 0
        self.inputs = [np.zeros(spec.shape, spec.dtype) for spec in specs]
        # Tokens, one mask or two, positions; then keys of all layers, and values.
        self.position = 2 if specs[2].dtype == "int32" else 3
        self.caches = self.inputs[self.position + 1 :]
        self.folder = folder
        (folder / INPUTS).mkdir(parents=True)
        (folder / MODEL).write_bytes(place.model.read_bytes())
        self.manifest = Manifest(
            key="", job_id="step", soc="SM8650", backend="htp", precision="", samples=1,
            inputs=tuple(TensorSpec(spec.shape, spec.dtype) for spec in specs),
            outputs=tuple(TensorSpec(spec.shape, spec.dtype) for spec in self.outputs),
            pte_bytes=place.model.stat().st_size, delegates={}, delegated_ops=None, fallback_ops={}, seconds={},
            versions={}, files={MODEL: sha256_of(place.model)}, method="kv_forward", method_index=index,
        )  # fmt: skip
        self.session = DeviceSession(transport, place.runtime, "bench", transport.serial)
        # QNN stays up, and the program loaded, as a device worker does it with its health check.
        self.session.keep_loaded(self._bundle())

    def _bundle(self) -> Bundle:
        """Return the bundle of a step with its inputs; inputs that are not in the workspace become objects."""
        files = dict(self.manifest.files)
        for number, array in enumerate(self.inputs):
            content = array.tobytes()
            (self.folder / INPUTS / f"input_0_{number}.raw").write_bytes(content)
            files[f"{INPUTS}/input_0_{number}.raw"] = hashlib.sha256(content).hexdigest()
        return Bundle(self.folder, msgspec.structs.replace(self.manifest, files=files))

    def _tokens_and_masks(self, token: int, done: int) -> None:
        self.inputs[0][...] = token
        self.inputs[self.position][...] = done
        for number in range(1, self.position):
            mask = self.inputs[number]
            attends, masked = _MASK[str(mask.dtype)]
            mask[...] = masked
            mask[..., max(0, done + 1 - self.window) if number > 1 else 0 : done] = attends
            mask[..., -1] = attends

    def step(self, token: int, done: int) -> tuple[int, list[float]]:
        """Return the token after `token`, which follows `done` tokens, and the seconds of staging and executing."""
        times = [time.perf_counter()]
        self._tokens_and_masks(token, done)
        workspace = self.session.stage(self._bundle())
        times.append(time.perf_counter())
        pulled = self.folder / "pulled" / str(done)
        raw = self.session.execute("step", workspace, pulled, RunnerOptions(iterations=1, warm_up=0))
        assert not raw.error, raw.error
        logits, *columns = (
            np.fromfile(pulled / f"output_0_{number}.raw", spec.dtype).reshape(spec.shape)
            for number, spec in enumerate(self.outputs)
        )
        for number, (cache, column) in enumerate(zip(self.caches, columns, strict=True)):
            if number < len(columns) // 2:
                cache[..., done : done + 1] = column
            else:
                cache[..., done : done + 1, :] = column
        times.append(time.perf_counter())
        return int(logits.argmax()), np.diff(times).tolist()


def host_loop(place: Place, new: int) -> float:
    """Return the time of a step driven by the host, over the time of a step in the runner."""
    place.write_prompts(3, _PROMPT[:1])
    result = place.ended(place.start(*generating(new, "--prefill_method=")))
    inside = statistics.median(step_times(one)[0] for one in result["generated"])
    tokens, took = [_PROMPT[0]], []
    with tempfile.TemporaryDirectory(prefix="farm-bench-") as name, Supervisor() as supervisor:
        server = start_adb_server(supervisor, Path(name, "adb"))
        [device] = boot(supervisor, server, ["SM8650"], Path(name, "devices"))
        transport = AdbTransport(device.serial, device.address)
        loop = HostLoop(place, transport, Path(name, "steps"))
        while len(tokens) <= new:
            token, times = loop.step(tokens[-1], len(tokens) - 1)
            tokens.append(token)
            took.append([*times, sum(times)])
        loop.session.close()
    assert tokens[1:] == result["generated"][0]["tokens"], "the host's loop says something else"
    stage, execute, outside = np.median(took[1:], axis=0) * 1e3
    print(
        f"a step: {outside:.1f} ms from the host (stage {stage:.1f}, execute and pull {execute:.1f}), "
        f"{inside / 1e6:.3f} ms in the runner",
        flush=True,
    )
    return float(outside * 1e6 / inside)


@contextlib.contextmanager
def placed(cache: Path, model: Path) -> Iterator[Place]:
    """Put a program where it runs, and the runtime beside it."""
    with tempfile.TemporaryDirectory(prefix="farm-bench-") as name:
        libraries, folder = Path(name, "runtime"), Path(name, "work")
        runtime = simulator_runtime(cache)
        for target, path in runtime.files.items():
            (libraries / target).parent.mkdir(parents=True, exist_ok=True)
            (libraries / target).symlink_to(path)
        (folder / "outputs").mkdir(parents=True)
        (folder / "model.pte").write_bytes(model.read_bytes())
        yield Place(runtime, libraries, folder, folder / "model.pte")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a stub on the CPU")
    quick = parser.parse_args().quick
    cache = Path(os.environ.get("FARM_CACHE_DIR") or Path.home() / ".cache" / "farm")
    if quick:
        model, texts, new, stepped = compiled(cache, "compile_decoders.py") / "hybrid.pte", 300, 28, 28
        print("times and memory with a stub of a decoder, in floating point on the CPU; context 32", flush=True)
    else:
        model, texts, new, stepped = tiny_decoder(cache).model, 60, 100, 40
        print("times and memory with llm_tiny's llama, 16a8w, on the HTP simulator; context 128", flush=True)
    with placed(cache, model) as place:
        overhead = overhead_us(place, texts)
        ratio = host_loop(place, stepped)
        grown = growth(place, new, STEPS)
    result = {
        "loop_overhead_us": round(overhead, 1),
        "host_loop_ratio": round(ratio, 1),
        "rss_growth_bytes_per_1000_tokens": round(grown),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
