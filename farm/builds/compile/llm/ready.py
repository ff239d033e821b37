"""A `.pte` that generates text and was compiled elsewhere -> the files of its bundle. Without ExecuTorch's examples."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from farm.builds.bundles.bundle import LIKELIHOOD_COLUMNS, MODEL, Generation, Manifest, TensorSpec
from farm.builds.bundles.generation import generation_of, padded
from farm.builds.bundles.ready import features_of, read_ready
from farm.builds.compile.flows.compiler import CompiledProgram, write_bundle
from farm.builds.compile.flows.factory import read_expected
from farm.builds.compile.flows.flow import Stopwatch
from farm.builds.compile.flows.reference import tensor_spec
from farm.builds.program.pte import Program, read_pte
from farm.suites.generate import DECODE
from farm.suites.prompts import AskedTokens, asked_of, expected_of, generate_of, most_scored
from farm.suites.suite import Case, Job

Tokens = Sequence[Sequence[int]]


def take_ready_text_job(job: Job, key: str, versions: Mapping[str, str], folder: Path) -> Manifest:
    """Write the bundle of `job`, whose case has a `.pte`, into the empty `folder`, the manifest last.

    Expected tokens of the case decide; logits in files replace the reference, which is missing without them. Raises as
    `read_ready` and `generation_of` do, and ConfigError for logits that do not fit.
    """
    case, watch = job.case, Stopwatch()
    path = Path(case.folder, case.pte)
    program = read_pte(path)
    # The sizes of the program count, and not the sizes in the manifest.
    widths = generation_of(program, prompts=(), new=1)
    most = most_scored(context=widths.context, prefill=widths.prefill, decode=widths.decode)
    asked, expected = asked_of(case, most, widths.vocabulary), expected_of(case)
    prompts, scored = asked.prompts, asked.scored
    method = read_ready(msgspec.structs.replace(job, case=msgspec.structs.replace(case, method=DECODE)))
    generation = generation_for(case, program, asked, scored, {"expected": expected} if expected else {})
    shutil.copyfile(path, folder / MODEL)
    columns = generation.vocabulary if asked.likelihoods is None else LIKELIHOOD_COLUMNS
    logits = TensorSpec((max(map(len, scored), default=0), columns), "float32")
    outputs = (logits,) * ((2 if generation.prefill and asked.likelihoods is None else 1) if scored else 0)
    references = {"fp32": read_expected(case)} if case.expected else {}
    for row in references.get("fp32", ()):
        if (specs := tuple(map(tensor_spec, row))) != outputs:
            found, wanted = (", ".join(map(str, one)) for one in (specs, outputs))
            raise case.error("expected", f"are {found}, the program gives {wanted}")
    compiled = CompiledProgram(
        references=references,
        inputs=token_tensors(prompts, scored),
        outputs=outputs,
        delegates=method.partitions,
        delegated_ops=None,
        fallback_ops=dict(method.cpu_operators),
        method=method.name,
        method_index=method.index,
        features=features_of(method),
        generation=generation,
    )
    return write_bundle(job, key, versions, folder, compiled, watch)


def generation_for(
    case: Case, program: Program, asked: AskedTokens, scored: Tokens, tokens: dict[str, tuple[tuple[int, ...], ...]]
) -> Generation:
    """Return the facts of the bundle of `case` with `program`; `tokens` are the continuations by reference."""
    generate, prompts = generate_of(case), asked.prompts
    found = generation_of(program, prompts=prompts, scored=scored, new=generate.new_tokens, stop=generate.stop)
    return msgspec.structs.replace(found, likelihoods=asked.likelihoods, tokens=tokens)


def token_tensors(prompts: Tokens, scored: Tokens) -> list[tuple[torch.Tensor, ...]]:
    """Return the samples of a bundle that generates: prompts, and scored sequences if there are any."""
    return list(zip(*(map(torch.from_numpy, padded(rows)) for rows in (prompts, scored) if rows), strict=True))
