"""A `.pte` that generates text and was compiled elsewhere -> the files of its bundle. Without ExecuTorch's examples."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from farm.bundles.bundle import INPUTS, MODEL, TensorSpec
from farm.bundles.generation import DECODE, generation_of, padded
from farm.bundles.ready import features_of, read_ready
from farm.compile.flows.compiler import CompiledProgram, write_manifest, write_tensors
from farm.compile.flows.flow import Stopwatch
from farm.program.pte import read_pte
from farm.suites.prompts import expected_of, generate_of, prompts_of, scored_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from farm.bundles.bundle import Manifest
    from farm.suites.suite import Job

    Tokens = Sequence[Sequence[int]]


def take_ready_text_job(job: Job, key: str, versions: Mapping[str, str], folder: Path) -> Manifest:
    """Write the bundle of `job`, whose case has a `.pte`, into the empty `folder`, the manifest last.

    It has no references: where tokens are expected, these decide. Raises as `read_ready` and `generation_of` do.
    """
    case, watch = job.case, Stopwatch()
    generate, path = generate_of(case), Path(case.folder, case.pte)
    prompts, scored, expected = prompts_of(case), scored_of(case), expected_of(case)
    method = read_ready(msgspec.structs.replace(job, case=msgspec.structs.replace(case, method=DECODE)))
    generation = generation_of(read_pte(path), prompts=prompts, scored=scored, new=generate.new, stop=generate.stop)
    if expected:
        generation = msgspec.structs.replace(generation, tokens={"expected": expected})
    shutil.copyfile(path, folder / MODEL)
    samples = token_tensors(prompts, scored)
    write_tensors(folder / INPUTS, "input", samples)
    logits = TensorSpec((max(map(len, scored), default=0), generation.vocabulary), "float32")
    program = CompiledProgram(
        references={},
        outputs=(logits,) * ((2 if generation.prefill else 1) if scored else 0),
        delegates=method.partitions,
        delegated_ops=None,
        fallback_ops=dict(method.cpu_operators),
        method=method.name,
        method_index=method.index,
        features=features_of(method),
        generation=generation,
    )
    return write_manifest(job, key, versions, folder, samples, program, watch)


def token_tensors(prompts: Tokens, scored: Tokens) -> list[tuple[torch.Tensor, ...]]:
    """Return the samples of a bundle that generates: prompts, and what is scored where anything is."""
    return list(zip(*(map(torch.from_numpy, padded(rows)) for rows in (prompts, scored) if rows), strict=True))
