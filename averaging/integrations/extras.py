"""The error for a library that is not installed."""

from __future__ import annotations


def missing(library: str, extra: str) -> ImportError:
    """The error to raise where `library` cannot be imported.

    Args:
        library: as it is imported.
        extra: of this package, which installs it.
    """
    return ImportError(
        f"averaging.integrations.{extra} needs {library}, which cannot be imported; "
        f"install it: python -m pip install 'averaging[{extra}]'"
    )
