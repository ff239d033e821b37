"""Requests of `farm perf compare`: sides, and refusals before anything is compiled."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from executorch_checkout import make_repository
from in_process import refused

from farm.base.config.settings import load_config
from farm.base.errors import UsageError
from farm.numbers.compare.building import shares
from farm.numbers.compare.request import ComparisonRequest, SideRequest, config_of, jobs_of_side, own_options, sides_of


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        # Once is for both sides, twice for A and B.
        ((("main",), ("2.49", "2.51"), ()), ("main, QNN 2.49", "main, QNN 2.51")),
        ((("1.4.1", "1.5.1"), (), ()), ("1.4.1", "1.5.1")),
        (((), (), ("", "use_dlbc=true")), ("default", "use_dlbc=true")),
    ],
)
def test_names_of_the_sides(arguments: tuple[tuple[str, ...], ...], names: tuple[str, str]) -> None:
    toolchains, qnns, options = arguments
    assert tuple(side.name for side in sides_of(toolchains, qnns, options, "", "")) == names


def test_the_gate_of_a_pull_request_compares_a_commit_with_the_checkout_as_it_is() -> None:
    a, b = sides_of((), (), (), ".", "origin/main")
    assert (a.toolchain, a.base, b.toolchain, b.base) == (str(Path.cwd()), "origin/main", str(Path.cwd()), "")


def test_a_checkout_and_its_commit_differ_in_nothing_but_their_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARM_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "executorch"
    make_repository(folder, {"exir/__init__.py": "", "backends/x.py": "", ".gitignore": "*.so\n"})
    (folder / "backends/qualcomm/python").mkdir(parents=True)
    (folder / "backends/qualcomm/python/PyQnnManagerAdaptor.so").touch()
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "farm.toml").write_text(
        f'[toolchain.main]\ncheckout = "{folder}"\npython = "/opt/python"\nqnn = "2.49"\nbuild = ["make"]\n'
        f'native = {{ android-arm64 = "{folder}/build" }}\n'
    )
    config = load_config(tmp_path / "farm.toml")
    # The test does not check that a toolchain exists.
    select = "farm.builds.toolchains.select.select"
    monkeypatch.setattr(select, lambda config, toolchain: msgspec.structs.replace(config, toolchain=toolchain))
    for given in (folder, tmp_path / "link"):
        sides = sides_of((), (), (), str(given), "HEAD")
        asked = ComparisonRequest(sides=sides, socs=("SM8650",), suites=("smoke",))
        a, b = (config_of(config, asked, side).toolchain for side in sides)
        assert (b.name, b.checkout, b.python, b.qnn) == (str(given), folder, Path("/opt/python"), "2.49")
        assert msgspec.structs.replace(a, name=b.name, checkout=b.checkout) == b


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (((), (), (), "", ""), "both sides are the same"),
        ((("1.5.0", "1.5.0"), (), (), "", ""), "both sides are the same"),
        ((("a", "b", "c"), (), (), "", ""), "--toolchain is given 3 times"),
        (((), (), (), ".", ""), "--checkout DIR and --base COMMIT belong together"),
        (((), (), (), "", "main"), "--checkout DIR and --base COMMIT belong together"),
        ((("a",), (), (), ".", "main"), "leave --toolchain out"),
    ],
)
def test_what_are_no_two_sides_is_refused(arguments: tuple[tuple[str, ...], ...], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        sides_of(*arguments)  # type: ignore[arg-type]


def request(*options: str, common: tuple[str, ...] = ()) -> ComparisonRequest:
    a, b = (SideRequest(options=text) for text in options)
    return ComparisonRequest(sides=(a, b), socs=("SM8650",), suites=("smoke",), options=common, keyword="add")


def test_jobs_have_one_name_on_both_sides_and_their_own_options() -> None:
    asked = request("", "use_dlbc=true", common=("htp_performance_mode=burst",))
    a, b = (jobs_of_side(load_config(), asked, side) for side in asked.sides)
    assert list(a) == list(b) == ["smoke/add[SM8650-htp-8a8w-htp_performance_mode=burst]"]
    assert [dict(job.target.options) for side in (a, b) for job in side.values()] == [
        {"htp_performance_mode": "burst"}, {"htp_performance_mode": "burst", "use_dlbc": "true"},
    ]  # fmt: skip
    assert [own_options(asked, side) for side in asked.sides] == [{}, {"use_dlbc": "true"}]


@pytest.mark.parametrize(
    ("options", "common", "problem"),
    [
        (("use_dlbc=true,false", ""), (), "makes 2 targets"),
        (("use_dlbc=true", ""), ("use_dlbc=false",), "use_dlbc is given by --option"),
    ],
)
def test_options_that_are_no_side_are_refused(options: tuple[str, ...], common: tuple[str, ...], problem: str) -> None:
    asked = request(*options, common=common)
    with pytest.raises(UsageError, match=problem):
        jobs_of_side(load_config(), asked, asked.sides[0])


@pytest.mark.parametrize(
    ("builders", "requests", "widths"),
    [(4, (100, 100), [2, 2]), (4, (100, 0), [4, 0]), (4, (100, 1), [3, 1]), (2, (9, 1), [1, 1]), (1, (5, 5), [1, 1])],
)
def test_builders_are_shared_by_how_much_each_side_compiles(
    builders: int, requests: tuple[int, int], widths: list[int]
) -> None:
    assert shares(builders, requests) == widths


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--suite smoke", "both sides are the same"),
        ("--suite smoke --option use_dlbc=true --option use_dlbc=false", "--option is for both sides, --options parts"),
        ("--suite smoke --toolchain nope --toolchain 1.5.0", "unknown toolchain 'nope'"),
        ("--suite smoke --options= --options nope=1", "unknown option of the htp backend 'nope'"),
        ("--suite smoke --options= --options use_dlbc=true --programs-only --max-devices 1", "is for execution"),
    ],
)
def test_mistakes_are_told_with_exit_code_2(words: str, problem: str) -> None:
    assert problem in refused("perf", "compare", *words.split())
