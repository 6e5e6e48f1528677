"""The controller keeps checks within their budget, at random steps, and pays back what it spends after a suspicion."""

import pytest

from sdc.guarding.schedule import CREDIT, PERIOD, CheckSchedule

STEP = 1.0


def run(schedule: CheckSchedule, steps: int, seconds: float = STEP) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {name: [] for name in schedule.checks}
    for step in range(steps):
        due = schedule.due()
        for name in due:
            found[name].append(step)
        if not due:
            schedule.took(seconds)
    return found


@pytest.mark.parametrize("budget", [0.003, 0.01, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_checks_cost_the_budget(budget: float, seed: int) -> None:
    schedule = CheckSchedule(budget, {"witness": (0.6, 0.5), "state": (0.4, 0.01)}, STEP, seed=seed)
    found = run(schedule, 3_000)
    assert found["witness"]
    assert budget / 2 < schedule.overhead() < 1.15 * budget
    assert schedule.overhead() == pytest.approx(
        len(found["witness"]) * 0.5 / 3_000 + len(found["state"]) * 0.01 / 3_000
    )


def test_within_five_hundred_steps_the_cost_stays_near_the_budget() -> None:
    for seed in range(20):
        schedule = CheckSchedule(0.01, {"a": (0.5, 0.5), "b": (0.3, 1.0), "c": (0.2, 0.05)}, STEP, seed=seed)
        run(schedule, 500)
        assert schedule.overhead() < 0.015


def test_every_step_is_recorded_with_its_window() -> None:
    schedule = CheckSchedule(0.05, {"a": (1.0, 0.5)}, STEP)
    run(schedule, 777)
    [check] = schedule.checks.values()
    assert sum(check.steps.values()) == 777
    assert abs(sum(count / window for window, count in check.steps.items() if window) - check.runs) <= len(check.steps)


def test_a_suspicion_makes_checks_denser_for_a_period() -> None:
    schedule, plain = (CheckSchedule(0.05, {"a": (1.0, 0.5)}, STEP, seed=1) for _ in range(2))
    for each in (schedule, plain):
        run(each, 30 * PERIOD)
    schedule.suspect()
    after = [len(run(each, 2 * PERIOD)["a"]) for each in (schedule, plain)]
    assert after[0] > after[1]


def test_slower_steps_are_checked_more_often() -> None:
    schedule = CheckSchedule(0.05, {"a": (1.0, 0.5)}, STEP)
    run(schedule, 5 * PERIOD)
    slow = run(schedule, 5 * PERIOD, seconds=4.0)["a"]
    assert len(slow) > 2 * 5 * PERIOD * 0.05 / 0.5
    assert schedule.step_seconds == 4.0


def test_equal_seeds_choose_equal_steps() -> None:
    first, again, other = (CheckSchedule(0.05, {"a": (1.0, 0.5)}, STEP, seed=seed) for seed in (1, 1, 2))
    assert run(first, 500) == run(again, 500) != run(other, 500)


@pytest.mark.parametrize(("before", "after"), [(1.0, 0.1), (0.1, 1.0)])
def test_steps_that_become_faster_or_slower_are_checked_as_before(before: float, after: float) -> None:
    schedule = CheckSchedule(0.1, {"a": (1.0, 1.0)}, before)
    runs = []
    for number in range(4_000):
        runs.append(len(schedule.due()))
        schedule.took(before if number < 2_000 else after)
    # A step earns 0.1 of its time, and a check costs 1 second.
    assert sum(runs[2_300:]) == pytest.approx(0.1 * after * 1_700, rel=0.15)
    assert schedule.overhead() == pytest.approx(0.1, rel=0.2)


def test_a_pause_earns_nothing_and_windows_follow_the_time_of_a_step() -> None:
    schedule = CheckSchedule(0.01, {"a": (1.0, 1.0)}, 1.0)
    for _ in range(20_000):
        schedule.due(can=lambda name: False)
    spent = schedule.spent
    for number in range(5_000):
        if number % 100 == 0:
            schedule.suspect()
        schedule.due()
    assert schedule.spent - spent <= 0.01 * (5_000 + 6 * CREDIT) + 1.0  # a credit in each 1,000 steps
    schedule = CheckSchedule(0.01, {"a": (1.0, 1.0)}, 0.01)
    runs = []
    for number in range(20_000):
        runs.append(len(schedule.due()))
        schedule.took(0.01 if number < 12_000 else 1.0)
    assert schedule.checks["a"].steps[10_000]  # the window in which steps become slower
    assert sum(runs[12_200:]) == pytest.approx(78, rel=0.1)
