"""The reference of options, commands and metrics says what the code does."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import averaging
from averaging import errors
from tools import reference

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def test_options_and_commands_are_those_of_the_code() -> None:
    pages = {"options.md": reference.options_page(), "cli.md": reference.cli_page()}
    for name, page in (pages | {"metrics.md": reference.metrics_page()}).items():
        written = (REFERENCE / name).read_text()
        assert written.split() == page.split(), f"docs/reference/{name} is old: make reference"


def test_every_public_name_is_in_the_api() -> None:
    page = (REFERENCE / "api.md").read_text()
    assert "::: averaging.errors\n" in page
    documented = {*re.findall(r"^::: averaging\.(\w+)$", page, re.MULTILINE), *vars(errors)}
    assert set(averaging.__all__) - documented == {"__version__"}


def test_every_name_of_the_api_is_offered_by_its_room_and_says_what_it_does() -> None:
    page, silent = (REFERENCE / "api.md").read_text(), []
    for path in re.findall(r"^::: (averaging(?!.integrations)(?:\.\w+)*\.[A-Z]\w+)$", page, re.MULTILINE):
        module, _, name = path.rpartition(".")
        offered = getattr(import_module(module), name)
        methods = [
            method for method in vars(offered) if not method.startswith("_") and callable(getattr(offered, method))
        ]
        silent += [f"{path} {method}" for method in ("", *methods) if not getdoc(offered, method)]
    assert {line for line in silent if not line.endswith(" rpc_handlers")} == set()  # see `RpcService`


def getdoc(offered: object, method: str) -> str | None:
    return inspect.getdoc(getattr(offered, method) if method else offered)
