"""The built wheel holds what it must, and runs on protobuf 6 and 7."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import grpc
import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ["averaging", "protos", "hatch_build.py", "pyproject.toml", "README.md", "LICENSE"]

OF_GRPC = [f"grpcio-{name}<={grpc.__version__}" for name in ("health-checking", "reflection", "channelz")]
"""gRPC's own services, none newer than the grpcio that is there: pip is not asked what goes with what."""

# Two peers average, and one looks at the other through reflection: generated code, runtime and gRPC's own services.
PROGRAM = """
import asyncio, sys
import google.protobuf, torch, averaging
from averaging import Peer

async def main():
    tensors = [torch.zeros(3), torch.full((3,), 2.0)]
    async with Peer([tensors[0]], run_id="run", group_size=2) as one:
        async with Peer([tensors[1]], run_id="run", group_size=2, join=[one.endpoint]) as other:
            await asyncio.gather(one.average(), other.average())
            await other.download_state()
    assert [t.tolist() for t in tensors] == [[1.0] * 3] * 2

asyncio.run(main())
print(google.protobuf.__version__, averaging.__file__)
"""


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True, timeout=100)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sources alone: nothing generated comes along."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*_pb2*"))
        else:
            shutil.copy(ROOT / name, source / name)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(source))
    return next(target.glob("averaging-*.whl"))


def test_the_wheel_holds_generated_code_with_types(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for proto in ("averaging", "runtime", "status", "gossip"):
        assert f"averaging/wire/{proto}_pb2.py" in names
        assert f"averaging/wire/{proto}_pb2.pyi" in names
        assert f"averaging/wire/{proto}_pb2_grpc.py" in names
        assert f"averaging/wire/{proto}_pb2_grpc.pyi" in names
    assert "averaging/py.typed" in names
    assert {f"averaging/dashboard/page/{name}" for name in ("index.html", "page.css", "page.js", "icon.svg")} <= names
    assert not [name for name in names if name.startswith(("tests/", "examples/", "benchmarks/"))]


@pytest.mark.parametrize(
    "requirements",
    [
        ["protobuf>=6.31.1,<7", *(f"{package},<1.81" for package in OF_GRPC)],
        pytest.param(["protobuf>=7,<8", *(f"{package},>=1.81" for package in OF_GRPC)], marks=pytest.mark.long),
    ],
    ids=["protobuf6", "protobuf7"],
)
def test_the_installed_wheel_runs_on_either_protobuf(wheel: Path, requirements: list[str], tmp_path: Path) -> None:
    # Put before the environment's own packages, so torch and the rest need not be installed again.
    pip("install", "--target", str(tmp_path), "--no-deps", str(wheel), *requirements)
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    version, path = ran.stdout.split()
    assert requirements[0].startswith(f"protobuf>={version.split('.')[0]}")
    assert path.startswith(str(tmp_path))
