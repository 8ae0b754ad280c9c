"""Whether newcomers would take the state that a peer offers. The peer finds out itself: else only they would know."""

from __future__ import annotations

import logging

from averaging.errors import StateError
from averaging.protocol.messages import DownloadData
from averaging.protocol.schema import Schema
from averaging.state.assembler import StateAssembler
from averaging.state.manifest import Manifest

logger = logging.getLogger("averaging.state")


class SelfCheck:
    """Looks at the manifests of one peer's states with a newcomer's eyes.

    Args:
        schema: of the averaged tensors, as newcomers have it.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._accepted = 0  # bytes of the largest metadata that newcomers would take
        self._refused = False

    @property
    def tried(self) -> bool:
        """Whether a state has been looked at."""
        return self._refused or self._accepted > 0

    def check(self, manifest: Manifest) -> None:
        """Warns, once, of a state that every newcomer would refuse. Only one that has grown is looked at again."""
        metadata = manifest.pack()
        if self._refused or len(metadata) <= self._accepted:
            return
        try:
            StateAssembler(self._schema).feed(DownloadData(metadata))
        except StateError as error:
            self._refused = True
            logger.warning(
                "newcomers refuse the state that this peer offers: %s; change what is added to its tensors", error
            )
        else:
            self._accepted = len(metadata)
