"""The fleet as Ray Serve runs it: deployments of gateways and of replicas, and the router between them."""

from __future__ import annotations

import gc
import logging
import random
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.types import Message

from foredraft.config import EngineConfig
from foredraft.errors import Overloaded
from foredraft.integrations.ray_serve.forwarding import ForwardedRequest, answer
from foredraft.integrations.ray_serve.gateway import ReplicaLost, make_gateway
from foredraft.integrations.ray_serve.options import FleetOptions
from foredraft.integrations.ray_serve.prefix_table import PrefixTable
from foredraft.llm import LLM
from foredraft.server.app import make_app
from foredraft.server.service import Service

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle

_LOGGING = {"enable_access_log": False, "log_level": "WARNING"}  # replicas write a line per request themselves


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Chooses a replica by the prefixes of a request and by the load; it runs in every gateway."""

    def initialize_state(self, slack: int) -> None:
        self._table = PrefixTable(slack)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:  # all replicas are offered at once, so when all are full there is only waiting
            pending_request.routing_context.should_backoff = True
        # In random order, so that equals are chosen equally often.
        candidates = random.sample(candidate_replicas, len(candidate_replicas))
        by_name = {replica.replica_id.unique_id: replica for replica in candidates}
        loads = {name: self.replica_queue_len_cache.get(each.replica_id) or 0 for name, each in by_name.items()}
        # One replica per group: within a group Ray prefers those whose load it knows, and idle ones it forgets.
        return [[by_name[name]] for name in self._table.order(_prefixes(pending_request), loads)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._table.note(_prefixes(pending_request), replica_id.unique_id)


def _prefixes(pending: PendingRequest | None) -> tuple[bytes, ...]:
    given = pending.args[0] if pending is not None and pending.args else None
    return given.prefixes if isinstance(given, ForwardedRequest) else ()


class Replica:
    """One process with the model and the server's application."""

    def __init__(self, options: FleetOptions) -> None:
        _log_to_stderr()
        llm = LLM(**options.model_dump(include={"model", "spec", *EngineConfig.__dataclass_fields__}))
        gc.freeze()  # a full collection would go through all of torch in the middle of a request
        self._service = Service(
            llm,
            options.names,
            options.limits,
            options.allowed_specs,
            options.honours_priority,
            given_name=options.model,
            label=serve.get_replica_context().replica_id.unique_id,
            shares_answers=options.shares_answers,
            is_strict=options.is_strict,
        )
        # Gateways have checked the keys. Here a key tells with whom a request shares.
        self._app = make_app(self._service, options.api_keys, options.log_prompts)

    async def answer(self, request: ForwardedRequest) -> AsyncIterator[list[Message]]:
        async for messages in answer(self._app, request):
            yield messages

    def metrics(self) -> str:
        return self._service.metrics.render().decode()

    def is_ready(self) -> bool:
        return self._service.engine.is_alive

    def check_health(self) -> None:
        """Ray Serve replaces a replica for which this raises."""
        if not self._service.engine.is_alive:
            raise RuntimeError("The engine has stopped.")


class RayReplicas:
    """`Replicas` over a handle of Ray Serve."""

    def __init__(self, handle: DeploymentHandle, options: FleetOptions) -> None:
        self._handle = handle
        self._stream = handle.options(method_name="answer", stream=True)
        self._most = f"{options.most_ongoing} per replica are held and {options.max_queued_requests} more wait"

    async def forward(self, request: ForwardedRequest) -> AsyncIterator[list[Message]]:
        try:
            async for messages in self._stream.remote(request):
                yield messages
        except BackPressureError as error:
            raise Overloaded(f"All replicas are busy: {self._most}; try again later.") from error
        except (RayActorError, ReplicaUnavailableError) as error:
            raise ReplicaLost from error

    async def metrics(self) -> list[str]:
        return [page for page in await self._all("metrics") if isinstance(page, str)]

    async def num_ready(self) -> int:
        return sum(ready is True for ready in await self._all("is_ready"))

    async def _all(self, method: str) -> list[Any]:
        """What every replica says within 5 s; an exception from those that say nothing."""
        results = self._handle.broadcast(method).results_async(timeout_s=5.0, return_exceptions=True)
        return list(await results)


class GatewayReplica:
    """One process that speaks HTTP."""

    def __init__(self, handle: DeploymentHandle, options: FleetOptions) -> None:
        _log_to_stderr()
        self._replicas = RayReplicas(handle, options)
        self._options = options

    def __serve_build_asgi_app__(self) -> Starlette:
        return make_gateway(self._replicas, self._options, serve.get_replica_context().replica_id.unique_id)


def build(options: FleetOptions) -> Application:
    """The application: replicas behind gateways. A changed option is rolled out replica by replica, and a replica that
    goes finishes what it has."""
    limits = options.limits
    replicas = serve.deployment(Replica).options(
        name="replica",
        **_scale(options),
        max_ongoing_requests=options.most_ongoing,
        max_queued_requests=options.max_queued_requests,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={"slack": options.prefix_slack},
            max_backoff_s=0.1,  # between two looks of a waiting request for a replica that has room
        ),
        logging_config=_LOGGING,
        ray_actor_options={"num_cpus": options.threads, "num_gpus": options.gpus},
        graceful_shutdown_timeout_s=limits.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2.0,  # a dead replica is noticed and replaced after about this time
    )
    gateways = serve.deployment(serve.ingress()(GatewayReplica)).options(
        name="gateway",
        num_replicas=options.num_gateways,
        max_ongoing_requests=limits.max_connections,
        logging_config=_LOGGING,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=limits.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
    )
    return gateways.bind(replicas.bind(options), options)


def _scale(options: FleetOptions) -> dict[str, Any]:
    if options.max_replicas is None or options.max_replicas == options.num_replicas:
        return {"num_replicas": options.num_replicas}
    target = options.target_ongoing_requests or max(1, options.most_ongoing // 2)
    scaling = AutoscalingConfig(
        min_replicas=options.num_replicas, max_replicas=options.max_replicas, target_ongoing_requests=target
    )
    return {"autoscaling_config": scaling}


def _log_to_stderr() -> None:
    """One line per request and the library's remarks, as `foredraft serve` writes them; Ray keeps them per process."""
    log = logging.getLogger("foredraft")
    if not log.handlers:
        log.addHandler(logging.StreamHandler(sys.stderr))
        log.setLevel(logging.INFO)
