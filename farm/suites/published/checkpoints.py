"""Hugging Face folders -> the published decoders among them, and whether each can stand in a suite. Torch-free."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.base.errors import ConfigError, MissingToolError
from farm.suites.accuracy.tokenizer import NAMES, load_tokenizer, tokenizer_file
from farm.suites.architectures import ARCHITECTURES, SIZES, params_of_hugging_face
from farm.suites.manifests import load_suite
from farm.suites.prompts import HUGGING_FACE_CONFIG
from farm.suites.published.manifest import Checkpoint, ToldFiles, write_published
from farm.suites.published.upstream_limits import PROMPT, UPSTREAM_LIMITS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from farm.suites.architectures import Architecture

# A folder of a model, one of such folders, and a cache of Hugging Face's client.
_PATTERNS = ("", "*/", "*/snapshots/*/")


class _UnusableError(Exception):
    """Why a checkpoint is left out."""


@dataclass
class FoundCheckpoints:
    """What is in a folder of checkpoints."""

    checkpoints: list[Checkpoint] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """What cannot stand in a suite, and why."""


def find_checkpoints(folder: Path, told: ToldFiles) -> FoundCheckpoints:
    """Return the published decoders whose weights are in `folder`, and that a suite may have, told `told` or not.

    Raises MissingToolError where a library is missing that reads their tokenizers.
    """
    found = FoundCheckpoints()
    files = {path.parent.resolve() for pattern in _PATTERNS for path in folder.glob(f"{pattern}{HUGGING_FACE_CONFIG}")}
    for place in sorted(files):
        try:
            checkpoint = _checkpoint(place)
            _try(checkpoint, told)
            found.checkpoints.append(checkpoint)
        except _UnusableError as error:
            found.left_out.append(f"{place}: {error}")
    names = [one.name for one in found.checkpoints]
    taken: set[str] = set()
    for number, one in enumerate(found.checkpoints):
        # Two of one architecture: another training of it.
        wanted = _slug(one.folder.name) if names.count(one.name) > 1 else one.name
        found.checkpoints[number] = replace(one, name=_free(wanted, taken))
        taken |= set(found.checkpoints[number].names)
    found.left_out += _unused(found.checkpoints, told)
    return found


def _checkpoint(folder: Path) -> Checkpoint:
    """Return what is in a folder with a configuration. Raises _UnusableError."""
    config = _config(folder)
    if (architecture := _architecture(config)) is None:
        kind = config.get("model_type")
        raise _UnusableError(f"a {kind!r} of other sizes than the decoders that ExecuTorch has limits for")
    if not any(folder.glob("*.safetensors")):
        raise _UnusableError("no *.safetensors")
    if tokenizer_file(folder) is None:
        raise _UnusableError(f"no {' or '.join(NAMES)}")
    beginning = _beginning(config, int(architecture.params["vocab_size"]))
    return Checkpoint(folder, architecture, _slug(architecture.name), beginning, (*beginning, *_prompt(folder)))


def _config(folder: Path) -> dict[str, Any]:
    try:
        str(folder).encode()
        config = json.loads((folder / HUGGING_FACE_CONFIG).read_bytes())
    except UnicodeEncodeError:
        raise _UnusableError("its path is no UTF-8") from None
    except (OSError, ValueError, RecursionError) as error:
        raise _UnusableError(f"{HUGGING_FACE_CONFIG} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise _UnusableError(f"{HUGGING_FACE_CONFIG} has no JSON object")
    return config


def _prompt(folder: Path) -> list[int]:
    try:
        return load_tokenizer(str(folder), folder)(PROMPT)
    except MissingToolError:
        raise
    except Exception as error:  # the libraries raise whatever a file leads them to
        raise _UnusableError(f"its tokenizer cannot be used: {error}") from error


def _architecture(config: Mapping[str, Any]) -> Architecture | None:
    """Return the published decoder that has the sizes of a configuration."""
    known = [ARCHITECTURES[name] for name in UPSTREAM_LIMITS]
    alike = [one for one in known if config.get("model_type") in one.model_types]
    if not alike:
        return None
    sizes = params_of_hugging_face(config)
    return next((one for one in alike if all(sizes.get(key) == one.params[key] for key in SIZES)), None)


def _beginning(config: Mapping[str, Any], vocabulary: int) -> tuple[int, ...]:
    """Return the token that texts begin with, as lm-eval has it: that of a beginning, else that of an end."""
    for key in ("bos_token_id", "eos_token_id"):
        given = config.get(key)
        for token in given if isinstance(given, list) else [given]:
            if type(token) is int and 0 <= token < vocabulary:
                return (token,)
    return ()


def _try(checkpoint: Checkpoint, told: ToldFiles) -> None:
    """Raise _UnusableError unless a suite can have a checkpoint: it is made, and read."""
    with tempfile.TemporaryDirectory(prefix="farm-suite-") as folder:
        place = Path(folder).resolve() / "published"
        place.mkdir()
        write_published(place, place.name, [checkpoint], told)
        try:
            load_suite(place / "suite.toml")
        except ConfigError as error:
            where = "" if Path(error.path).is_relative_to(place) else f"{error.path}: "
            raise _UnusableError(f"{where}{error.key.removeprefix('case.')}: {error.problem}") from None


def _unused(checkpoints: Collection[Checkpoint], told: ToldFiles) -> list[str]:
    limits = [one.limits for one in checkpoints]
    unused = []
    if told.text is not None and all(one.word_perplexity is None for one in limits):
        unused.append(f"{told.text}: none of these decoders has a limit of perplexity")
    if told.task is not None and all(one.acc_norm is None for one in limits):
        unused.append(f"{told.task}: none of these decoders has a limit of accuracy")
    return unused if checkpoints else []


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")[:50] or "decoder"


def _free(name: str, taken: Collection[str]) -> str:
    """Return a name of which neither case is taken."""
    numbered = (name, *(f"{name}_{number}" for number in range(2, len(taken) + 3)))
    return next(one for one in numbered if not {one, f"{one}_told"} & set(taken))
