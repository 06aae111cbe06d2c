"""Random steps against a model: how hypothesis plays them."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def play(machine: type[RuleBasedStateMachine], steps: int, runs: int, runs_of_chaos: int) -> None:
    """So many runs of so many steps each; more in make chaos. What fails is shrunk to the shortest story."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=runs_of_chaos if os.environ.get("ULAK_CHAOS") == "full" else runs,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.reuse, Phase.generate, Phase.shrink],
        ),
    )
