"""Build hook: compiles `protos/` to typed Python modules in `averaging/wire/`, for wheels and editable installs.

`make proto` (`python hatch_build.py`) does the same without a build.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from importlib.resources import files
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ModuleNotFoundError:  # run as a script
    BuildHookInterface = object  # type: ignore[assignment, misc]


def compile_protos(root: Path) -> list[Path]:
    """Compiles every proto below `root`/protos and returns the generated files."""
    from grpc_tools import protoc

    # protoc searches PATH for the mypy plugins; an isolated build has them in its own directory of scripts.
    scripts = [sysconfig.get_path("scripts"), str(Path(sys.executable).parent)]
    scripts += [str(Path(entry).parents[3] / "bin") for entry in sys.path if entry.endswith("site-packages")]
    os.environ["PATH"] = os.pathsep.join([*scripts, os.environ.get("PATH", "")])

    source = root / "protos"
    protos = sorted(str(path.relative_to(source)) for path in source.rglob("*.proto"))
    arguments = [
        "protoc",
        f"-I{source}",
        f"-I{files('grpc_tools') / '_proto'}",
        f"--python_out={root}",
        f"--grpc_python_out={root}",
        f"--mypy_out=quiet:{root}",
        f"--mypy_grpc_out=quiet:{root}",
        *protos,
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError(f"protoc failed: {' '.join(arguments)}")
    return sorted((root / "averaging" / "wire").glob("*_pb2*"))


class ProtoBuildHook(BuildHookInterface):  # type: ignore[type-arg, misc, unused-ignore]
    """Compiles the protos before hatchling collects the files of a wheel or an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles the protos and adds the generated files to the build."""
        root = Path(self.root)
        if (root / "protos").is_dir():
            generated = compile_protos(root)
            build_data["artifacts"] += [f"/{path.relative_to(root)}" for path in generated]


if __name__ == "__main__":
    for path in compile_protos(Path(__file__).parent):
        print(path)
