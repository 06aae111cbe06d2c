"""Random examples, and random steps against a model: how hypothesis plays them."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

IS_LONG = os.environ.get("ULAK_CHAOS") == "full"


def choose_examples() -> None:
    """The same examples every time, with as much time as they need. In make chaos and make unstable they differ every time."""
    is_ordinary = not IS_LONG and not os.environ.get("ULAK_SEED")
    settings.register_profile("ulak", settings.get_profile("ci"), derandomize=is_ordinary)
    settings.load_profile("ulak")


def play(machine: type[RuleBasedStateMachine], steps: int, runs: int, runs_of_chaos: int) -> None:
    """A number of runs and of steps in each. In make chaos there are more, and what fails is shrunk."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=runs_of_chaos if IS_LONG else runs,
            database=None,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink] if IS_LONG else [Phase.generate],
        ),
    )
