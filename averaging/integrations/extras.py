"""The error for a library that is not installed."""

from __future__ import annotations


def missing(library: str, extra: str) -> ImportError:
    """Returns the error to raise if `library` cannot be imported.

    Args:
        library: import name.
        extra: extra of this package that installs it.
    """
    return ImportError(
        f"averaging.integrations.{extra} needs {library}, which cannot be imported; "
        f"install it: python -m pip install 'averaging[{extra}]'"
    )
