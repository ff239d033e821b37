from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from made_environments import make_source_tree

from farm.base.config.settings import load_config
from farm.base.errors import ConfigError, UsageError
from farm.dispatch.nightly.plan import Plan, read_plan
from farm.dispatch.request.profiling import Profile

HEAD = '[nightly]\nname = "n"\n'
RUN = '[[run]]\nsocs = ["SM8650"]\nsuites = ["smoke"]\n'
MAIL = '[notify.mail]\nhost = "h"\nfrom = "a@b"\nto = ["c@d"]\n'


@pytest.fixture
def plan_of(tmp_path: Path) -> Callable[[str], Plan]:
    def plan_of(text: str) -> Plan:
        file = tmp_path / "nightly.toml"
        file.write_text(text)
        return read_plan(file, load_config(folder=tmp_path))[0]

    return plan_of


@pytest.fixture
def refused(plan_of: Callable[[str], Plan]) -> Callable[[str], str]:
    def refused(text: str) -> str:
        with pytest.raises(UsageError) as caught:
            plan_of(text)
        return str(caught.value)

    return refused


def test_a_run_is_a_cell_for_each_backend(plan_of: Callable[[str], Plan]) -> None:
    plan = plan_of(
        HEAD + 'budget = "1h30m"\nwait = "0s"\n'
        '[[run]]\nname = "both"\nsocs = ["sm8650", "SM8750"]\nsuites = ["smoke"]\nbackends = ["htp", "xnnpack"]\n'
        '[[run]]\nsocs = ["SM8650"]\nsuites = ["smoke"]\nvirtual = 2\niterations = 7\nkeyword = "add"\nshare = 2\n'
        'profile = "detailed"\nfailed_first = true\ntimeout_s = 60\n'
        '[run.options]\nhtp_performance_mode = ["burst", "balanced"]\n'
    )
    assert [cell.name for cell in plan.cells] == ["both-htp", "both-xnnpack", "smoke-SM8650-htp"]
    assert (plan.budget_s, plan.cells[2].share) == (5400, 2)
    both, on_cpu, virtual = (cell.request for cell in plan.cells)
    assert (both.socs, both.backend, on_cpu.backend) == (("SM8650", "SM8750"), "htp", "xnnpack")
    assert all(cell.request.purpose == "nightly" for cell in plan.cells)
    assert (both.wait_s, virtual.wait_s) == (0, None), "nobody has to wait for virtual devices"
    assert (virtual.iterations, virtual.profile, virtual.failed_first) == (7, Profile.DETAILED, True)
    assert virtual.command == (
        "farm run --soc SM8650 --suite smoke --option htp_performance_mode=burst,balanced --virtual 2 "
        "--iterations 7 --warm-up 1 --timeout 60 --profile detailed -k add --ff"
    )


