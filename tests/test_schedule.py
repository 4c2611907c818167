"""The policy against a simulated machine and a scripted drafter. Costs are from paper, see `costs`."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from costs import curves

from dflash_mlx.costs import Costs, LiveCosts
from dflash_mlx.lookup import MATCHES
from dflash_mlx.schedule import Acceptance, Adaptive, Fixed, Plan, Policy

CURVES = curves()
DRAFT = 0.006
"""Seconds of a draft pass, which are in the curves."""
STEADY = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
SEEDS = range(4)


@dataclass(frozen=True)
class Machine:
    """A curve that grows by `per_key` of itself with the context, and how far timings scatter."""

    curve: Sequence[float]
    per_key: float = 0.0
    scatter: float = 0.03

    def seconds(self, rows: int, keys: int) -> float:
        return self.curve[rows - 1] * (1 + self.per_key * keys)

    def takes(self, plan: Plan, keys: int) -> float:
        """Seconds of a cycle; copied drafts take no draft pass."""
        return self.seconds(plan.rows, keys) - (DRAFT if plan.match else 0.0)

    def measured(self) -> Costs:
        depths = (0, 4096) if self.per_key else (0,)
        sizes = range(1, len(self.curve) + 1)
        return Costs(depths, tuple(tuple(self.seconds(r, d) for r in sizes) for d in depths), DRAFT)

    def run(
        self,
        policy: Policy,
        rate: Callable[[int], float],
        cycles: int = 800,
        seed: int = 0,
        match: Callable[[int], int] = lambda cycle: 0,
        copied: float = 0.0,
    ) -> list[tuple[int, float, float]]:
        """Rows, *expected* tokens and true seconds of every cycle.

        Args:
            rate: of a cycle: the chance of each of the drafter's drafts.
            match: of a cycle: what can be copied after.
            copied: the chance of each draft that is.
        """
        dice = random.Random(seed)
        keys, out = 100, []
        for cycle in range(cycles):
            plan = policy.plan(len(self.curve), keys, match(cycle))
            p = copied if plan.match else rate(cycle)
            accepted = 0
            while accepted < plan.rows - 1 and dice.random() < p:
                accepted += 1
            seconds = self.takes(plan, keys)
            policy.observe(plan, accepted, seconds * dice.lognormvariate(0, self.scatter), keys)
            out.append((plan.rows, expected(plan.rows, p), seconds))
            keys += accepted + 1
        return out

    def best(self, p: float) -> float:
        """Tokens per second of the best fixed block at no depth."""
        return max(expected(rows, p) / seconds for rows, seconds in enumerate(self.curve, 1))


def always(p: float) -> Callable[[int], float]:
    return lambda _cycle: p


def expected(rows: int, p: float) -> float:
    return sum(p**i for i in range(rows))


def speed(cycles: Sequence[tuple[int, float, float]]) -> float:
    return sum(tokens for _, tokens, _ in cycles) / sum(seconds for *_, seconds in cycles)


@pytest.mark.parametrize("name", CURVES)
def test_within_3_percent_of_the_best_fixed_block_and_never_2_percent_under_plain(name: str) -> None:
    machine = Machine(CURVES[name])
    for p in STEADY:
        speeds = [speed(machine.run(Adaptive(machine.measured()), always(p), seed=s)) for s in SEEDS]
        mean = sum(speeds) / len(speeds)
        assert mean > 0.97 * machine.best(p), (p, mean / machine.best(p))
        assert mean > 0.98 / machine.curve[0], (p, mean * machine.curve[0])
        assert min(speeds) > 0.97 / machine.curve[0], (p, min(speeds) * machine.curve[0])


@pytest.mark.parametrize(
    ("before", "after"), [(0.0, 0.9), (0.9, 0.0), (0.9, 0.1), (0.9, 0.3), (0.3, 0.9), (0.5, 0.8)]
)
def test_recovers_within_50_cycles_after_the_text_changed(before: float, after: float) -> None:
    """From the 50th cycle on within 3 % of the best block for the new text, on average over the seeds."""
    for name, curve in CURVES.items():
        machine = Machine(curve)
        shares = []
        for seed in range(24):
            run = machine.run(Adaptive(machine.measured()), lambda c: before if c < 200 else after, 350, seed)
            shares.append(speed(run[250:]) / machine.best(after))
        assert sum(shares) / len(shares) > 0.97, (name, shares)


def test_a_growing_context_changes_the_best_block() -> None:
    """Attention over the context costs every row the same here, so that larger blocks win with depth."""
    shallow, deep = CURVES["M3 Max, exact"], [s + 0.2 for s in CURVES["M3 Max, exact"]]
    costs = Costs((0, 20000), (tuple(shallow), tuple(deep)), DRAFT)
    policy = Adaptive(costs)
    dice = random.Random(1)
    sizes: dict[bool, list[int]] = {False: [], True: []}
    for cycle in range(600):
        far = cycle >= 300
        keys = 20000 if far else 10
        rows = policy.plan(8, keys).rows
        accepted = 0
        while accepted < rows - 1 and dice.random() < 0.8:
            accepted += 1
        policy.observe(Plan(rows), accepted, costs.seconds(rows, keys), keys)
        sizes[far].append(rows)
    assert max(set(sizes[False][50:]), key=sizes[False][50:].count) in (4, 5)
    assert max(set(sizes[True][50:]), key=sizes[True][50:].count) == 8


def test_blocks_that_pay_only_if_they_are_large_and_cost_many_plain_steps_are_tried_all_the_same() -> None:
    """As of a tiny pair on a CPU: trying small blocks would only spend what a large one needs."""
    machine = Machine((0.010, 0.024, 0.029, 0.031, 0.034))
    for seed in range(8):
        run = machine.run(Adaptive(machine.measured()), always(0.95), 1000, seed)
        assert speed(run[300:]) > 0.97 * machine.best(0.95), speed(run[300:]) / machine.best(0.95)
        run = machine.run(Adaptive(machine.measured()), lambda cycle: 0.95 * (cycle > 20), 2000, seed)
        assert speed(run[1000:]) > 0.97 * machine.best(0.95), speed(run[1000:]) / machine.best(0.95)
        run = machine.run(Adaptive(machine.measured()), always(0.3), 1000, seed)
        assert speed(run) > 0.98 * machine.best(0.3), speed(run) / machine.best(0.3)


@pytest.mark.parametrize("wrong", [0.5, 0.8, 1.25, 2.0])
def test_a_plain_step_that_was_measured_wrongly_is_found_out(wrong: float) -> None:
    """A curve from a busy moment: live timings put it right."""
    machine = Machine(CURVES["M4 Max, exact"])
    curve = machine.curve
    costs = Costs((0,), ((wrong * curve[0], *curve[1:]),), DRAFT)
    for p in (0.1, 0.8):
        run = machine.run(Adaptive(costs), always(p), 3000)
        assert speed(run[1500:]) > 0.95 * machine.best(p), (p, speed(run[1500:]) / machine.best(p))


@pytest.mark.parametrize("name", CURVES)
def test_blocks_that_were_measured_while_the_machine_was_busy_are_found_out(name: str) -> None:
    """All look so dear that they would never be tried; which of them is best, the next load's costs tell."""
    machine = Machine(CURVES[name])
    for seed in SEEDS:
        dice = random.Random(seed)
        busy = [machine.curve[0], *(s * dice.uniform(3, 8) for s in machine.curve[1:])]
        for p in (0.1, 0.8):
            run = machine.run(Adaptive(Costs((0,), (tuple(busy),), DRAFT)), always(p), 4000, seed)
            assert speed(run) > 0.97 / machine.curve[0], (p, speed(run) * machine.curve[0])
            assert speed(run[3000:]) > 0.75 * machine.best(p), (p, speed(run[3000:]) / machine.best(p))


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("match", MATCHES)
def test_copying_what_is_always_wrong_costs_next_to_nothing(name: str, match: int) -> None:
    machine = Machine(CURVES[name])
    for p in STEADY:
        runs = [
            machine.run(Adaptive(machine.measured()), always(p), seed=seed, match=lambda _: match)
            for seed in SEEDS
        ]
        mean = sum(map(speed, runs)) / len(runs)
        assert mean > 0.95 * machine.best(p), (p, mean / machine.best(p))
        assert mean > 0.975 / machine.curve[0], (p, mean * machine.curve[0])


