"""Replicas on Ray Serve: gateways that speak HTTP, and replicas that each hold the model.

serve run foredraft.integrations.ray_serve:app model=smollm2-135m num_replicas=4
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def app(args: dict[str, Any]) -> Application:
    """What Ray Serve builds the application with. `args` are the fields of FleetOptions."""
    from foredraft.integrations.ray_serve.deployment import build
    from foredraft.integrations.ray_serve.options import read_options

    return build(read_options(args))
