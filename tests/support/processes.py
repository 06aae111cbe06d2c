"""The tests in several processes, each with servers of its own (pytest -n 2): which tests stay together."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling  # type: ignore[import-untyped]

# Files that share something expensive, or that take minutes.
TOGETHER = {
    "unit/test_broker_loop.py": "RabbitMQ",
    "unit/test_transport_contract.py": "RabbitMQ",
    "chaos/test_amqp.py": "RabbitMQ",
    "worker/test_amqp.py": "RabbitMQ",
    "worker/test_brokers.py": "RabbitMQ",
    "worker/test_readme.py": "RabbitMQ",
    "worker/test_schedule.py": "minutes",
    "worker/test_operations.py": "minutes",
}


def is_one_of_several(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def waits_for_the_clock(item: pytest.Item) -> bool:
    return not {"rehearsal", "outage"}.isdisjoint(getattr(item, "fixturenames", ()))


def unit_of(nodeid: str) -> str:
    """What is run by one process."""
    file = nodeid.partition("::")[0].rpartition("tests/")[2]
    return TOGETHER.get(file, file)


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
    """The tests of a file, or of files that belong together, are run by one process. A process that is done takes the next ones, in
    the order of the collection."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def remove_node(self, node: Any) -> str | None:
        """A test that hung, and ended its process, isn't tried again; others run what was to come after it."""
        units = self.assigned_work[node]
        ended_by = next((test for unit in units.values() for test, is_done in unit.items() if not is_done), None)
        if ended_by is not None:
            units[unit_of(ended_by)][ended_by] = True
        # Otherwise they would be run again, as units without a test, and a process that gets one never asks for another.
        for name in [name for name, unit in units.items() if all(unit.values())]:
            del units[name]
        super().remove_node(node)
        return ended_by