@pytest.mark.parametrize("name", [name for name in CURVES if name != "no gain"])
def test_copying_what_is_right_beats_the_drafter(name: str) -> None:
    """Every other cycle can copy; the drafter is the better the less is gained."""
    machine = Machine(CURVES[name])
    for p, gain in ((0.0, 1.3), (0.3, 1.3), (0.7, 1.1), (0.9, 1.0)):
        drafted = machine.run(Adaptive(machine.measured()), always(p))
        both = machine.run(
            Adaptive(machine.measured()), always(p), match=lambda cycle: 8 * (cycle % 2), copied=0.95
        )
        assert speed(both) > gain * speed(drafted), (p, speed(both) / speed(drafted))


@pytest.mark.parametrize("name", [name for name in CURVES if name != "no gain"])
def test_a_useless_drafter_does_not_spend_what_copying_needs(name: str) -> None:
    machine = Machine(CURVES[name])
    run = machine.run(
        Adaptive(machine.measured()),
        always(0.0),
        3000,
        match=lambda cycle: 8 * (cycle >= 1500 and cycle % 2),
        copied=0.95,
    )
    assert speed(run[:1500]) > 0.98 / machine.curve[0]
    assert speed(run[1500:]) > 1.2 / machine.curve[0]


def test_a_useless_match_does_not_spend_what_the_drafter_needs() -> None:
    for name, curve in CURVES.items():
        machine = Machine(curve)
        run = machine.run(
            Adaptive(machine.measured()), lambda cycle: 0.9 * (cycle >= 1500), 3000, match=lambda _: 2
        )
        assert speed(run[2000:]) > 0.95 * machine.best(0.9), name


