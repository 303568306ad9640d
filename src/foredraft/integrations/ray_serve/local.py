"""`foredraft serve --replicas N`: a cluster of Ray on this machine that lives as long as the command."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable

import ray
from ray import serve

from foredraft.integrations.ray_serve.deployment import build
from foredraft.integrations.ray_serve.options import FleetOptions

_OBJECT_STORE_BYTES = 256 << 20  # requests and answers are small and do not pass through it


def serve_fleet(options: FleetOptions, host: str, port: int, on_ready: Callable[[], None]) -> None:
    """Until a signal comes; then running requests are finished, and nothing of Ray is left behind."""
    stop = threading.Event()
    ray.init(
        address="local",
        # As many as the replicas reserve: Ray counts, it does not measure.
        num_cpus=options.threads * (options.max_replicas or options.num_replicas),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        log_to_driver=True,
        logging_level=logging.WARNING,
        configure_logging=True,
    )
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        serve.start(http_options={"host": host, "port": port})
        serve.run(build(options), name="foredraft", route_prefix="/")
        on_ready()
        stop.wait()
        serve.shutdown()
    finally:
        ray.shutdown()
