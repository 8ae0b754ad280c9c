"""Wrong usage: exit code 2, the option by its name, what to do instead, and nothing is read or written."""

import json
import signal
import subprocess
import sys
from dataclasses import MISSING, fields
from importlib.metadata import entry_points, version
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

import averaging
from averaging.cli import main
from averaging.cli.ca import ca_command
from averaging.cli.options import join_command
from averaging.cli.peer import peer_command
from averaging.cli.running import DEFAULTS, CommandError, run, starting
from averaging.config import OPTIONS, NonFinite, PeerConfig
from averaging.protocol.group import Mode
from averaging.protocol.messages import CompressionType
from tests.support.selection import rest_is_long


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.safetensors"
    save_file({"w": torch.ones(2)}, path)
    return path


def peer(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["peer", *map(str, arguments)])


WRONG_VALUES = [
    (["--run-id", "a.b"], "--run-id", "without a dot"),
    (["--join", "nowhere"], "--join", "give HOST:PORT"),
    (["--join", "127.0.0.1:0"], "--join", "give the port on which that peer listens"),
    (["--rounds", "0"], "--rounds", "x>=1"),
    (["--overwrite"], "--overwrite", "add --output FILE"),
    (["--group-size", "3", "--min-group-size", "4"], "--group-size 3", "below --min-group-size 4"),
    (["--weight", "nan"], "--weight", "must be a finite number of at least 0"),
    (["--compression", "zip"], "--compression", "one of none, meanstd_16bit, float16"),
    (["--aggregation", "trimmed"], "--aggregation", "trimmed:F"),
    (["--mode", "client"], "--mode client", "needs --join"),
    (["--mode", "client", "--join", "a:1", "--listen", "b:2"], "--mode client", "leave --listen out"),
    (["--mode", "auxiliary", "--output", "out.safetensors"], "--mode auxiliary", "leave --output out"),
    (["--receipts", "in.safetensors"], "--receipts", "holds something other than receipts; give another name"),
    (["--listen", "0.0.0.0:0"], "0.0.0.0:0", "give --advertise as well"),
    (["--listen", "0.0.0.0:0", "--advertise", "a:1"], "0.0.0.0:0", "or --insecure if"),
    (["--tls-ca", "ca.pem"], "--tls-ca", "give --tls-cert and --tls-key as well"),
    (["--tls-ca", "ca.pem", "--tls-cert", "a.pem", "--tls-key", "a.key"], "--tls-ca ca.pem", "cannot be read"),
    (["--token-file", "token"], "--token-file token", "cannot be read"),
]


