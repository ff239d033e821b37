"""`farm suites published`."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from farm.base.errors import UsageError
from farm.cli.options import FOLDER
from farm.cli.output import show


@click.command("published", short_help="Make a suite of published decoders that you have.")
@click.argument("folder", type=FOLDER)
@click.option("--checkpoints", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True,
              help="Where Hugging Face folders are, each with config.json, *.safetensors and tokenizer.")  # fmt: skip
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="The first test page of wikitext, as its data set has it: for perplexity.")  # fmt: skip
@click.option("--task", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="hellaswag in lm-eval's YAML, for decoders that have a limit of accuracy.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def published_command(folder: Path, checkpoints: Path, text: Path | None, task: Path | None, *, as_json: bool) -> None:
    """Make FOLDER a suite of the published decoders whose weights you have.

    They are known by their sizes. Each has ExecuTorch's own limits: tokens a
    second and size on SM8650 and SM8750, SQNR against FP32, and with --text
    and --task perplexity and accuracy. Weights stay where they are.

    \b
    farm suites published ./published --checkpoints ~/models --text wiki.txt
    farm run --soc SM8650 --suite ./published/

    Exit codes: 0 written; 2 usage, or there is no such decoder.
    """
    from farm.replay.scripts import publish_folder
    from farm.suites.manifests import load_suite, suite_name
    from farm.suites.published.checkpoints import find_checkpoints
    from farm.suites.published.manifest import ToldFiles, write_published

    name, told = suite_name(folder), ToldFiles(text, task)
    found = find_checkpoints(checkpoints, told)
    if not found.checkpoints:
        why = "; ".join(found.left_out) or "no folder in it has a config.json"
        raise UsageError(f"{checkpoints}: no published decoder: {why}. docs/guides/language_models.md lists them")

    def fill(place: Path) -> None:
        write_published(place, name, found.checkpoints, told)

    publish_folder(folder, fill)
    suite = load_suite(folder / "suite.toml")
    lines = [
        *(f"{one.name}: {one.architecture.name}, {one.folder}" for one in found.checkpoints),
        *(f"left out: {reason}" for reason in found.left_out),
        f"{folder}: {len(suite.cases)} cases; run them: farm run --soc SM8650 --suite {shlex.quote(f'{folder}/')}",
    ]
    answer = {
        "folder": str(folder),
        "cases": [case.name for case in suite.cases],
        "checkpoints": [
            {"name": one.name, "architecture": one.architecture.name, "folder": str(one.folder)}
            for one in found.checkpoints
        ],
        "left_out": found.left_out,
    }
    show(answer, lines, as_json=as_json)
