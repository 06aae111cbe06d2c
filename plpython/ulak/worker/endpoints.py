"""The endpoints that a worker has met, parsed once per version of their config."""

from __future__ import annotations

from collections.abc import Iterable

from ulak.messages.delivery import ConfigError, Endpoint, config_problem
from ulak.sessions.database import Database
from ulak.transports.dispatcher import Dispatcher
from ulak.worker.port import Claimed


class Endpoints:
    def __init__(self, database: Database, dispatcher: Dispatcher) -> None:
        self._database = database
        self._dispatcher = dispatcher
        self.known: dict[int, Endpoint] = {}
        # By endpoint, why its messages can't be sent.
        self.problems: dict[int, str] = {}
        # Of endpoints that take several messages in one request, how many.
        self.batch_sizes: dict[int, int] = {}

    def load(self, claimed: Iterable[Claimed]) -> None:
        """Reads the configs that are new. May raise Busy."""
        unknown = set()
        for endpoint_id, version, *_ in claimed:
            known = self.known.get(endpoint_id)
            if known is None or known.config_version != version:
                unknown.add(endpoint_id)
        if not unknown:
            return
        for endpoint_id in unknown:
            self.known.pop(endpoint_id, None)
            self.batch_sizes.pop(endpoint_id, None)
            self.problems[endpoint_id] = "config: the endpoint is gone"
        for each in self._database.endpoint_configs(unknown):
            try:
                parsed = self.known[each.id] = self._dispatcher.parse(each)
                if parsed.batch_size > 1:
                    self.batch_sizes[each.id] = parsed.batch_size
            except ConfigError as error:
                self.problems[each.id] = config_problem(error, each.secrets)
