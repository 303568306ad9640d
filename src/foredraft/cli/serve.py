"""`foredraft serve`: the model behind HTTP, for clients of OpenAI and Anthropic."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer

from foredraft.cli import options
from foredraft.cli.output import say
from foredraft.config import EngineConfig
from foredraft.errors import InvalidParameter
from foredraft.reports.facts import file_name


@options.opens_model("spec", "dtype", "activations", "device", "threads", "head", "exact")
def serve(
    opening: options.Opening,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 is everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="FOREDRAFT_API_KEY",
            help="Requests must send this key; may be repeated: keys share nothing.",
        ),
    ] = None,
    allow_spec: Annotated[
        list[str] | None,
        typer.Option(help="A spec that requests may name, as it stands; may be repeated."),
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A name of this server in URLs; may be repeated.")
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(help="A site whose pages may use it, https://…; '*' is all; may be repeated."),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="The model's name in requests; may be repeated.")
    ] = None,
    share_answers: Annotated[
        bool,
        typer.Option(
            "--share-answers", help="Requests of all clients share cached prompts and drafts, except by a cache_salt."
        ),
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse requests that have unknown fields.")] = False,
    priority: Annotated[bool, typer.Option("--priority", help="Honour the request field priority: low first.")] = False,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.")] = EngineConfig.max_num_seqs,
    max_waiting: Annotated[int, typer.Option(help="Sequences that may wait; then 429.")] = 128,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of one sequence.")] = None,
    kv_cache_tokens: Annotated[int | None, typer.Option(help="Tokens of all.")] = None,
    max_tokens: Annotated[int, typer.Option(help="The longest answer a request may want.")] = 4096,
    max_n: Annotated[int, typer.Option(help="The most answers a request may want.")] = 16,
    waiting_timeout: Annotated[float, typer.Option(help="Seconds until the first token.")] = 120,
    running_timeout: Annotated[float, typer.Option(help="Seconds from there to the end.")] = 600,
    drain_timeout: Annotated[float, typer.Option(help="Seconds to finish after SIGTERM.")] = 60,
    replicas: Annotated[int, typer.Option(min=1, help="Processes that share the load, on a local cluster of Ray.")] = 1,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts and answers to the log.")] = False,
) -> None:
    """Serve a model over HTTP: /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages and a page."""
    if any(not key for key in api_key or ()):
        raise InvalidParameter("--api-key must not be empty; leave it out to let everybody in.")
    opening()  # refuses what is wrong before torch is imported
    try:
        for package in ("fastapi", "uvicorn", "prometheus_client"):
            import_module(package)
    except ImportError as error:
        told = "serve needs the server's packages; to get them: pip install 'foredraft[server]'."
        raise InvalidParameter(told) from error
    from foredraft.server.limits import Limits
    from foredraft.server.run import listen, make_server
    from foredraft.server.service import DEFAULT_SPECS, Service
    from foredraft.server.sites import Sites, is_local_name

    model = opening.keywords["model"]
    names = served_model_name or [file_name(model)]
    limits = Limits(
        max_tokens=max_tokens,
        max_n=max_n,
        max_waiting=max_waiting,
        waiting_timeout_s=waiting_timeout,
        running_timeout_s=running_timeout,
        drain_timeout_s=drain_timeout,
    )
    sites = Sites(is_local_name(host), tuple(allow_host or ()), tuple(cors or ()))
    sizes = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len, "kv_cache_tokens": kv_cache_tokens}
    for_service: dict[str, Any] = {
        "limits": limits,
        "allowed_specs": allow_spec or DEFAULT_SPECS,
        "honours_priority": priority,
        "shares_answers": share_answers,
        "is_strict": strict,
    }
    for_app: dict[str, Any] = {"api_keys": api_key or (), "log_prompts": log_prompts, "sites": sites}
    if replicas > 1:
        fleet = {**opening.keywords, **sizes, **for_service, **for_app, "served_model_names": names}
        _serve_fleet({**fleet, "num_replicas": replicas, "max_queued_requests": max_waiting}, host, port)
        return
    with listen(host, port) as listener, opening(**sizes).open() as llm:
        server = make_server(Service(llm, names, given_name=model, **for_service), **for_app)
        address = f"http://{host}:{listener.getsockname()[1]}"
        server.on_ready = lambda: say(
            f"Serving {names[0]} ({llm.dtype}, {llm.backend_name}) at {address}. Ctrl-C stops."
        )
        server.run(sockets=[listener])


def _serve_fleet(fleet: dict[str, Any], host: str, port: int) -> None:
    """Replicas behind one address; `fleet` are the fields of FleetOptions."""
    try:
        import_module("ray.serve")
    except ImportError as error:
        raise InvalidParameter("--replicas needs Ray Serve; to get it: pip install 'foredraft[ray]'.") from error
    import torch

    from foredraft.backends.choose import usable_cores
    from foredraft.integrations.ray_serve.local import serve_fleet
    from foredraft.integrations.ray_serve.options import read_options
    from foredraft.server.run import listen

    count = fleet["num_replicas"]
    threads = fleet["threads"] or max(1, usable_cores() // count)
    gpus = 0 if fleet["device"] == "cpu" else min(1, torch.cuda.device_count() / count)  # Ray hides those not reserved
    head = None if fleet["head"] == "none" else fleet["head"]
    wanted = read_options({**fleet, "head": head, "threads": threads, "gpus": gpus})
    with listen(host, port) as listener:  # a port in use is told at once, and 0 becomes a number
        port = listener.getsockname()[1]
    what = f"{wanted.num_replicas} replicas of {wanted.names[0]}, {wanted.threads} threads each,"
    serve_fleet(wanted, host, port, lambda: say(f"Serving {what} at http://{host}:{port}. Ctrl-C stops."))
