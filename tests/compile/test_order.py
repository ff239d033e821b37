"""Order in which builders take requests."""

from __future__ import annotations

from collections import deque

from farm.builds.compile.pool import case_of, take_next
from farm.builds.compile.protocol import BuildRequest
from farm.suites.suite import Case, Job, Target


def requests(*names: str) -> deque[BuildRequest]:
    """Return requests by texts of case and precision."""
    made = deque[BuildRequest]()
    for name in names:
        case, precision = name.split()
        job = Job(Case("mine", case, module="any", inputs=()), Target("SM8650", "htp", precision))
        made.append(BuildRequest(job, name, {}, "log"))
    return made


def taken(queue: deque[BuildRequest], builders: int) -> list[list[str]]:
    """Return what each of `builders` compiles if all jobs take equally long."""
    own: list[tuple[str, str] | None] = [None] * builders
    lists: list[list[str]] = [[] for _ in own]
    while queue:
        for number in range(min(builders, len(queue))):
            others = [one for place, one in enumerate(own) if one is not None and place != number]
            request = take_next(queue, own[number], others)
            own[number] = case_of(request)
            lists[number].append(request.key)
    return lists


def test_a_builder_stays_with_its_case_beside_another() -> None:
    queue = requests("add 8a8w", "add 16a8w", "mul 8a8w", "mul 16a8w", "relu 8a8w", "relu 16a8w")
    assert taken(queue, 2) == [
        ["add 8a8w", "add 16a8w", "relu 8a8w"],
        ["mul 8a8w", "mul 16a8w", "relu 16a8w"],
    ]


def test_one_builder_takes_all_precisions_of_a_case_at_once() -> None:
    queue = requests("add 8a8w", "mul 8a8w", "add 16a8w", "mul 16a8w")
    assert taken(queue, 1) == [["add 8a8w", "add 16a8w", "mul 8a8w", "mul 16a8w"]]


def test_a_case_far_behind_does_not_pass_others() -> None:
    queue = requests("add 8a8w", *(f"other{number} 8a8w" for number in range(40)), "add 16a8w")
    [order] = taken(queue, 1)
    assert order.index("add 16a8w") >= 25
    assert len(order) == 42
