"""Checks at the donor whether newcomers would accept its state. Otherwise only their logs would show a refusal."""

from __future__ import annotations

import logging

from averaging.errors import StateError
from averaging.protocol.messages import DownloadData
from averaging.protocol.schema import Schema
from averaging.state.assembler import StateAssembler
from averaging.state.manifest import Manifest

logger = logging.getLogger("averaging.state")


class SelfCheck:
    """Checks the manifests of one peer's states as a newcomer would.

    Args:
        schema: schema of the averaged tensors.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._accepted = 0  # bytes of the largest metadata that newcomers would accept
        self._refused = False

    @property
    def tried(self) -> bool:
        """Whether a state was checked."""
        return self._refused or self._accepted > 0

    def check(self, manifest: Manifest) -> None:
        """Logs one warning if every newcomer would refuse the state. Later states are checked only if they grow."""
        metadata = manifest.pack()
        if self._refused or len(metadata) <= self._accepted:
            return
        try:
            StateAssembler(self._schema).feed(DownloadData(metadata))
        except StateError as error:
            self._refused = True
            logger.warning(
                "newcomers will refuse this peer's state: %s; change what the application adds to the state", error
            )
        else:
            self._accepted = len(metadata)
