"""`rimuru serve`: the OpenAI-compatible HTTP server."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rimuru_jax.cli.console import note
from rimuru_jax.cli.options import engine_options, with_options
from rimuru_jax.cli.prompts import load_engine


@with_options(engine=engine_options)
def serve(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="Model folder, plain or packed. Default: the embedded model.", show_default=False
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model. Default: the folder's name.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="RIMURU_API_KEY", help="Ask clients for this key.", show_default=False),
    ] = None,
    max_num_queued_reqs: Annotated[
        int | None, typer.Option(help="Requests that may wait; more get status 429. Default: no limit.")
    ] = None,
    request_timeout: Annotated[
        float | None, typer.Option(help="Seconds after which a request is ended. Default: never.")
    ] = None,
    log_format: Annotated[
        Literal["text", "json"],
        typer.Option(help="json: lines for every request and, every 10 s, for the engine."),
    ] = "text",
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            help="Where OpenTelemetry spans go: http://localhost:4318/v1/traces.", show_default=False
        ),
    ] = None,
    enable_auto_tool_choice: Annotated[
        bool, typer.Option("--enable-auto-tool-choice", help="Let models decide about tools.")
    ] = False,
    tool_call_parser: Annotated[
        str | None, typer.Option(help="How the model writes calls of tools: hermes or qwen3_coder.")
    ] = None,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that requests get to finish after SIGTERM.")
    ] = 30.0,
    *,
    engine: Mapping[str, Any],
) -> None:
    """Serve a model over HTTP, in OpenAI's interface."""
    try:
        from rimuru_jax.server.config import ServerConfig
        from rimuru_jax.server.request_log import use_json_logs
        from rimuru_jax.server.serve import listen
        from rimuru_jax.server.serve import serve as run
        from rimuru_jax.server.tool_parsers import PARSERS
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"rimuru serve needs the package {error.name}: install rimuru-jax[server]"
        ) from error
    if otlp_traces_endpoint is not None:
        try:
            import rimuru_jax.server.tracing  # noqa: F401
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"--otlp-traces-endpoint needs the package {error.name}: install rimuru-jax[otel]"
            ) from error
        if not otlp_traces_endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"--otlp-traces-endpoint is {otlp_traces_endpoint!r}, it must be a URL such as http://localhost:4318/v1/traces"
            )
    for name, value in (("max-num-queued-reqs", max_num_queued_reqs), ("request-timeout", request_timeout)):
        if value is not None and value <= 0:
            raise ValueError(f"--{name} is {value:g}, it must be positive")
    if tool_call_parser not in (None, *PARSERS):
        raise ValueError(
            f"--tool-call-parser is {tool_call_parser!r}, it must be one of {', '.join(PARSERS)}"
        )
    if enable_auto_tool_choice and tool_call_parser is None:
        raise ValueError(
            f"--enable-auto-tool-choice needs a --tool-call-parser, which is one of {', '.join(PARSERS)}"
        )
    if shutdown_timeout < 0:
        raise ValueError(f"--shutdown-timeout is {shutdown_timeout:g}, it must not be negative")
    say = note
    if log_format == "json":
        use_json_logs()
        say = logging.getLogger("rimuru_jax").info
    socket = listen(host, port)  # first: a port in use is known before anything is loaded
    try:
        loaded, folder = load_engine(model, engine)
        config = ServerConfig(
            served_model_name=served_model_name or folder.resolve().name,
            api_key=api_key,
            max_num_queued_reqs=max_num_queued_reqs,
            request_timeout=request_timeout,
            tool_call_parser=tool_call_parser if enable_auto_tool_choice else None,
            log_format=log_format,
            otlp_traces_endpoint=otlp_traces_endpoint,
        )
        address = socket.getsockname()
        text = f"serving {config.served_model_name} on http://{address[0]}:{address[1]} (Ctrl-C ends it)"
        cut = run(loaded, config, socket, shutdown_timeout=shutdown_timeout, ready=lambda: say(text))
        say(f"stopped; {cut} requests were cut off after {shutdown_timeout:g} s" if cut else "stopped")
    finally:
        socket.close()
