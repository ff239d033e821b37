"""A job that generates text -> the files of its bundle, by the decoders of ExecuTorch's Qualcomm examples."""

from __future__ import annotations

import gc
import json
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec
import torch

from farm.builds.bundles.bundle import MODEL, Manifest, write_origins
from farm.builds.bundles.key import shares_weights
from farm.builds.compile.flows.compiler import CompiledProgram, settings_of_one_job, write_bundle
from farm.builds.compile.flows.edge_nodes import Delegation, EdgeOrigins, built_operators, read_delegation
from farm.builds.compile.flows.flow import Stopwatch
from farm.builds.compile.flows.qualcomm import backend_type, compiler_specs
from farm.builds.compile.flows.reference import copies, tensor_spec
from farm.builds.compile.flows.shortcuts.every import less_work
from farm.builds.compile.llm import upstream
from farm.builds.compile.llm.greedy import Row, continuation
from farm.builds.compile.llm.ready import generation_for, token_tensors
from farm.builds.compile.llm.upstream import checkpoint_in_use, make_checkpoint
from farm.builds.program.pte import read_pte
from farm.suites.generate import DECODE, PREFILL, find_architecture
from farm.suites.prompts import AskedTokens, asked_of, decoder_params, generate_of, most_scored
from farm.suites.suite import Case, Job

# References of a decoder on the CPU: logits of whole sequences and greedy continuations.


def log_probabilities(logits: torch.Tensor, sequence: Row) -> torch.Tensor:
    """Return float32 [tokens, 2]: by position the log-probability of the next token, and of the likeliest token.

    Both are 0 after the last token, which has no next token.
    """
    every = torch.log_softmax(logits[: len(sequence)].double(), dim=-1)
    found = torch.zeros(len(sequence), 2)
    following = torch.tensor(sequence[1:], dtype=torch.int64)
    found[:-1, 0] = every[:-1].gather(1, following[:, None])[:, 0].float()
    found[:-1, 1] = every[:-1].amax(dim=-1).float()
    return found


def _position_axes(caches: Sequence[torch.Tensor]) -> list[int]:
    """Return the axis of positions of each cache: keys are first, [1,H,D,C], and values follow, [1,H,C,D]."""
    layers = len(caches) // 2
    return [3] * layers + [2] * layers


