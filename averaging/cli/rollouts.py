"""`averaging rollouts`: makes groups of an environment's rollouts and posts them to a feed."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from averaging.cli import options
from averaging.cli.running import (
    CommandError,
    CommandOutput,
    Stop,
    Stopped,
    reporting,
    run,
    with_metrics,
)
from averaging.errors import printable

if TYPE_CHECKING:
    from averaging.rl.feed import CommandEvent

SAMPLING = ("temperature", "max_tokens")  # the options that are parameters of the engine

LOOPBACK = "127.0.0.1,localhost"
"""Hosts that are never asked through a proxy: environments and the engine's gateway talk on them."""


@click.command("rollouts")
@options.option("--environment", "Package or module of the environment.", "NAME", required=True)
@options.option("--engine", "The engine: averaging serve, or vLLM.", "URL", required=True)
@options.option("--feed", "The feed that takes the groups.", "URL", required=True)
@options.option("--environment-args", "The environment's own settings, as verifiers has them under --env.", "JSON")
@options.count("--group-size", "Rollouts of each task.", 8)
@options.count("--sequences", "Sequences of each rollout that are trained: more than 1 if several agents are.", 1)
@options.option("--tokenizer", "The model whose tokenizer is used.  [default: what the engine tells]", "DIR|NAME")
@options.option(
    "--renderer", "Renderer of the chat template, as qwen3.  [default: by the name, else the template]", "NAME"
)
@options.option(
    "--model", "Model of the engine, or the adapter whose newest version is asked.  [default: the first]", "NAME"
)
@options.option("--temperature", "Of sampling.", "X", default=1.0, type=click.FloatRange(min=0))
@options.count("--max-tokens", "Limit of each reply; one that reaches it is cut off.  [default: the model's length]")
@options.option("--sampling-args", "Further parameters of the engine, for example '{\"top_k\": 50}'.", "JSON")
@options.one_of(
    "--truncated",
    "Rollouts that a limit has cut off: made again and at last dropped with their group; posted with all tokens "
    "masked; or posted like others, but marked in overrides.",
    *("drop", "mask", "train"),
    default="drop",
)
@options.count("--concurrency", "Rollouts at one time.", 32)
@options.count("--max-groups", "End after posting so many groups.")
@options.path("--engine-token-file", "FILE", "File with the engine's token.")
@options.flag("metrics_listen")
@options.security_options
@options.output_options
def rollouts_command(*, as_json: bool, verbose: int, **given: Any) -> None:
    r"""Makes rollouts of an environment of verifiers and posts them to a feed.

    For each task it makes --group-size rollouts with the engine, has the environment score them, and posts them as one
    group: token ids, masks, log-probabilities, scores, and the versions of the weights that made them. Tokens that the
    model did not write are masked. See docs/how-to/rollouts.md.

    While the engine or the feed is away, requests wait. Ctrl+C posts the groups that are complete; what is not posted
    when the command ends is made again by the next one, and the feed has no group twice. While the engine's weights are
    too old for the feed's --max-staleness, or have no version, it waits for newer ones.

    \b
    A trainer, an engine and a feed on this machine, and the environment my_environment.py:
      averaging rollouts --environment my_environment \
        --engine http://127.0.0.1:8000 --feed http://127.0.0.1:8001

    The security options are for the feed; --tls-ca is used for an https engine too.

    \b
    Events of --json, each with "event":
      loading    environment
      ready      environment, engine, model, version, with --metrics-listen also metrics
      posted     group, rollouts, score, lowest, highest, versions, newest_version, stale, waiting, rate
      failed     group, reason, message, attempt, number (with this reason): a rollout is no sample, and is made again
                 up to 3 times; as text only the 1st, 10th, 100th … with a reason
      dropped    group, message
      equal      groups, score: so many groups in a row have equal scores, at each hundred
      paused     version, newest_version: the engine's weights are too old for the trainer, or have no version
      resumed    version
      away       what (engine, feed, environment), url (or name), message
      back       what, url
      done       groups, rollouts, stale, dropped, failed (number by reason), waiting (complete and not posted)
    """
    for name in ("environment_args", "sampling_args"):
        given[name] = _json_object(name, given[name])
    with reporting(verbose, as_json=as_json) as report:
        _run(given, report, as_json=as_json)


def _json_object(name: str, text: str | None) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        value = json.loads(text or "{}")
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # neither NaN nor half a surrogate pair
        if isinstance(value, dict):
            return value
    raise click.UsageError(f"--{name.replace('_', '-')} must be a JSON object, for example '{{\"seed\": 1}}'.")


def _run(given: dict[str, Any], report: CommandOutput, *, as_json: bool) -> None:
    _prepare_process()
    from averaging.metrics import MetricsListener
    from averaging.rl.feed import split_url
    from averaging.rl.rollouts import ROLLOUT_METRICS, RolloutOptions, Rollouts, TruncatedMode
    from averaging.security import read_tokens

    metrics_listen, token_file = given.pop("metrics_listen"), given.pop("engine_token_file")
    sampling = {name: value for name in SAMPLING if (value := given.pop(name)) is not None} | given.pop("sampling_args")
    feed_options = {name: given.pop(name) for name in ("tls_ca", "tls_cert", "tls_key", "token_file")}
    given["truncated"] = TruncatedMode(given["truncated"])
    report.emit({"event": "loading", "environment": given["environment"]}, f"loading {given['environment']}")
    rollouts: Rollouts | None = None

    async def make(_: Stop) -> None:
        nonlocal rollouts
        if tokens := read_tokens(token_file):
            given["engine"] = with_password(split_url(given["engine"], "an engine")[0], tokens[0])
        options = RolloutOptions(**given, sampling=sampling, feed_options=feed_options)
        made = rollouts = Rollouts(options, lambda event: _report(event, report, metrics.endpoint, as_json=as_json))
        health = lambda: "" if made.started else "starting"  # noqa: E731
        metrics = MetricsListener(metrics_listen, "averaging rollouts", ROLLOUT_METRICS, made.samples, health)
        async with metrics:
            await made.run()

    try:
        run(make)
    except Stopped as stop:
        if rollouts is None or not rollouts.started:
            raise CommandError("stopped during the start", stop.exit_code) from None
    if rollouts is not None:
        _report(rollouts.summary(), report, "", as_json=as_json)


def with_password(url: str, password: str) -> str:
    """Returns an address with a password in it."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://any:{quote(password, safe='')}@{rest}"


def _prepare_process() -> None:
    """Has modules of the current directory found, and no proxy asked for this machine."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), LOOPBACK)))


def _report(event: CommandEvent, report: CommandOutput, metrics: str, *, as_json: bool) -> None:
    # As text the 1st failure, the 10th, the 100th and so on, so that many do not hide all other lines.
    if event.name == "failed" and not as_json and str(event.fields["number"]).rstrip("0") != "1":
        return
    item = event.as_json(), printable(event.text, 2000)
    report.emit(*(with_metrics(item, metrics) if event.name == "ready" else item))
