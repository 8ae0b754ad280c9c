"""The rule of `make lint`: a room imports only what the `__init__` of another room offers, and nothing of the root."""

from __future__ import annotations

from typing import TYPE_CHECKING

from importlinter import Contract, ContractCheck, fields, output

if TYPE_CHECKING:
    from grimp import ImportGraph


def room_of(module: str, packages: set[str]) -> str:
    """The innermost package that holds `module`. A module of the root package is a room of its own."""
    parent = module.rpartition(".")[0]
    return module if module in packages or ("." not in parent and parent in packages) else parent


class RoomsContract(Contract):
    """Names each import of a module that lies within another room. The generated code in `wire` is nobody's room."""

    type_name = "rooms"
    wire = fields.StringField()

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Compares the rooms of both ends of each import."""
        own = {module for module in graph.modules if not graph.is_module_squashed(module)}
        packages = {module for module in own if graph.find_children(module)}
        wrong = [
            f"{importer} -> {imported}"
            for importer in sorted(own)
            for imported in sorted(graph.find_modules_directly_imported_by(importer) & own)
            if room_of(imported, packages) not in (imported, room_of(importer, packages))
            and not imported.startswith(f"{self.wire}.")
        ]
        roots = {module for module in packages if "." not in module}
        wrong += [f"{user} -> {root}" for root in roots for user in graph.find_modules_that_directly_import(root)]
        return ContractCheck(kept=not wrong, metadata={"wrong": wrong})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Prints the imports."""
        for line in check.metadata["wrong"]:
            output.print_error(line)
