"""A model's folder without a library: a configuration, a tokenizer, weights under names of their own."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def base_folder(path: Path, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """A folder with config.json and tokenizer.json, and weights if given, and what is not to be copied."""
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "none"}')
    (path / "tokenizer.json").write_text("{}")
    (path / ".hidden").touch()
    (path / "pytorch_model.bin").write_bytes(b"old")
    if tensors is not None:
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def load_folder(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder, by its index if it has one."""
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return load_file(path / "model.safetensors")
    places: dict[str, str] = json.loads(index.read_text())["weight_map"]
    files = {name: load_file(path / name) for name in set(places.values())}
    assert sorted(name for file in files.values() for name in file) == sorted(places)
    return {name: files[file][name] for name, file in places.items()}
