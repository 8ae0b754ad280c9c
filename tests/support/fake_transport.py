"""What fakes of a transport have in common."""


class OneLane:
    """A transport with one way for parts."""

    def prepare_lane(self, endpoint: str) -> None:
        """See `Transport`."""

    def lane(self, endpoint: str) -> None:
        """See `Transport`."""