def test_the_drafter_is_tried_although_every_cycle_could_copy() -> None:
    machine = Machine(CURVES["M3 Max, exact"])
    run = machine.run(Adaptive(machine.measured()), always(0.95), match=lambda _: 8, copied=0.5)
    assert speed(run[100:]) > 0.95 * machine.best(0.95)


def test_at_the_end_of_a_reply_nothing_is_spent_on_small_blocks_that_cannot_pay() -> None:
    machine = Machine((0.010, 0.024, 0.029, 0.031, 0.034))
    policy = Adaptive(machine.measured())
    for _ in range(400):
        for left in range(32, 0, -1):
            plan = policy.plan(left, 100)
            assert plan.rows in (1, 4, 5)
            policy.observe(plan, 0, machine.seconds(plan.rows, 100), 100)


def test_a_copy_that_vanished_before_it_began_teaches_that() -> None:
    policy = Adaptive(Costs((0,), ((1.0, 12.0),), 10.8))  # the drafter is out of the question
    copies = []
    for _ in range(120):
        ahead = policy.plan(2, 0, 8)  # as in a plain step, before its token is known
        policy.observe(Plan(1), 0, 1.0, 0)
        copies.append(ahead.match > 0)
        if ahead.match:
            policy.plan(2, 0)
            policy.plan(2, 0)
            policy.observe(Plan(1), 0, 0.0, 0)
    assert copies[0]
    assert sum(copies[40:]) < 25, "out of 80"


def test_the_longer_match_is_tried_first_and_what_was_wrong_is_left() -> None:
    costs = Costs((0,), ((1.0, 1.2, 1.3),), 0.2)
    policy = Adaptive(costs)
    assert policy.plan(3, 0, 8) == Plan(3, 8)
    assert policy.plan(3, 0, 2) == Plan(3, 2), "even the drafter's drafts are less sure, and cost more"
    plans = []
    for _ in range(100):
        plans.append(policy.plan(3, 0, 2))
        policy.observe(plans[-1], 0 if plans[-1].match else 2, costs.seconds(3, 0), 0)
    assert 1 <= plans.count(Plan(3, 2)) < 6
    assert plans.count(Plan(3)) > 90
    assert policy.plan(1, 0, 8) == Plan(1)


def test_what_a_draft_pass_costs_is_learnt_from_what_is_copied() -> None:
    costs = LiveCosts(Costs((0,), ((1.0, 1.5),), 0.6))
    assert costs.seconds(2, 0, copied=True) == 1.0, "never less than a plain step"
    for _ in range(100):
        costs.observe(2, 1.4, 0, copied=True)
        costs.observe(2, 1.5, 0)
        costs.observe(1, 1.0, 0)
    assert costs.seconds(2, 0, copied=True) == pytest.approx(1.4, rel=0.05)
    assert costs.seconds(2, 0) == pytest.approx(1.5, rel=0.05)


