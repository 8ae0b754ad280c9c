"""`averaging export`: a model's folder from a checkpoint or a peer's state, and every way in which it cannot be."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from averaging import LocalSGD
from averaging.cli import main
from tests.cli.test_disk_full import full_disk
from tests.support.model_folders import base_folder, load_folder
from tests.support.processes import averaging_command
from tests.support.training import Run

NAMES = {"first.weight": torch.arange(6.0).view(2, 3), "last.bias": torch.ones(2)}


def export(*arguments: object) -> click.testing.Result:
    return CliRunner().invoke(main, ["export", *map(str, arguments)])


def told(result: click.testing.Result) -> str:
    return " ".join(result.output.split())


def wrapped(prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in NAMES.items()}


CHECKPOINTS: dict[str, Any] = {
    "a state dict": NAMES,
    "beside the averager": {"model": NAMES, "averager": {"state": {0: {"exp_avg": torch.ones(3)}}}},
    "of Lightning": {"state_dict": NAMES, "epoch": 3},
    "of torch.compile": wrapped("_orig_mod."),
    "of DistributedDataParallel": {"model": wrapped("module.")},
    "of both": wrapped("module._orig_mod."),
}


@pytest.mark.parametrize("what", CHECKPOINTS)
def test_a_checkpoint_has_the_names_of_the_model(what: str, tmp_path: Path) -> None:
    torch.save(CHECKPOINTS[what], tmp_path / "last.pt")
    base = base_folder(tmp_path / "base", {name: torch.zeros_like(tensor) for name, tensor in NAMES.items()})
    result = export(tmp_path / "last.pt", "--config", base, "--output", tmp_path / "model")
    assert result.exit_code == 0, result.output
    assert f"done: 2 tensors, 32 bytes, wrote {tmp_path / 'model'}" in told(result)
    written = load_folder(tmp_path / "model")
    assert written.keys() == NAMES.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in NAMES.items())
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"config.json", "tokenizer.json", "model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == {"last.pt", "base", "model"}


def test_a_state_file_has_its_version_and_frozen_weights_come_from_the_base(tmp_path: Path) -> None:
    of_averager = {"optimizer/exp_avg/0": torch.ones(1), "strategy/anchor/last.bias": torch.ones(2)}
    buffer = {"buffer/mean": torch.tensor([7.0])}
    state = {"last.bias": torch.full((2,), 5.0)} | of_averager | buffer
    save_file(state, tmp_path / "now.safetensors", {"averaging.version": "41"})
    base = base_folder(tmp_path / "base", NAMES | {"mean": torch.zeros(1)})
    output = tmp_path / "model"
    result = export(tmp_path / "now.safetensors", "--config", base, "--output", output, "--json")
    done = json.loads(result.stdout)
    assert done == {"event": "done", **{"version": 41, "tensors": 3, "bytes": 36, "frozen": 1, "output": str(output)}}
    written = load_folder(output)
    assert written["last.bias"].tolist() == [5.0, 5.0]
    assert written["mean"].tolist() == [7.0]
    assert torch.equal(written["first.weight"], NAMES["first.weight"])


def test_the_state_of_a_peer(tmp_path: Path) -> None:
    run = Run()
    try:
        opt = run.add(LocalSGD(2), torch.optim.AdamW)
        model = run.models[0]
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        base = base_folder(tmp_path / "base")
        for _ in range(2):
            opt.step()
        output = tmp_path / "model"
        ended = averaging_command("export", opt.endpoint, "--config", str(base), "--output", str(output))
        assert ended.returncode == 0, ended.stderr
        assert "--config has no weights, so the names" in ended.stdout
        written = load_folder(output)
        expected = model.state_dict()
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[name], expected[name]) for name in expected)
        nameless = run.add(LocalSGD(2), torch.optim.AdamW, gives_model=False, run_id="other", join=[])
        ended = averaging_command("export", nameless.endpoint, "--config", str(base), "--output", str(tmp_path / "no"))
        assert ended.returncode == 1
        assert "such as 'group0.param0': the averager was made without its model" in " ".join(ended.stderr.split())
        assert not (tmp_path / "no").exists()
    finally:
        run.close()


def test_shards_and_their_index(tmp_path: Path) -> None:
    tensors = {f"layer{n}.weight": torch.full((4, 4), float(n)) for n in range(5)}
    torch.save(tensors, tmp_path / "last.pt")
    base = base_folder(tmp_path / "base")
    result = export(tmp_path / "last.pt", "--config", base, "--output", tmp_path / "model", "--max-shard-bytes", 130)
    assert result.exit_code == 0, result.output
    files = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    assert files == [f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)]
    assert json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["metadata"] == {
        "total_size": 320
    }
    written = load_folder(tmp_path / "model")
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())


def test_a_copy_of_tied_embeddings_is_left_out_and_another_tensor_is_named(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", NAMES)
    torch.save(NAMES | {"head.weight": NAMES["first.weight"].clone()}, tmp_path / "tied.pt")
    assert export(tmp_path / "tied.pt", "--config", base, "--output", tmp_path / "model").exit_code == 0
    assert load_folder(tmp_path / "model").keys() == NAMES.keys()
    torch.save(NAMES | {"head.weight": torch.zeros(2, 3)}, tmp_path / "other.pt")
    result = export(tmp_path / "other.pt", "--config", base, "--output", tmp_path / "no")
    assert result.exit_code == 1
    assert "'head.weight' is no tensor of the model in" in told(result)
    torch.save(NAMES | {"last.bias": torch.zeros(3)}, tmp_path / "shape.pt")
    result = export(tmp_path / "shape.pt", "--config", base, "--output", tmp_path / "no")
    assert "'last.bias' is [3], and [2] in" in told(result)
    torch.save({"base_model.model.first.lora_A.default.weight": torch.zeros(2, 3)}, tmp_path / "adapter.pt")
    result = export(tmp_path / "adapter.pt", "--config", base, "--output", tmp_path / "no")
    assert "belongs to an adapter, not to the model. Write it in the script, with strategy.save_adapter" in told(result)
    assert not (tmp_path / "no").exists()


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(10_000)}, tmp_path / "last.pt")
    with full_disk(1000):
        result = export(
            tmp_path / "last.pt", "--config", base_folder(tmp_path / "base"), "--output", tmp_path / "model"
        )
    assert (result.exit_code, "could not be written" in told(result)) == (1, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "last.pt"]


def no_model(folder: Path) -> list[object]:
    torch.save({"optimizer": {"state": {}}}, folder / "last.pt")
    return [folder / "last.pt"]


def code(folder: Path) -> list[object]:
    torch.save({"model": print}, folder / "last.pt")  # would run code of others
    return [folder / "last.pt"]


def garbage(folder: Path) -> list[object]:
    (folder / "last.pt").write_bytes(b"garbage")
    return [folder / "last.pt"]


def good(folder: Path) -> list[object]:
    torch.save(NAMES, folder / "last.pt")
    return [folder / "last.pt"]


@pytest.mark.parametrize(
    ("source", "more", "message"),
    [
        (no_model, [], "has no model; save its state_dict() under 'model'"),
        (code, [], "has more than tensors and plain values"),
        (garbage, [], "cannot be read as a checkpoint of torch.save"),
        (lambda _: ["nowhere"], [], "nowhere does not exist; give a checkpoint, or HOST:PORT"),
        (good, ["--config", "nothing"], "there is no directory nothing"),
        (good, ["--config", "."], "has no config.json"),
        (good, ["--output", "base"], "is not empty; remove it"),
        (good, ["--output", "last.pt"], "exists and is no directory"),
    ],
)
def test_wrong_arguments(
    source: Callable[[Path], list[object]],
    more: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    base_folder(tmp_path / "base")
    result = export(*source(tmp_path), "--config", "base", "--output", "model", *more)
    assert result.exit_code == 2, result.output
    assert message in told(result)
    assert "weights_only" not in told(result), "torch's advice to run what is in the file"
    assert not (tmp_path / "model").exists()


def test_links_that_lead_out_of_the_folder_are_not_copied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save(NAMES, tmp_path / "last.pt")
    base, secret = base_folder(tmp_path / "base"), tmp_path / "secret"
    secret.write_text("secret")
    (base / "vocab.txt").symlink_to(secret)
    (base / "merges.txt").symlink_to("../secret")
    (base / "special.json").symlink_to("tokenizer.json")
    result = export(tmp_path / "last.pt", "--config", base, "--output", tmp_path / "model")
    assert result.exit_code == 0, result.output
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"config.json", "tokenizer.json", "special.json", "model.safetensors"}
    assert caplog.text.count("leads out of the folder") == 2
    (base / "config.json").rename(tmp_path / "config.json")
    (base / "config.json").symlink_to("../config.json")
    result = export(tmp_path / "last.pt", "--config", base, "--output", tmp_path / "other")
    assert (result.exit_code, "is a link that leads out of it" in told(result)) == (2, True)


def test_a_snapshot_of_the_hub_is_copied(tmp_path: Path) -> None:
    """There every file is a link to a blob beside all snapshots."""
    torch.save(NAMES, tmp_path / "last.pt")
    base, blobs, snapshot = base_folder(tmp_path / "base"), tmp_path / "blobs", tmp_path / "snapshots" / "1a2b"
    snapshot.mkdir(parents=True)
    base.rename(blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    result = export(tmp_path / "last.pt", "--config", snapshot, "--output", tmp_path / "model")
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "model").iterdir()} >= {"config.json", "tokenizer.json"}
    assert not any(path.is_symlink() for path in (tmp_path / "model").iterdir())
