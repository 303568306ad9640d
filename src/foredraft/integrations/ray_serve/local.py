"""`foredraft serve --replicas N`: a cluster of Ray on this machine that lives as long as the command."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable

from foredraft.integrations.ray_serve.options import FleetOptions

APP_NAME = "foredraft"
_SETTINGS = {  # Ray reads them when it is imported
    "RAY_USAGE_STATS_ENABLED": "0",  # nobody agreed to reports by typing our command
    "RAY_DEDUP_LOGS": "0",  # every request has its line
    # Ray's own housekeeping takes a tenth of a core; on one machine it may be slower.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
}


def serve_fleet(options: FleetOptions, host: str, port: int, on_ready: Callable[[], None]) -> None:
    """Until a signal comes; then running requests are finished, and nothing of Ray is left behind. A second signal ends
    it at once."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    import ray
    from ray import serve

    from foredraft.integrations.ray_serve.deployment import build

    quiet = {"log_level": "WARNING"}
    stop = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    ray.init(
        address="local",
        # As many as the replicas reserve: Ray counts, it does not measure.
        num_cpus=options.threads * (options.max_replicas or options.num_replicas),
        include_dashboard=False,
        object_store_memory=256 << 20,  # requests and answers are small and do not pass through it
        logging_level=logging.WARNING,
    )
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, on_signal)
        serve.start(http_options={"host": host, "port": port}, logging_config=quiet)
        serve.run(build(options), name=APP_NAME, logging_config=quiet)
        on_ready()
        stop.wait()
        # The gateways first finish what they have. Without this Ray would end its HTTP proxy at once.
        serve.delete(APP_NAME, _blocking=False)
        end = time.monotonic() + options.limits.drain_timeout_s + 30  # seconds for Ray itself
        while APP_NAME in serve.status().applications and time.monotonic() < end:
            time.sleep(0.2)
        serve.shutdown()
    finally:
        ray.shutdown()
