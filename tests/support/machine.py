"""Random steps against a model: how hypothesis plays them."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def play(machine: type[RuleBasedStateMachine], steps: int, runs: int, runs_of_chaos: int) -> None:
    """A number of runs and of steps in each, the same every time. In make chaos there are more, others every time, and what fails is shrunk."""
    is_long = os.environ.get("ULAK_CHAOS") == "full"
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=runs_of_chaos if is_long else runs,
            derandomize=not is_long,
            database=None,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink] if is_long else [Phase.generate],
        ),
    )
