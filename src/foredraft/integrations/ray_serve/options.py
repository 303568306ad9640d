"""What a fleet of replicas is told: the model, its limits, and how many replicas share the load."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError

from foredraft.config import EngineConfig
from foredraft.errors import InvalidParameter
from foredraft.models.catalog import DEFAULT_MODEL
from foredraft.reports.facts import file_name
from foredraft.server.limits import Limits
from foredraft.server.service import DEFAULT_SPECS
from foredraft.server.sites import Sites


class FleetOptions(BaseModel):
    """All of a fleet. Numbers may be texts, because `serve run APP name=value` gives texts."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = DEFAULT_MODEL
    spec: str = "auto"
    head: str | None = "auto"
    dtype: str = "auto"
    activations: str = "auto"
    device: str = "auto"
    exact: bool = True
    threads: PositiveInt = 1  # of one replica; as many CPUs are reserved for it
    gpus: NonNegativeFloat = 0  # reserved for one replica
    max_num_seqs: PositiveInt = EngineConfig.max_num_seqs
    max_model_len: PositiveInt | None = None
    kv_cache_tokens: PositiveInt | None = None
    served_model_names: tuple[str, ...] = ()  # the model's own name when empty
    allowed_specs: tuple[str, ...] = DEFAULT_SPECS
    api_keys: tuple[str, ...] = Field(default=(), repr=False)
    honours_priority: bool = False
    shares_answers: bool = False  # among all requests without a `cache_salt`
    is_strict: bool = False  # requests with unknown fields are refused
    log_prompts: bool = False
    sites: Sites = Sites()
    limits: Limits = Limits()

    num_replicas: PositiveInt = 2
    max_replicas: PositiveInt | None = None  # more than num_replicas: the fleet grows and shrinks with the load
    target_ongoing_requests: PositiveInt | None = None  # of one replica, by which the fleet grows; None: half of all
    max_ongoing_requests: PositiveInt | None = None  # that one replica holds; None: as many wait there as run
    max_queued_requests: NonNegativeInt = 128  # that wait in one gateway for a replica; one more is answered with 429
    prefix_slack: NonNegativeInt = 4  # requests that a replica with a cached prefix may have more than the idlest one
    num_gateways: PositiveInt = 1

    @property
    def most_ongoing(self) -> int:
        return self.max_ongoing_requests or 2 * self.max_num_seqs

    @property
    def names(self) -> tuple[str, ...]:
        return self.served_model_names or (file_name(self.model),)


def read_options(args: dict[str, Any]) -> FleetOptions:
    """Raises InvalidParameter with a sentence about the first field that is wrong."""
    try:
        options = FleetOptions.model_validate(args)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = ", ".join(FleetOptions.model_fields)
            raise InvalidParameter(f"{field} is no option of replicas; there are {known}.") from error
        raise InvalidParameter(f"{field}={first['input']!r}: {first['msg']}.") from error
    if options.max_replicas is not None and options.max_replicas < options.num_replicas:
        raise InvalidParameter(
            f"max_replicas={options.max_replicas} must be at least num_replicas={options.num_replicas}."
        )
    if any(not key for key in options.api_keys):
        raise InvalidParameter("api_keys must not hold an empty key; leave them out to let everybody in.")
    return options
