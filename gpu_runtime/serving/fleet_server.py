"""The server of `gpu serve --fleet`: one address in front of the models of all hosts."""

from __future__ import annotations

from typing import Any

from ..fleet.client import open_fleet
from ..settings import Settings
from ..version import VERSION
from .api.app import fleet_application
from .fleet_calls import FleetGateway, FleetModels
from .server import run_app


def run(address: str, **where: Any) -> None:
    """Serves the fleet at `address` until the process is interrupted.

    `where` has the arguments host, port, socket_path, read_only and log_level of `server.run`. Raises
    FleetUnavailable, and the errors of `server.run`.
    """
    with open_fleet(address) as fleet:
        models = FleetModels(fleet, Settings.load())
        try:
            run_app(
                lambda gateway, store: fleet_application(models, gateway, VERSION, store),
                lambda keys, store: FleetGateway(models, keys, store),
                models.settings,
                **where,
            )
        finally:
            models.close()
