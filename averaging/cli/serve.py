"""`averaging serve`: a small server of a language model with OpenAI's API, which follows a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from averaging.cli import options
from averaging.cli.running import CommandOutput, reporting, serve
from averaging.errors import printable

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from averaging.engine import EngineServer, Unfollowed, VersionLoaded
    from averaging.weights import FollowerOptions

DTYPES = ("auto", "float32", "bfloat16", "float16")  # of the weights; `auto` takes that of the folder
EVENTS = {"VersionLoaded": "version", "Unfollowed": "unfollowed"}


@click.command("serve")
@click.argument("folder", type=options.CheckedPath(), metavar="MODEL_DIR")
@options.option(
    "--follow",
    "Take each version of the weights that this peer publishes, or that are in this folder; repeatable, for the case "
    "that it is lost.",
    "HOST:PORT|URL|DIR",
    name="addresses",
    type=options.FOLLOWED_TYPE,
    multiple=True,
)
@options.flag("run_id", help="With --follow: follow only the weights of this run.")
@options.path("--run-token-file", "FILE", "With --follow: the run's tokens. --token-file is for this server's clients.")
@options.option("--name", "The model's name in requests.  [default: that of MODEL_DIR]", "NAME")
@options.flag("listen", default="127.0.0.1:8000", help="Address to listen on; port 0 takes a free one.")
@options.option("--device", "cpu, cuda or cuda:N.  [default: cuda if there is a GPU, else cpu]", "DEVICE")
@options.one_of("--dtype", "Of the weights; published ones are converted.", *DTYPES, default="auto")
@options.count("--batch", "Sequences that are generated at once, and that one request may ask for.", 16)
@options.count("--max-model-len", "Tokens of a sequence with its prompt.  [default: what config.json says]")
@options.hosts_option
@options.security_options
@options.insecure_option
@options.output_options
def serve_command(folder: Path, addresses: tuple[str, ...], *, as_json: bool, verbose: int, **given: Any) -> None:
    r"""Serves the language model in MODEL_DIR with OpenAI's API, on the CPU or one GPU.

    MODEL_DIR is what save_pretrained of transformers writes, with its tokenizer. With --follow it takes each version of
    the weights that a training process publishes, between two requests and never inside one, and "weight_version" of
    an answer names the version that made it. Until the first version is here, requests get status 503. A publisher that
    is away, also at the start, costs nothing but age; it is tried again. See docs/how-to/follow.md.

    For environments on a laptop and for small models. Where vLLM runs, use `averaging follow --engine`.

    \b
    Serve a folder, ask it, and follow a run:
      averaging serve base
      curl -s http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
        -d '{"model": "base", "prompt": "2 + 2 =", "max_tokens": 4}'
      averaging serve base --follow a.example:4222

    With a token, clients need no certificate. With TLS and without one, they must show a certificate of --tls-ca. The
    certificate is that for the publishers of --follow too.

    The first Ctrl+C or SIGTERM lets requests in progress finish, for 10 s.

    \b
    Events of --json, each with "event":
      ready       url, model, following
      version     version, digest, bytes, of_folder (tensors that the run does not publish), seconds
      unfollowed  version, message: no version comes, or one cannot be used, for this reason; it, or the next, is tried
      done
    """
    if not addresses:
        for option in ("run_id", "run_token_file"):
            if given[option] is not None:
                raise click.UsageError(f"--{option.replace('_', '-')} needs --follow.")
    with reporting(verbose, as_json=as_json) as report:
        _run(folder, list(dict.fromkeys(addresses)), given, report)


def _run(folder: Path, addresses: list[str], given: dict[str, Any], report: CommandOutput) -> None:
    name: str = given["name"] or folder.absolute().name

    def emit(event: VersionLoaded | Unfollowed) -> None:
        report.emit({"event": EVENTS[type(event).__name__], **asdict(event)}, str(event))

    import torch

    from averaging.engine import EngineServer, load_model

    device = given["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    of_access = ("token_file", "tls_ca", "tls_cert", "tls_key", "insecure", "hosts")
    server = EngineServer(
        load_model(folder, device=device, dtype=given["dtype"], bare=bool(addresses)),
        name=name,
        follow=_follower_options(addresses, given) if addresses else None,
        listen=given["listen"],
        batch=given["batch"],
        max_model_len=given["max_model_len"],
        on_event=emit,
        **{option: given[option] for option in of_access},
    )

    async def start(stack: AsyncExitStack) -> EngineServer:
        await stack.enter_async_context(server)
        event = {"event": "ready", "url": server.url, "model": name, "following": addresses}
        following = f", following {', '.join(addresses)}" if addresses else ""
        report.emit(event, f"serving {printable(name)} at {server.url}/v1{following}; Ctrl+C ends this")
        return server

    serve(report, start)


def _follower_options(addresses: list[str], given: dict[str, Any]) -> FollowerOptions:
    from averaging.weights import FollowerOptions

    credentials = options.credentials_of({**given, "token_file": given["run_token_file"]})
    return FollowerOptions(join=addresses, run_id=given["run_id"] or "", credentials=credentials, listen=None)