def test_quick_copies_prove_nothing_of_the_drafters_blocks() -> None:
    """They show that the draft pass takes more of a cycle than was measured."""
    costs = LiveCosts(Costs((0,), ((1.0, 4.0, 5.0),), 0.5))
    for _ in range(2):
        costs.observe(3, 2.0, 0, copied=True)
    assert costs.seconds(3, 0, copied=True) == pytest.approx(2.0, rel=0.05)
    assert costs.seconds(2, 0, copied=True) < 2.0
    assert costs.seconds(3, 0) == pytest.approx(5.0, rel=0.05)


def test_heat_moves_all_sizes_together() -> None:
    """One size runs 30 % slower than measured because all do: the others must not look better for it."""
    costs = LiveCosts(Costs((0,), ((1.0, 1.1, 1.2),), 0.1))
    for _ in range(60):
        costs.observe(2, 1.43, 0)
    assert costs.seconds(2, 0) == pytest.approx(1.43, rel=0.02)
    assert 1.1 < costs.seconds(3, 0) / 1.2 < 1.3


def test_a_hiccup_is_no_news() -> None:
    costs = LiveCosts(Costs((0,), ((1.0, 1.1),), 0.1))
    costs.observe(2, 100.0, 0)
    assert costs.seconds(2, 0) < 1.15


def test_a_single_quick_cycle_is_no_news_either_but_two_are() -> None:
    costs = LiveCosts(Costs((0,), ((1.0, 4.0, 6.0),), 0.1))
    costs.observe(2, 0.01, 0)
    assert costs.seconds(2, 0) > 3.8
    costs.observe(2, 4.0, 0)
    costs.observe(2, 1.2, 0)
    assert costs.seconds(2, 0) > 3.5
    costs.observe(2, 1.1, 0)
    assert costs.seconds(2, 0) == pytest.approx(1.2, rel=0.05)
    assert costs.seconds(3, 0) == pytest.approx(1.8, rel=0.05), "nobody would try it at 6"
    assert costs.seconds(1, 0) == pytest.approx(1.0, rel=0.06)


def test_plain_decoding_is_timed_again_now_and_then() -> None:
    """Three plain steps are one that was started ahead and starts the next."""
    policy = Adaptive(Costs((0,), ((1.0, 1.1),), 0.1))
    sizes = []
    plan = policy.plan(2, 0)
    for _ in range(1000):
        following = policy.plan(2, 0) if plan.rows == 1 else None  # asked ahead, as the loop does
        policy.observe(plan, plan.rows - 1, 0.0, 0)  # nor does a slow caller keep it from drafting
        sizes.append(plan.rows)
        plan = following or policy.plan(2, 0)
    assert "".join(map(str, sizes[100:])).count("21112") == 3


def test_whether_a_block_can_ever_pay() -> None:
    assert not Costs((0,), ((1.0, 2.0, 3.0),), 0.1).can_pay
    assert not Costs((0,), ((1.0,),), 0.1).can_pay
    assert Costs((0,), ((1.0, 2.0, 2.5),), 0.1).can_pay
    assert Costs((0, 99), ((1.0, 3.0), (1.0, 1.5)), 0.1).can_pay, "at some depth"


def test_limits_and_fixed_blocks() -> None:
    adaptive = Adaptive(Machine(CURVES["M3 Max, tile"]).measured())
    for _ in range(50):
        adaptive.observe(Plan(16), 15, CURVES["M3 Max, tile"][15], 10)
    assert adaptive.plan(32, 10).rows > 4
    assert [adaptive.plan(limit, 10).rows for limit in (1, 2, 4)] == [1, 2, 4]
    assert [Fixed(5).plan(limit, 0).rows for limit in (9, 5, 2)] == [5, 5, 2]


def test_costs_between_and_beyond_depths() -> None:
    costs = Costs((0, 100, 200), ((1.0, 2.0), (2.0, 2.0), (4.0, 1.0)), 0.5)
    assert [costs.seconds(1, keys) for keys in (0, 50, 100, 150, 300)] == [1.0, 1.5, 2.0, 3.0, 6.0]
    assert costs.seconds(2, 1000) == 2.0  # never cheaper with more context
    assert Costs.from_json(costs.to_json()) == costs


def test_acceptance_leans_on_the_slot_before_and_forgets() -> None:
    acceptance = Acceptance(4)
    for _ in range(200):
        acceptance.observe(2, 2)
    tokens = acceptance.tokens()
    assert tokens[2] > 2.8
    assert tokens[4] > 4.3  # never tried, but the slots before are right
    for _ in range(60):
        acceptance.observe(2, 0)
    assert acceptance.tokens()[1] < 1.15
