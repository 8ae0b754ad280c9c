"""`averaging rollouts`: makes groups of an environment's rollouts and posts them to a feed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from averaging.cli import events
from averaging.cli.exits import Stop, run
from averaging.cli.failure import WRONG_USAGE, CommandError, Stopped
from averaging.cli.options import CheckedPath, flag, json_value, output_options, security_options
from averaging.errors import printable

if TYPE_CHECKING:
    from averaging.cli.output import CommandOutput
    from averaging.rl.feed import CommandEvent

SAMPLING = ("temperature", "max_tokens")
"""The options that are parameters of the engine."""

LOOPBACK = "127.0.0.1,localhost"
"""Hosts that are never asked through a proxy: environments and the engine's gateway talk on them."""


@click.command("rollouts")
@click.option("--environment", required=True, metavar="NAME", help="Package or module of the environment.")
@click.option("--engine", required=True, metavar="URL", help="The engine: averaging serve, or vLLM.")
@click.option("--feed", required=True, metavar="URL", help="The feed that takes the groups.")
@click.option(
    "--environment-args",
    metavar="JSON",
    help="The environment's own settings, as verifiers has them under --env, for example "
    '\'{"taskset": {"split": "train"}}\'.',
)
@click.option("--group-size", default=8, type=click.IntRange(min=1), metavar="N", help="Rollouts of each task.")
@click.option(
    "--sequences",
    default=1,
    type=click.IntRange(min=1),
    metavar="N",
    help="Sequences of each rollout that are trained: more than 1 if several agents are.",
)
@click.option(
    "--tokenizer", metavar="DIR|NAME", help="The model whose tokenizer is used.  [default: what the engine tells]"
)
@click.option(
    "--renderer",
    metavar="NAME",
    help="Renderer of the chat template, for example qwen3.  [default: by the tokenizer's name, else its template]",
)
@click.option("--model", metavar="NAME", help="Model of the engine.  [default: the first]")
@click.option("--temperature", default=1.0, type=click.FloatRange(min=0), metavar="X", help="Of sampling.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Limit of each reply; one that reaches it is cut off, see --truncated.  [default: the model's length]",
)
@click.option(
    "--sampling-args", metavar="JSON", help="Further parameters of the engine, for example '{\"top_k\": 50}'."
)
@click.option(
    "--truncated",
    type=click.Choice(["drop", "mask", "train"]),
    default="drop",
    help="Rollouts that a limit has cut off: made again and at last dropped with their group; posted with all tokens "
    "masked; or posted like others, but marked in overrides.",
)
@click.option("--concurrency", default=32, type=click.IntRange(min=1), metavar="N", help="Rollouts at one time.")
@click.option("--max-groups", type=click.IntRange(min=1), metavar="N", help="End after posting so many groups.")
@click.option(
    "--engine-token-file", type=CheckedPath(dir_okay=False), metavar="FILE", help="File with the engine's token."
)
@flag("metrics_listen")
@security_options
@output_options
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

    \b
    Ten groups of 4 with settings of the environment, sampled at temperature 0.7:
      averaging rollouts --environment gsm8k --environment-args '{"taskset": {"split": "train"}}' \
        --engine http://gpu.example:8000 --feed https://feed.example:8001 --token-file token \
        --group-size 4 --temperature 0.7 --max-tokens 512 --max-groups 10

    \b
    One of verifiers' environments over the tasks of another one, with 4 sequences in each rollout:
      averaging rollouts --environment best-of-n+my_environment --sequences 4 --group-size 2 \
        --engine http://127.0.0.1:8000 --feed http://127.0.0.1:8001

    The security options are for the feed; --tls-ca is used for an https engine too.

    Exit codes: 0 --max-groups are posted, or stopped by Ctrl+C or SIGTERM; 1 the feed or the engine refuses, or ten
    groups were dropped one after the other; 2 wrong usage, or the environment or tokenizer cannot be used;
    130, 143 stopped by a signal during the start.

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
      error      message
    """
    from averaging.cli.output import reporting

    for name in ("environment_args", "sampling_args"):
        given[name] = _json_object(name, given[name])
    with reporting(verbose, as_json=as_json) as report:
        _run(given, report, as_json=as_json)


def _json_object(name: str, text: str | None) -> dict[str, Any]:
    value = {} if text is None else json_value(text)
    if not isinstance(value, dict):
        raise click.UsageError(f"--{name.replace('_', '-')} must be a JSON object, for example '{{\"seed\": 1}}'.")
    return value


def _run(given: dict[str, Any], report: CommandOutput, *, as_json: bool) -> None:
    _prepare_process()
    try:
        from averaging.rl.feed import split_url
        from averaging.rl.rollouts import ROLLOUT_METRICS, RolloutOptions, Rollouts, TruncatedMode
    except ModuleNotFoundError as error:
        raise CommandError(
            f"{error.name} is not installed; run: pip install 'averaging[rollouts]'", WRONG_USAGE
        ) from None
    from averaging.metrics import MetricsListener
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
            raise CommandError("stopped during the start", 128 + stop.number) from None
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
    if event.name == "failed" and not as_json and not _is_told(event.fields["number"]):
        return
    item = event.as_json(), printable(event.text, 2000)
    report.emit(*(events.with_metrics(item, metrics) if event.name == "ready" else item))


def _is_told(number: int) -> bool:
    """Whether a failure is the 1st, 10th, 100th and so on, so that many do not hide all other lines."""
    return str(number).rstrip("0") == "1"