def test_toolchains_are_an_axis(tmp_path: Path, plan_of: Callable[[str], Plan], refused: Callable[[str], str]) -> None:
    (tmp_path / "farm.toml").write_text('[toolchain.main]\npython = "env/bin/python"\n')
    make_source_tree(tmp_path / "et", "1.5.0", built=True)
    text = 'backends = ["htp", "xnnpack"]\ntoolchains = ["default", "main", "1.4.1", "./et"]\n'
    cells = plan_of(HEAD + RUN + text).cells
    assert [cell.name for cell in cells[::2]] == [
        f"smoke-SM8650-htp-{name}" for name in ("default", "main", "1.4.1", "et")
    ]
    assert [cell.request.toolchain for cell in cells[1::2]] == ["default", "main", "1.4.1", f"{tmp_path}/et"]
    assert "--toolchain 1.4.1 " in cells[4].request.command
    for name, problem in (
        ("man", "run[0]: toolchains: unknown toolchain 'man': did you mean 'main'?"),
        ("1.2.0", "ExecuTorch 1.2.0 is too old"),
        ("./gone", f"{tmp_path}/gone is not there"),
    ):
        assert problem in refused(HEAD + RUN + f'toolchains = ["{name}"]\n')


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "missing required field `nightly`"),
        (HEAD.replace('"n"', '"a/b"') + RUN, "nightly: name 'a/b'"),
        (HEAD + 'budget = "10 parsecs"\n' + RUN, "nightly.budget: is '10 parsecs', expected a time"),
        (HEAD + "keep = 0\n" + RUN, "nightly.keep: Expected `int` >= 1"),
        (HEAD + 'report_url = "https://u:SECRET@host/"\n' + RUN, "nightly.report_url: expected http"),
        (HEAD, "run: [[run]] is missing"),
        (HEAD + "[run]\nsocs = []\n", "run: Expected `array`, got `object`"),
        (HEAD + RUN.replace("8650", "8651"), "run[0]: socs: unknown SoC 'SM8651': did you mean 'SM8650'?"),
        (HEAD + RUN.replace('["SM8650"]', '"SM8650"'), "run[0].socs: Expected `array`, got `str`"),
        (HEAD + RUN.replace("smoke", "smok"), "run[0]: suites: unknown suite 'smok': did you mean 'smoke'?"),
        (HEAD + RUN + 'backends = ["htpx"]\n', "run[0]: backends: unknown backend 'htpx': did you mean 'htp'?"),
        (HEAD + RUN + 'precisions = ["8a9w"]\n', "run[0]: precisions: unknown precision '8a9w'"),
        (HEAD + RUN + "share = 0\n", "run[0].share: Expected `float` > 0"),
        (HEAD + RUN + RUN + 'backend = "htp"\n', "run[1]: unknown key 'backend': did you mean 'backends'?"),
        (HEAD + RUN + 'virtual = 1\ndevices = ["desk"]\n', "run[0]: devices: for attached devices, not for virtual"),
        (HEAD + RUN + 'timeout_s = "0s"\n', "run[0].timeout_s: is '0s', expected seconds"),
        (
            HEAD + RUN + 'options = { htp_performance_mod = "burst" }\n',
            "htp: unknown option of the htp backend 'htp_perf",
        ),
        (
            HEAD + RUN + 'name = "b"\nkeyword = "add and ("\n',
            "run[0] (b): htp: pytest does not understand -k add and (",
        ),
        (HEAD + RUN + '[export]\nfolder = "x"\nformats = ["xml"]\n', "export.formats: unknown format 'xml'"),
        (HEAD + RUN + "[notify.post]\n", "notify: unknown key 'post'"),
        (HEAD + RUN + "[extra]\n", "unknown key 'extra': did you mean 'export'?"),
        (HEAD + RUN + RUN, "another [[run]] is called smoke-SM8650-htp as well: give it a name"),
        (HEAD + RUN + 'name = "../x"\n', "name '../x'"),
        (HEAD + RUN.replace("smoke", "./gone"), "No such file"),
        (HEAD + RUN + "heap = true\nwarm_up = 1\n", "heap times nothing: leave warm_up out"),
        (HEAD + RUN.replace("SM8650", "SM8450") + 'backends = ["lpai"]\n', "has no lpai backend"),
        (HEAD + RUN + 'toolchains = ["~no-such-user/et"]\n', "~no-such-user/et: there is no such home"),
        (HEAD + 'report_dir = "~no-such-user/et"\n' + RUN, "~no-such-user/et: there is no such home"),
        (HEAD + RUN + "[[notify.webhook]]\n", "expected url_env or url_file"),
        (HEAD + RUN + '[[notify.webhook]]\nurl_env = "https://x/SECRET"\n', "no name of an environment variable"),
        (HEAD + RUN + '[[notify.webhook]]\nurl = "https://x/SECRET"\n', "unknown key 'url': did you mean 'url_env'?"),
        (HEAD + RUN + '[[notify.webhook]]\nurl_env = "A"\ntemplate = "gone.j2"\n', "farm has json and slack"),
        (HEAD + RUN + MAIL.replace("c@d", "c@d\\nBcc: e@f"), "is no address"),
        (HEAD + RUN + MAIL + 'user_env = "U"\n', "go together"),
        (HEAD + RUN + MAIL + 'user_env = "U"\npassword_env = "P"\nstarttls = false\n', "would be sent in the clear"),
    ],
)
def test_what_cannot_be_is_said(refused: Callable[[str], str], text: str, problem: str) -> None:
    output = refused(text)
    assert problem in output
    assert "SECRET" not in output


def test_broken_toml_is_named_with_its_line(tmp_path: Path, plan_of: Callable[[str], Plan]) -> None:
    with pytest.raises(ConfigError, match="line 3"):
        plan_of(HEAD + 'budget = "1h\n')
    with pytest.raises(UsageError, match="no such file"):
        read_plan(tmp_path / "gone.toml", load_config(folder=tmp_path))


def test_paths_are_beside_the_file(tmp_path: Path, plan_of: Callable[[str], Plan]) -> None:
    (tmp_path / "hook.j2").write_text('{"said": {{ nightly_run.verdict | tojson }} }')
    plan = plan_of(
        HEAD + 'report_dir = "pages"\n' + RUN + '[export]\nfolder = "out"\nformats = ["junit"]\n'
        '[[notify.webhook]]\nurl_file = "url"\ntemplate = "hook.j2"\n'
    )
    assert (plan.report_dir, plan.export_dir) == (tmp_path / "pages", tmp_path / "out")
    assert (plan.webhooks[0].url_file, plan.webhooks[0].template) == (f"{tmp_path}/url", f"{tmp_path}/hook.j2")


def test_a_nightly_run_is_the_same_as_long_as_what_it_runs_is(plan_of: Callable[[str], Plan]) -> None:
    first = plan_of(HEAD + RUN)
    assert plan_of(HEAD + 'budget = "1h"\n' + RUN).digest == first.digest
    assert plan_of(HEAD + RUN + "iterations = 4\n").digest != first.digest
