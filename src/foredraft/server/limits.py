"""What a request may cost, and how long anybody waits for anybody. Plain numbers that the operator sets."""

from __future__ import annotations

from dataclasses import dataclass, fields

from foredraft.errors import InvalidParameter


@dataclass(frozen=True)
class Limits:
    """Counts are per request, times are in seconds."""

    max_tokens: int = 4096  # of one answer; a request may not name more
    max_n: int = 16
    max_prompts: int = 64  # of one /v1/completions request
    max_messages: int = 2048
    max_stops: int = 16
    max_tools: int = 128
    max_body_bytes: int = 4 << 20
    max_values: int = 1 << 18  # of a body's lists and objects; a token id is one
    max_nodes: int = 1 << 15  # lists, objects and keys of a body: reading them takes longer than other values
    max_tokenised: int = 1 << 18  # characters that /tokenize and token ids that /detokenize take
    max_header_bytes: int = 16 << 10
    max_connections: int = 1024
    max_waiting: int = 128  # sequences that wait beyond those that run; more are answered with 429
    waiting_timeout_s: float = 120.0  # until the first token
    running_timeout_s: float = 600.0  # from the first token to the last
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 30.0  # a client that reads nothing for this long is given up
    keep_alive_s: float = 5.0  # between comments in a stream that has nothing else to send
    drain_timeout_s: float = 60.0  # for running requests after SIGTERM

    @property
    def tick_s(self) -> float:
        """How often times are looked at: so much later than its limit a request may end."""
        return min(self.keep_alive_s, self.waiting_timeout_s, self.running_timeout_s, self.write_timeout_s) / 4

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            low = 0 if each.name == "max_waiting" else 1 if each.type == "int" else 0.01
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= low:
                raise InvalidParameter(f"{each.name}={value!r} must be a number of at least {low}.")