@pytest.mark.parametrize(("wrong", "named", "remedy"), WRONG_VALUES, ids=lambda value: str(value)[:60])
def test_a_wrong_option_is_named_with_its_remedy(
    source: Path, wrong: list[str], named: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    before = source.read_bytes()
    result = peer(source, *([] if "--run-id" in wrong else ["--run-id", "demo"]), *wrong)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert named in result.stderr
    assert remedy in result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in source.parent.iterdir()] == [source.name]
    assert source.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["peer", "a.safetensors"], "--run-id is missing"),
        (["state", "127.0.0.1", "--output", "x"], "give HOST:PORT"),
        (["state", "127.0.0.1:1", "--output", "x", "--timeout", "0"], "--timeout"),
        (
            ["peer", "a.safetensors", "--run-id", "demo", "--receipts", "nowhere/a.jsonl"],
            "is a directory, or is in none",
        ),
        (["peer", "f" * 300, "--run-id", "demo"], "cannot be looked at (File name too long); give another name"),
        (["watch", "127.0.0.1:0"], "give the port"),
        (["watch", "127.0.0.1:1", "--token-file", "nowhere/token"], "--token-file nowhere/token cannot be read"),
        (["ca", "init", "--days", "nan"], "--days"),
        (["ca", "issue", "a", "--client-mode", "--days", "nan"], "finite number of days from 0.001 to 36500"),
        (["register", "--listen", "0.0.0.0:0", "--advertise", "192.0.2.7:0"], "--insecure"),
        (["dashboard", "--join", "127.0.0.1:1", "--https-key", "k"], "--https-cert and --https-key belong together"),
        (["dashboard", "--join", "127.0.0.1:1", "--listen", "0.0.0.0:0"], "give --https-cert and --https-key and"),
    ],
    ids=str,
)
def test_a_wrong_command_line_is_refused(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert told in result.stderr


def test_an_error_is_an_event_too(tmp_path: Path) -> None:
    result = peer(tmp_path / "missing", "--run-id", "demo", "--json")
    assert result.exit_code == 2
    (line,) = result.stdout.splitlines()
    assert json.loads(line)["event"] == "error"
    assert json.loads(line)["message"] in result.stderr


def shown(value: object) -> str:
    """A default, as --help shows it."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return ",".join(value)
    return value.name.lower() if isinstance(value, Mode | CompressionType) else str(value)


def test_options_and_defaults_are_those_of_the_library() -> None:
    options = {str(option.name): option for option in peer_command.params if isinstance(option, click.Option)}
    assert set(options) >= set(OPTIONS)
    for field in fields(PeerConfig):
        if field.default in (MISSING, None, "", ()):
            continue
        option = options[field.name]
        assert option.default is None
        if isinstance(field.default, bool):
            expected = (option.opts if field.default else option.secondary_opts)[0]
        else:
            expected = shown(field.default)
        assert f"[default: {expected}" in str(option.help), field.name


def test_version_and_entry_point() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.stdout.split()[0] == "averaging"
    (script,) = entry_points(group="console_scripts", name="averaging")
    assert script.load() is main


def test_the_command_that_joins_repeats_what_must_be_the_same() -> None:
    file = Path("my model.safetensors")
    command = join_command(file, PeerConfig(run_id="demo", compression="fp16", group_size=4, listen="a:1"))  # type: ignore[arg-type]
    assert command == [
        *("averaging", "peer", "my model.safetensors", "--run-id", "demo"),
        *("--group-size", "4", "--compression", "float16"),
    ]
    secured = PeerConfig(run_id="demo", tls_ca="ca.pem", tls_cert="a.pem", tls_key="a.key", token_file="t")
    assert join_command(file, secured)[5:] == [
        *("--tls-ca", "ca.pem", "--tls-cert", "a.pem", "--tls-key", "a.key", "--token-file", "t")
    ]
    # A peer that refuses NaN would drop this one.
    lenient = PeerConfig(run_id="demo", non_finite=NonFinite.ALLOW)
    assert join_command(file, lenient)[5:] == ["--non-finite", "allow"]


@pytest.mark.parametrize(
    ("file", "variables", "arguments", "named"),
    [
        ("grup_size = 4", {}, [], ["group_size", "run.toml"]),
        ("", {"AVERAGING_GROUPSIZE": "4"}, [], ["AVERAGING_GROUPSIZE", "group_size"]),
        ("group_size = 3", {}, ["--min-group-size", "4"], ["group_size = 3 in run.toml is below --min-group-size 4"]),
        ("", {"AVERAGING_GROUP_SIZE": "many"}, [], ["AVERAGING_GROUP_SIZE must be a whole number of at least 2, not"]),
        ("group_size = 4 4", {}, [], ["run.toml is not TOML"]),
        ("mode = 'client'", {}, [], ["--mode client needs --join"]),
    ],
    ids=str,
)
def test_a_wrong_option_names_its_source(
    source: Path,
    file: str,
    variables: dict[str, str],
    arguments: list[str],
    named: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(source.parent)
    Path("run.toml").write_text(file)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = peer(source, "--run-id", "demo", "--config", "run.toml", *arguments)
    assert result.exit_code == 2, result.output
    assert [text for text in named if text not in result.stderr] == []


def test_ctrl_c_while_arguments_are_read_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("averaging.common.options.parse_address", lambda _: signal.raise_signal(signal.SIGINT))
    result = CliRunner().invoke(main, ["watch", "127.0.0.1:1"])
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "Error: stopped by SIGINT\n"


@pytest.mark.parametrize("number", rest_is_long([signal.SIGINT, signal.SIGTERM]))
def test_a_signal_before_the_start_is_reported_and_gives_the_exit_code(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import signal, sys\n"
        "from averaging.cli.running import CommandError, starting\n"
        "try:\n"
        "    with starting():\n"
        f"        exec('signal.raise_signal({number:d})')\n"  # as in the middle of making a dataclass
        "except CommandError as failure:\n"
        "    print(failure.message)\n"
        "    sys.exit(failure.exit_code)\n"
    )
    command = [sys.executable, "-m", "program"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (128 + number, "")
    assert ended.stdout == f"stopped by {number.name}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_work_does_not_deny_it(number: signal.Signals) -> None:
    async def work(_: object) -> None:
        return

    def work_and_end() -> None:
        run(work)
        signal.raise_signal(number)

    with pytest.raises(CommandError, match=f"^stopped by {number.name}$") as caught, starting():
        work_and_end()
    assert caught.value.exit_code == 128 + number


@pytest.mark.parametrize("number", rest_is_long([signal.SIGINT, signal.SIGTERM]))
def test_a_signal_while_python_ends_changes_no_exit_code(number: signal.Signals) -> None:
    program = (
        "import atexit, signal; from averaging.cli import main; "
        f"atexit.register(signal.raise_signal, {number:d}); main()"
    )
    for argument, code in (("--version", 0), ("--none", 2)):
        command = [sys.executable, "-c", program, argument]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == code, ended.stderr
        assert "Traceback" not in ended.stderr


def test_a_program_that_calls_a_command_hears_signals_afterwards() -> None:
    before = [signal.getsignal(number) for number in DEFAULTS]
    main(["--version"], standalone_mode=False)
    assert [signal.getsignal(number) for number in DEFAULTS] == before


def test_the_package_offers_all_that_it_names() -> None:
    assert averaging.__version__ == version("averaging")
    for name in averaging._HOMES:
        assert getattr(averaging, name).__name__ == name
    assert set(averaging._HOMES) | {"__version__"} == set(averaging.__all__) == set(dir(averaging))
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        averaging.__getattr__("nothing_of_this_name")


@pytest.mark.parametrize("command", ["", *main.commands, *(f"ca {name}" for name in ca_command.commands)])
def test_help_keeps_the_lines_of_its_examples(command: str) -> None:
    result = CliRunner().invoke(main, [*command.split(), "--help"], terminal_width=100)
    assert result.exit_code == 0
    assert "\\b" not in result.output
    assert all(line.count("  averaging ") <= 1 for line in result.output.splitlines())
    assert any(line.startswith("    averaging ") for line in result.output.splitlines())
    assert "Exit codes: 0 " in result.output