class EagerDecoder:
    """FP32 decoder, at the cost of the given tokens alone; each position attends to the positions before it."""

    def __init__(self, module: torch.nn.Module, inference: Any, masks: Sequence[torch.Tensor]) -> None:
        """Take ExecuTorch's `inference`, with positions and empty caches, and the `masks` of a full context."""
        self._module, self._inference, self._masks = module, inference, masks

    def logits(self, tokens: Row) -> torch.Tensor:
        """Return float32 [tokens, vocabulary]."""
        return self._step(tokens, 0, self._no_caches())[0]

    def continuation(self, prompt: Row, most: int, stop: Sequence[int]) -> Row:
        """Return the greedy continuation of `prompt`: at most `most` tokens, a stop token last."""
        caches, start, pending, found = self._no_caches(), 0, prompt, list[int]()
        while len(found) < most and not (found and found[-1] in stop):
            logits, caches = self._step(pending, start, caches)
            start += len(pending)
            found.append(int(logits[-1].argmax()))
            pending = (found[-1],)
        return tuple(found)

    def _no_caches(self) -> list[torch.Tensor]:
        return [*self._inference._k_caches, *self._inference._v_caches]  # noqa: SLF001 - no other name

    def _step(self, tokens: Row, start: int, caches: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        end = start + len(tokens)
        masks = (mask[:, :, start:end, :end] for mask in self._masks)
        positions = self._inference.pos_ids[:1, start:end]
        given = (torch.tensor([tokens], dtype=torch.int32), *masks, positions, *caches)
        logits, keys, values = self._module(*copies(given))
        new = [*keys, *values]
        axes = _position_axes(caches)
        grown = [torch.cat(pair, dim=axis) for axis, *pair in zip(axes, caches, new, strict=True)]
        return logits[0].to(torch.float32, copy=True), grown


class QuantizedDecoder:
    """Quantized decoder: exported modules of fixed sizes, one for the whole context and one for the last token.

    The module for the last token has the tokens before it in caches. It computes in another order, which nearly always
    gives the same tokens.
    """

    def __init__(self, decoder: Any, inference: Any, masks: Sequence[torch.Tensor]) -> None:
        """Take ExecuTorch's `decoder`, with the `inference` and the `masks` of a full context."""
        self._whole, self._inference, self._masks = decoder.calibration_prefill.decoder, inference, masks
        self._step, step_inference = decoder.decode.decoder, decoder.decode._decoder_inference  # noqa: SLF001 - no other name
        self._context = step_inference.max_context_len
        self._room = step_inference._k_caches[0].shape[-1]  # noqa: SLF001 - as above
        self._width = self._context - self._room

    def logits(self, tokens: Row) -> torch.Tensor:
        """Return float32 [tokens, vocabulary]."""
        return self._logits_and_columns(tokens)[0][: len(tokens)].float().clone()

    def continuation(self, prompt: Row, most: int, stop: Sequence[int]) -> Row:
        """Return the greedy continuation of `prompt` by the module of the whole context; the other makes the draft."""

        def chosen(tokens: Row) -> list[int]:
            return [int(token) for token in self.logits(tokens).argmax(dim=-1)]

        return continuation(chosen, prompt, most, stop, self._draft(prompt, most, stop) if most > 1 else ())

    def _draft(self, prompt: Row, most: int, stop: Sequence[int]) -> Row:
        logits, columns = self._logits_and_columns(prompt)
        found = [int(logits[len(prompt) - 1].argmax())]
        caches = [
            one.narrow(axis, 0, self._room).clone(memory_format=torch.contiguous_format)
            for axis, one in zip(_position_axes(columns), columns, strict=True)
        ]
        while len(found) < most and found[-1] not in stop:
            found.append(self._after(found[-1], len(prompt) + len(found) - 1, caches))
        return tuple(found)

    def _logits_and_columns(self, tokens: Row) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the logits, and the keys and values of every position."""
        padded = torch.zeros(1, self._masks[0].shape[-1], dtype=torch.int32)
        padded[0, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        logits, keys, values = self._whole(*copies(self._inference.get_inputs(padded, self._masks)))
        return torch.as_tensor(logits)[0], [*keys, *values]

    def _after(self, token: int, done: int, caches: Sequence[torch.Tensor]) -> int:
        """Return the token after `token`, which has `done` tokens before it, and add its keys and values to the caches.

        In a step of several tokens, no position attends to the padding behind the first.
        """
        tokens = torch.zeros(1, self._width, dtype=torch.int32)
        tokens[0, 0] = token
        positions = torch.arange(done, done + self._width, dtype=torch.int32).clamp_(max=self._context - 1)[None]
        steps = []
        for mask in self._masks:
            step = torch.full((1, 1, self._width, self._context), float(mask.min()))
            step[0, 0, 0, :done] = mask[0, 0, done, :done]
            step[0, 0, 0, self._room] = mask[0, 0, done, done]
            steps.append(step)
        logits, keys, values = self._step(*copies((tokens, *steps, positions, *caches)))
        if done < self._room:
            for axis, cache, one in zip(_position_axes(caches), caches, [*keys, *values], strict=True):
                cache.narrow(axis, done, 1).copy_(one.narrow(axis, 0, 1))
        return int(logits[0, 0].argmax())


# Offset that keeps the seeds of calibration data apart from the seeds of prompts.
_CALIBRATION = 999
_PTE = "decoder"
_MOST_CALIBRATION = 16


def compile_text_job(job: Job, key: str, versions: Mapping[str, str], folder: Path) -> Manifest:
    """Write the bundle of `job` into the empty `folder`, the manifest last. The compiler's exceptions pass through."""
    watch = Stopwatch()
    try:
        with torch.no_grad(), settings_of_one_job(), tempfile.TemporaryDirectory(dir=Path.cwd()) as work:
            program = _compile(job, versions, folder, Path(work), watch)
    finally:
        # torch keeps traced graphs, and with them all weights of a large decoder.
        torch._dynamo.reset()  # noqa: SLF001 - torch has no other name
        gc.collect()
    return write_bundle(job, key, versions, folder, program, watch)


def _compile(job: Job, versions: Mapping[str, str], folder: Path, work: Path, watch: Stopwatch) -> CompiledProgram:
    case = job.case
    decoder = make_decoder(job, work)
    asked = _asked(case)
    prompts, given = asked.prompts, asked.scored
    with watch.step("reference"):
        references = ReferenceDecoder(decoder, case)
        continued = references.continuations(references.fp32, prompts)
    with watch.step("quantize"):
        rows = _calibration(case, prompts, given, continued)
        decoder.process(_request("quantize", job, _specs(job, versions), decoder, rows))
    with watch.step("quantized_reference"):
        generated = references.quantized(prompts, given, continued)
    # The modules must be freed before the backend allocates its own memory.
    del references
    hooks = _LoweringHooks(case, folder, watch)
    with built_operators() as operators, less_work(), hooks.installed(decoder):
        decoder.process(_request("compile", job, _specs(job, versions), decoder, rows))
    (work / f"{_PTE}.pte").replace(folder / MODEL)
    del decoder
    program = read_pte(folder / MODEL)
    generation = generation_for(case, program, asked, generated.scored, generated.tokens)
    method = program.method(DECODE, "the mode of its case")
    delegations = hooks.delegations.values()
    # With a separate method for prompts, the outputs of both methods are compared. Sequences for likelihoods may be
    # long, and have one output.
    times = 2 if generation.prefill and generation.likelihoods is None else 1
    return CompiledProgram(
        references={kind: [(rows,) * times for rows in samples] for kind, samples in generated.logits.items()},
        inputs=token_tensors(prompts, generated.scored),
        outputs=(tensor_spec(generated.logits["fp32"][0]),) * times,
        delegates=method.partitions,
        delegated_ops=sum(one.delegated_ops for one in delegations),
        fallback_ops=dict(sum((Counter(one.cpu_ops) for one in delegations), Counter[str]())),
        operators=dict(operators),
        method=DECODE,
        method_index=method.index,
        features=(*case.features.named, *(("use_weight_sharing",) if shares_weights(job, versions) else ())),
        spill_fill_bytes=hooks.spill_fill_bytes,
        generation=generation,
    )


def make_decoder(job: Job, work: Path) -> Any:
    """Return ExecuTorch's decoder of `job`, with its weights; its files are in `work`."""
    case, precision = job.case, job.target.precision
    generate = generate_of(case)
    architecture = find_architecture(generate.architecture)
    params = work / "params.json"
    params.write_text(json.dumps(decoder_params(case)), encoding="utf-8")
    arguments = upstream.arguments(generate, architecture, params)
    config = upstream.configuration(
        architecture, precision, case.features.split or 1, hugging_face=bool(generate.hugging_face)
    )
    checkpoint = make_checkpoint(case, config, arguments, work)
    with checkpoint_in_use(case, arguments, checkpoint):
        return upstream.wrappers.HybridTextDecoder(arguments, config)


class _ReferenceResults(NamedTuple):
    """Results of both references, by prompt."""

    tokens: dict[str, tuple[Row, ...]]
    scored: tuple[Row, ...]
    logits: dict[str, list[torch.Tensor]]
    """float32 [longest of scored, vocabulary], 0 after the end of a sequence; for likelihoods
    [longest of scored, LIKELIHOOD_COLUMNS]."""


class ReferenceDecoder:
    """Decoder on the CPU: the FP32 module, and the quantized module after the calibration."""

    def __init__(self, decoder: Any, case: Case) -> None:
        whole = decoder.calibration_prefill
        self._decoder, self._case = decoder, case
        self._context = (whole._decoder_inference, tuple(whole.attn_mask))  # noqa: SLF001 - no other name
        self.fp32 = EagerDecoder(whole.decoder, *self._context)

    def continuations(self, decoder: EagerDecoder | QuantizedDecoder, prompts: Sequence[Row]) -> tuple[Row, ...]:
        """Return the tokens that `decoder` generates after each prompt."""
        generate, room = generate_of(self._case), positions_of(self._case)
        # The choices of a question share one prompt, which needs a single continuation. The last token needs no
        # position of its own.
        found = {
            prompt: decoder.continuation(prompt, min(generate.new_tokens, room - len(prompt) + 1), generate.stop)
            for prompt in dict.fromkeys(prompts)
        }
        return tuple(found[prompt] for prompt in prompts)

    def quantized(self, prompts: Sequence[Row], given: Sequence[Row], continued: Sequence[Row]) -> _ReferenceResults:
        """Return the results of both modules; `given` are the sequences to score, () to score the generated tokens."""
        # Compiling sets the encodings again in the same way; without this call the decoder has no scales yet.
        modules = (self._decoder.calibration_prefill.decoder, self._decoder.decode.decoder)
        self._decoder._encoding_override(*modules, override_kv_cache=True)  # noqa: SLF001 - no other name
        quantized = QuantizedDecoder(self._decoder, *self._context)
        tokens = self.continuations(quantized, prompts)
        room = positions_of(self._case)
        scored = tuple(given) or tuple((*prompt, *row)[:room] for prompt, row in zip(prompts, tokens, strict=True))
        logits = {
            kind: [self._rows(decoder.logits(row), row, max(map(len, scored))) for row in scored]
            for kind, decoder in (("fp32", self.fp32), ("quantized", quantized))
        }
        return _ReferenceResults({"fp32": tuple(continued), "quantized": tokens}, scored, logits)

    def _rows(self, logits: torch.Tensor, sequence: Row, longest: int) -> torch.Tensor:
        rows = log_probabilities(logits, sequence) if generate_of(self._case).scores_likelihood else logits
        return torch.nn.functional.pad(rows, (0, 0, 0, longest - len(rows)))


def positions_of(case: Case) -> int:
    """Return how many tokens of one sequence a decoder can take, the widest call of `kv_forward` the last."""
    generate = generate_of(case)
    return generate.context - generate.decode + 1


def _calibration(case: Case, prompts: Sequence[Row], given: Sequence[Row], continued: Sequence[Row]) -> list[Row]:
    """Return the sequences for the calibration: prompts and judged tokens; for drawn weights drawn tokens follow."""
    generate = generate_of(case)
    if generate.scores_likelihood:
        # The beginning of a long text, or the first questions of many, suffices for observers of activations.
        rows = list(given[:_MOST_CALIBRATION])
    else:
        rows = [*given, *((*prompt, *row)[: generate.context] for prompt, row in zip(prompts, continued, strict=True))]
    if generate.weights or generate.hugging_face:
        return rows
    generator = torch.Generator().manual_seed(case.seed + _CALIBRATION)
    vocabulary = int(decoder_params(case)["vocab_size"])
    return [
        (*row, *torch.randint(vocabulary, (generate.context - len(row),), generator=generator).tolist()) for row in rows
    ]


def _specs(job: Job, versions: Mapping[str, str]) -> list[Any]:
    # ExecuTorch's llama.py always splits attention into heads.
    features = msgspec.structs.replace(
        job.case.features, use_mha2sha=True, use_weight_sharing=shares_weights(job, versions)
    )
    return [compiler_specs(job.target, versions, features) for _ in upstream.constants.DECODER_GRAPH_NAMES]


def _request(name: str, job: Job, specs: list[Any], decoder: Any, rows: Sequence[Row]) -> Any:
    constants, kinds = upstream.constants, upstream.components.Request
    batches = []
    if name == "quantize":
        collate = upstream.collators.LLMCalibCollator(
            decoder.calibration_prefill.attn_mask, generate_of(job.case).context
        )
        batches = [collate([(list(row), None)]) for row in rows]
    data = kinds.Data(
        compile_spec=specs,
        pte_filename=_PTE,
        quantization_data=kinds.QuantizationData(calib_loader=batches),
        backend=backend_type(job.target),
        soc_model=job.target.soc,
    )
    # A decoder of text has a single component; the others get no calibration data.
    nothing = kinds.Data(quantization_data=kinds.QuantizationData())
    others = (constants.AUDIO_ENCODER, constants.VISION_ENCODER, constants.TEXT_ENCODER, constants.TOK_EMBEDDING)
    return kinds(name, {**dict.fromkeys(others, nothing), constants.TEXT_DECODER: data})


class _LoweringHooks:
    """Hooks into a lowering that ExecuTorch's examples run as a whole: delegations, spill-fill size and origins."""

    def __init__(self, case: Case, folder: Path, watch: Stopwatch) -> None:
        self.delegations: dict[str, Delegation] = {}
        self._case, self._folder, self._watch = case, folder, watch
        self.spill_fill_bytes: int | None = None

    @contextmanager
    def installed(self, decoder: Any) -> Iterator[None]:
        """Install the hooks while the body compiles `decoder`."""
        wrappers, export = upstream.wrappers, torch.export.export
        calibrated = weakref.ref(decoder.calibration_prefill.decoder)
        lower, share = wrappers.to_edge_transform_and_lower_to_qnn, wrappers.update_spill_fill_size

        def lowered(**given: Any) -> Any:
            with self._watch.step("lower"):
                edge = lower(**given)
            for method in given["module"]:
                self.delegations[method] = read_delegation(edge.exported_program(method).graph_module)
            edge.to_executorch = partial(self._serialize, edge, edge.to_executorch)
            return edge

        def shared(exported: Any) -> Any:
            size = int(share(exported))
            self.spill_fill_bytes = max(size, self.spill_fill_bytes or 0)
            return size

        def exported(module: torch.nn.Module, *given: Any, **named: Any) -> Any:
            return None if module is calibrated() else export(module, *given, **named)

        with (
            patch.object(wrappers, "to_edge_transform_and_lower_to_qnn", lowered),
            patch.object(wrappers, "update_spill_fill_size", shared),
            # ExecuTorch would save the quantized decoder for its own evaluation: gigabytes for a large decoder.
            patch.object(torch.export, "export", exported),
            patch.object(torch.export, "save", lambda *_: None),
        ):
            yield

    def _serialize(self, edge: Any, serialize: Callable[[Any], Any], config: Any) -> Any:
        with self._watch.step("serialize"):
            origins = EdgeOrigins(edge, self._case, DECODE)
            program = serialize(config)
            write_origins(self._folder, origins.of(program))
        return program


def _asked(case: Case) -> AskedTokens:
    generate = generate_of(case)
    prefill = generate.prefill if PREFILL in generate.methods else 0
    most = most_scored(context=generate.context, prefill=prefill, decode=generate.decode)
    return asked_of(case, most, int(decoder_params(case)["vocab_size"]))
