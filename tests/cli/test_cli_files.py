"""Files of the command line: what cannot be used is refused by name, what is written is whole."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from averaging.cli import main
from averaging.cli.files import Document, Output, read

GOOD = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1.5, dtype=torch.bfloat16), "e": torch.empty(0, 3)}


def write_nothing(path: Path) -> None:
    path.write_bytes(b"")


def write_text(path: Path) -> None:
    path.write_text("these are no tensors, this is a text")


def write_truncated(path: Path) -> None:
    save_file(GOOD, path)
    path.write_bytes(path.read_bytes()[:-1])


def write_trailing(path: Path) -> None:
    save_file(GOOD, path)
    path.write_bytes(path.read_bytes() + b"x")


def saver(**tensors: torch.Tensor) -> Callable[[Path], None]:
    return lambda path: save_file(tensors, path)


BAD_FILES = {
    "missing": (lambda _: None, "does not exist", "safetensors.torch.save_file"),
    "directory": (Path.mkdir, "is not a file", "safetensors.torch.save_file"),
    "fifo": (os.mkfifo, "is not a file", "safetensors.torch.save_file"),
    "nothing": (write_nothing, "deserializing header", "copy it again"),
    "text": (write_text, "cannot be read as a safetensors file", "copy it again"),
    "truncated": (write_truncated, "cannot be read as a safetensors file", "copy it again"),
    "trailing": (write_trailing, "cannot be read as a safetensors file", "copy it again"),
    "no tensors": (saver(), "contains no tensors to average", "excluded ones"),
    "integers": (
        saver(step=torch.tensor(3), mask=torch.tensor([True])),
        "no tensors to average",
        "apart from integers",
    ),
    "float8": (saver(q=torch.ones(2).to(torch.float8_e4m3fn)), "tensor 'q' (torch.float8", "--exclude"),
    "nan": (saver(a=torch.ones(2), z=torch.tensor([1.0, torch.nan])), "tensor 'z'", "--non-finite allow"),
    "infinity": (saver(z=torch.tensor(-torch.inf, dtype=torch.float16)), "tensor 'z'", "--non-finite allow"),
}


def peer(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["peer", *map(str, arguments), "--run-id", "demo"])


@pytest.mark.parametrize(("make", "told", "remedy"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_refused(tmp_path: Path, make: Callable[[Path], None], told: str, remedy: str) -> None:
    source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    make(source)
    result = peer(source, "--output", output)
    assert result.exit_code == 2
    assert told in result.stderr
    assert remedy in result.stderr
    assert str(source) in result.stderr
    assert list(tmp_path.iterdir()) == ([source] if source.exists() else [])


@pytest.mark.parametrize("name", ["in.safetensors", "link.safetensors", "sub/../in.safetensors", "hard.safetensors"])
def test_the_input_is_not_overwritten_by_accident(tmp_path: Path, name: str) -> None:
    source = tmp_path / "in.safetensors"
    save_file(GOOD, source)
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.safetensors").symlink_to(source)
    (tmp_path / "hard.safetensors").hardlink_to(source)
    before = source.read_bytes()
    result = peer(source, "--output", tmp_path / name)
    assert result.exit_code == 2
    assert "exists; give --overwrite" in result.stderr
    assert source.read_bytes() == before


def bad_outputs(tmp_path: Path) -> list[tuple[Path, str]]:
    (tmp_path / "there.safetensors").write_bytes(b"precious")
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    return [
        (tmp_path / "there.safetensors", "exists; give --overwrite"),
        (tmp_path / "directory", "is not a file"),
        (tmp_path / "fifo", "is not a file"),
        (tmp_path / "none" / "out", "there is no directory"),
        (tmp_path / "there.safetensors" / "out", "there is no directory"),
        (tmp_path / ("n" * 255), "shorter name"),
        (tmp_path / ("n" * 256), "cannot be looked at (File name too long); give another name"),
        (tmp_path / "circle", "cannot be looked at (Too many levels of symbolic links)"),
        (Path("/proc/averaging-out"), "choose a writable directory"),
        (Path("/dev/null"), "is not a file"),
    ]


def test_a_bad_output_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    outputs = bad_outputs(tmp_path)
    source = tmp_path / "in.safetensors"
    save_file(GOOD, source)
    before = sorted(tmp_path.rglob("*"))
    for path, told in outputs:
        state = CliRunner().invoke(main, ["state", "127.0.0.1:1", "--output", str(path)])
        for result in (peer(source, "--output", path), state):
            assert (result.exit_code, told in result.stderr) == (2, True), path
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "there.safetensors").read_bytes() == b"precious"


def test_what_is_written_is_what_was_read(tmp_path: Path) -> None:
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file(GOOD, source, {"format": "pt", "note": "π"})
    document = read(source)
    output = Output(target, overwrite=False)
    output.write({"w": torch.zeros(1)}, None)
    assert read(target).metadata is None
    output.write(document.tensors, document.metadata)  # again, by its owner
    written = load_file(target)
    assert set(written) == set(GOOD)
    for name, tensor in GOOD.items():
        assert written[name].dtype == tensor.dtype
        assert written[name].shape == tensor.shape
        assert torch.equal(written[name], tensor)
    with safe_open(target, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "note": "π"}


def test_a_new_file_has_the_usual_permissions_and_an_old_one_keeps_its_own(tmp_path: Path) -> None:
    plain, new, old = tmp_path / "plain", tmp_path / "new", tmp_path / "old"
    plain.touch()
    old.touch(mode=0o640)
    old.chmod(0o640)
    for path in (new, old):
        Output(path, overwrite=True).write(GOOD, None)
    assert stat.S_IMODE(new.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    assert stat.S_IMODE(old.stat().st_mode) == 0o640


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real" / "out")
    Output(link, overwrite=False).write(GOOD, None)
    assert link.is_symlink()
    assert set(load_file(tmp_path / "real" / "out")) == set(GOOD)


LAYERS = {name: torch.ones(2) for name in ("base.weight", "lora_a.weight", "lora_b.weight")} | {"seen": torch.tensor(7)}


@pytest.mark.parametrize(
    ("only", "exclude", "averaged"),
    [
        ([], [], ["base.weight", "lora_a.weight", "lora_b.weight"]),
        (["lora_*"], [], ["lora_a.weight", "lora_b.weight"]),
        (["lora_a*", "base*"], [], ["base.weight", "lora_a.weight"]),
        ([], ["lora_?.weight"], ["base.weight"]),
        (["lora_*"], ["*_b.*"], ["lora_a.weight"]),
        (["seen", "base.weight"], [], ["base.weight"]),
    ],
)
def test_integers_and_what_is_not_chosen_are_kept(only: list[str], exclude: list[str], averaged: list[str]) -> None:
    divided = Document(LAYERS, {"format": "pt"}).divided(Path("in.safetensors"), only, exclude)
    assert list(divided.tensors) == averaged
    assert divided.kept == {name: tensor for name, tensor in LAYERS.items() if name not in averaged}
    assert divided.metadata == {"format": "pt"}


@pytest.mark.parametrize("option", ["--only", "--exclude"])
def test_a_pattern_that_matches_nothing_is_refused(tmp_path: Path, option: str) -> None:
    source = tmp_path / "in.safetensors"
    save_file(LAYERS, source)
    result = peer(source, option, "lora*", option, "Lora*")
    assert result.exit_code == 2
    assert f"{option} 'Lora*' matches no tensor of {source}, whose first one is 'base.weight'" in result.stderr
