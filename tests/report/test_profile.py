from __future__ import annotations

import pytest

from farm.report.terminal.profile import change_lines, changes, job_changes, profile_lines
from farm.results.attempt import OperatorProfile
from farm.store.records import ProfileRecord


def node(name: str, p50: float, unit: str = "cycles", *, call: int = 0, spread: float = 0.1) -> OperatorProfile:
    delegate = f"QnnBackend[{call}]"
    return OperatorProfile(name, delegate, unit, 6, p50, p50 * (1 - spread), p50 * (1 + spread), 0.25)


@pytest.mark.parametrize(
    ("before", "after", "paired"),
    [
        (
            [node("a", 1), node("a", 2), node("b", 3), node("a", 4, call=1), node("a", 5, "us")],
            [node("b", 30), node("a", 10), node("a", 20), node("a", 40, call=1), node("a", 50, "us")],
            [("b", 3, 30), ("a", 1, 10), ("a", 2, 20), ("a", 4, 40), ("a", 5, 50)],
        ),
        # A node with another number of QNN is the same node.
        (
            [node("aten_relu_default:OpId_29", 10), node("Input OpId_2", 1), node("kept:OpId_7", 5)],
            [node("aten_relu_default:OpId_31", 20), node("Input OpId_4", 2), node("kept:OpId_7", 6)],
            [("aten_relu_default:OpId_31", 10, 20), ("Input OpId_4", 1, 2), ("kept:OpId_7", 5, 6)],
        ),
        ([node("x", 1), node("y", 2)], [node("y", 2), node("z", 3)], [("y", 2, 2), ("z", None, 3), ("x", 1, None)]),
    ],
)
def test_nodes_are_paired_by_name_and_the_nth_with_the_nth(
    before: list[OperatorProfile], after: list[OperatorProfile], paired: list[tuple[str, float | None, float | None]]
) -> None:
    found = changes(before, after)
    assert [(one.node, one.before and one.before.p50, one.after and one.after.p50) for one in found] == paired


def test_ranges_that_overlap_are_not_told_apart() -> None:
    for before, after, distinct, ratio in ((100, 115, False, 1.15), (100, 150, True, 1.5), (0, 7, True, None)):
        (change,) = changes([node("a", before)], [node("a", after)])
        assert (change.is_distinct, change.ratio) == (distinct, ratio)


LONG = node("quantized_decomposed_quantize_per_tensor_default:OpId_" + "1" * 60, 9e12)
ROWS = [node("small", 1.0), LONG, node("DELEGATE_CALL", 5e9, "ns"), node("whole call: QNN (execute) time", 12.0, "us")]


@pytest.mark.parametrize("width", [80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = profile_lines(ROWS, 20, width) + change_lines(changes(ROWS, ROWS[1:]), 20, width)
    assert max(map(len, lines)) <= width
    assert any("OpId_" in line or "…1111" in line for line in lines)


def test_a_table_is_sorted_by_share_and_says_what_it_leaves_out() -> None:
    lines = profile_lines([node(f"n{n}", n) for n in range(1, 7)], 2)
    assert [line.split()[0] for line in lines] == ["node", "n6", "n5", "4", "all"]
    assert lines[3].split() == ["4", "more", "10", "47.6%"]
    assert lines[-1].split() == ["all", "6", "21"]
    lines = profile_lines([*ROWS, node("\x1b[31mred\u202e", 1)], 20)
    assert "  totals of whole calls, from the delegate" in lines[-2], "which are in no sum"
    assert lines[-1].split() == ["QNN", "(execute)", "time", "QnnBackend[0]", "12", "us"]
    assert "\x1b" not in "".join(lines)


def record(**changes: object) -> ProfileRecord:
    facts: dict[str, object] = {
        "job_id": "s/c[x]", "backend": "htp", "run_id": "before", "time_ms": 1, "facts": {"qnn": "2.50", "farm": "1"},
        "case_version": "v", "device": "phone-1", "device_kind": "hardware", "verdict": "passed",
        "operators": (node("a", 1),), "artifacts": (),
    }  # fmt: skip
    return ProfileRecord(**{**facts, **changes})  # type: ignore[arg-type]


def test_what_else_is_different_is_told() -> None:
    after = record(run_id="after", facts={"qnn": "2.51", "torch": "2"}, case_version="w", device="phone-2")
    (one,) = job_changes([record(), record(job_id="other")], [after, record(job_id="new")])
    assert not one.refused
    assert one.differences == (
        "farm: 1 -> –",  # noqa: RUF001
        "qnn: 2.50 -> 2.51",
        "torch: – -> 2",  # noqa: RUF001
        "device: phone-1 -> phone-2",
        "the case has changed: another test is measured",
    )
    assert job_changes([record()], [record()])[0].differences == ()


BURST, BALANCED = (f"s/c[SM8650-htp-8a8w-htp_performance_mode={mode}-use_dlbc=true]" for mode in ("burst", "balanced"))


def test_the_only_job_of_a_case_and_target_is_compared_whatever_its_options() -> None:
    (one,) = job_changes([record(job_id=BURST)], [record(job_id=BALANCED)])
    assert (one.before_job, one.job_id, one.refused) == (BURST, BALANCED, "")
    (one,) = job_changes([record(job_id="s/c[SM8650-htp-8a8w]")], [record(job_id=BURST)])
    assert (one.before_job, one.job_id) == ("s/c[SM8650-htp-8a8w]", BURST)


def test_jobs_with_other_options_are_not_paired_where_it_could_be_another() -> None:
    both = [record(job_id=BURST), record(job_id=BALANCED)]
    plain = record(job_id="s/c[SM8650-htp-8a8w]")
    assert job_changes(both, [plain]) == []
    assert job_changes([plain], both) == []
    (same,) = job_changes(both, [plain, record(job_id=BURST)])
    assert same.before_job == same.job_id == BURST
    assert job_changes([plain], [record(job_id="s/c[SM8650-htp-16a4w-use_dlbc=true]")]) == []
    assert job_changes([plain], [record(job_id="s/d[SM8650-htp-8a8w-use_dlbc=true]")]) == []


def test_what_cannot_be_compared_is_refused() -> None:
    for changed, reason in (
        ({"device_kind": "virtual"}, "before on hardware device, after on virtual device"),
        ({"operators": ()}, "kept files of it, but no rows"),
        ({"operators": (node("a", 1, "us"),)}, "no unit in common"),
    ):
        (one,) = job_changes([record()], [record(**changed)])
        assert one.refused
        assert reason in one.refused
        assert one.nodes == ()
