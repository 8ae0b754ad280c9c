"""The text of a sequence while its tokens arrive, and where a stop string ends it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"  # what a decoder gives for bytes that are not a whole character yet


class TokenText:
    """Turns tokens into text piece by piece.

    Bytes of an unfinished character, and as much text as may be the beginning of a stop string, are kept back.

    Attributes:
        stopped_by: the stop string that has ended the text, which is without it; None if none has.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, stop
        self._margin = max(map(len, stop), default=1) - 1
        self._tokens: list[int] = []
        # The tokens from `_start` on are decoded together, because a token's text depends on those before it, such as
        # the space of a word. The text of those before `_end` has been taken.
        self._start = self._end = 0
        self._kept = ""
        self.stopped_by: str | None = None

    def add(self, token: int) -> str:
        """Returns the text that has become final with a token."""
        self._tokens.append(token)
        return self._release(self._new_text(final=False), final=False)

    def finish(self) -> str:
        """Returns the rest of the text, after the last token."""
        return "" if self.stopped_by is not None else self._release(self._new_text(final=True), final=True)

    def _new_text(self, *, final: bool) -> str:
        before = self._decode(self._tokens[self._start : self._end])
        now = self._decode(self._tokens[self._start :])
        if len(now) <= len(before) or (now.endswith(INCOMPLETE) and not final):
            return ""
        self._start, self._end = self._end, len(self._tokens)
        return now[len(before) :]

    def _release(self, new: str, *, final: bool) -> str:
        text = self._kept + new
        found = [(place, stop) for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            place, self.stopped_by = min(found, key=lambda each: each[0])
            self._kept = ""
            return text[:place]
        ready = len(text) if final else max(0, len(text) - self._margin)
        self._kept = text[ready:]
        return text[:ready]
