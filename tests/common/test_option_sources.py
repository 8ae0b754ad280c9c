"""Options from a file, the environment and arguments: which wins, and what errors say."""

from pathlib import Path

import pytest

from averaging import CompressionType, ConfigError, Mode, PeerConfig
from averaging.config import configure

EVERYTHING = """
run_id = "gpt"
join = ["a.example:4222", "b.example:4222"]
group_size = 4
mode = "client"
group_wait = 2
share_state = false
receipts = "rounds.jsonl"
compression = "fp16"

[tls]
ca = "ca.pem"
cert = "/etc/b.pem"
key = "b.key"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(EVERYTHING)
    return path


def test_a_file_is_read_and_its_paths_are_beside_it(file: Path) -> None:
    config = PeerConfig.from_toml(file, environ={})
    assert (config.run_id, config.join, config.group_size) == ("gpt", ["a.example:4222", "b.example:4222"], 4)
    assert (config.mode, config.compression, config.share_state) == (Mode.CLIENT, CompressionType.FLOAT16, False)
    directory = file.parent
    files = (str(directory / "ca.pem"), "/etc/b.pem", str(directory / "b.key"))
    assert (config.tls_ca, config.tls_cert, config.tls_key) == files
    assert config.receipts == str(directory / "rounds.jsonl")


def test_the_environment_wins_over_the_file_and_arguments_win_over_both(file: Path) -> None:
    variables = {
        "AVERAGING_GROUP_SIZE": "5",
        "AVERAGING_JOIN": "c.example:1, d.example:2",
        "AVERAGING_SHARE_STATE": "true",
        "AVERAGING_GROUP_WAIT": "3.5",
        "AVERAGING_RUN_ID": "",
        "AVERAGING_CONFIG": "elsewhere.toml",
        "PATH": "/bin",
    }
    config = PeerConfig.from_toml(file, environ=variables, group_wait=4.5, group_bits=None, mode="node")
    assert (config.run_id, config.group_size, config.share_state) == ("gpt", 5, True)
    assert list(config.join) == ["c.example:1", "d.example:2"]
    assert (config.group_wait, config.group_bits, config.mode) == (4.5, "", Mode.NODE)
    assert PeerConfig.from_environment(variables, run_id="other").group_size == 5


@pytest.mark.parametrize(
    ("variables", "arguments", "named"),
    [
        ({"AVERAGING_GROUP_SIZE": "1"}, {}, ["AVERAGING_GROUP_SIZE must be a whole number of at least 2, not 1"]),
        ({}, {"min_group_size": 9}, ["group_size = 4 in ", "run.toml is below min_group_size=9"]),
        ({"AVERAGING_SHARE_STATE": "perhaps"}, {}, ["AVERAGING_SHARE_STATE must be True or False, not 'perhaps'"]),
        ({"AVERAGING_JOIN": "nowhere"}, {}, ["AVERAGING_JOIN: 'nowhere' is not an address"]),
        ({"AVERAGING_TARGET_GROUP_SIZE": "4"}, {}, ["AVERAGING_TARGET_GROUP_SIZE", "did you mean group_size?"]),
        ({}, {"matchmaking_time": 3.0}, ["did you mean group_wait?"]),
        ({}, {"xyzzy": 3.0}, ["the options are", "stall_timeout"]),
    ],
    ids=str,
)
def test_an_error_names_the_source(
    file: Path, variables: dict[str, str], arguments: dict[str, object], named: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        PeerConfig.from_toml(file, environ=variables, **arguments)
    assert [text for text in named if text not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("content", "named"),
    [("group_size =", "is not TOML"), ("tls = 3", "a table with ca, cert and key"), ("group_size = 4", "run_id")],
)
def test_a_broken_file(tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=named):
        PeerConfig.from_toml(path, environ={})
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        PeerConfig.from_toml(tmp_path / "none.toml", environ={})


def test_single_options_win_over_a_config() -> None:
    config = PeerConfig(run_id="a", group_size=4, min_group_size=3)
    assert configure(config, None, {"group_size": 5}) == PeerConfig(run_id="a", group_size=5, min_group_size=3)
    assert configure(config, "b", {}).run_id == "b"
    with pytest.raises(ConfigError, match="run_id is missing"):
        configure(None, None, {})
    with pytest.raises(ConfigError, match="must be a PeerConfig"):
        configure("a.toml", None, {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="did you mean join"):
        configure(None, "a", {"initial_peers": []})
