"""What `averaging top` shows, and what its keys do. Pure: the caller passes snapshots, keys and the size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from textwrap import TextWrapper

from rich.cells import set_cell_size
from rich.text import Text

from averaging.monitor.snapshot import PeerView, RunSnapshot, matching
from averaging.monitor.table import COLUMNS, fitted, head, reader_lines, row, summary
from averaging.receipts import Receipt, Round, describe

MAX_SUMMARY = 8
"""Lines above the table, in a high terminal; in a low one a third of it."""

MAX_FILTER = 64
"""Characters of a filter."""

HELP = """\
up, down, PgUp, PgDn, Home, End   select a peer
left, right                       further columns
s, S                              sort by the next column, or by the one before
r                                 reverse the order
/                                 filter: a part of a name, role, state, strategy, lane
                                  or software; Enter ends it, Esc removes it
Enter                             receipts of the selected peer, the newest first
w                                 followers and explorers with their versions
h, ?                              this help
Esc                               back
q, Ctrl+C                         end

STEP      global step / local step
OUT/S     bytes sent per second; IN/S those received
WAIT      share of the time in which the peer waits for others
-2        members that were dropped in the last round
~         the text is longer than its column"""


class Page(Enum):
    """What is shown."""

    PEERS = "peers"
    RECEIPTS = "receipts"
    READERS = "followers and explorers"
    HELP = "help"


class TopScreen:
    """The screen: which page, which peer is selected, the order, the filter.

    Attributes:
        page: what is shown.
        selected: endpoint of the selected peer, which stays selected while the others move; the first one if empty.
        filter: the text that shown peers contain.
        ended: whether the user has asked to end.
    """

    def __init__(self) -> None:
        self.page = Page.PEERS
        self.selected = ""
        self.filter = ""
        self.ended = False
        self._typing = False
        self._sorted_by, self._reverse = 0, False
        self._top, self._left = 0, 0  # the first line, and the first column after that with the name
        self._shown: list[PeerView] = []  # in the order of the last `lines`
        self._height = 1  # lines of the table
        self._length = 0  # lines of a page of text

    # Keys

    def press(self, key: str) -> None:
        """Handles a key: a character, or the name of a key as `keys.KEYS` has it."""
        if self._typing:
            self._type(key)
        elif key in ("q", "ctrl+c"):
            self.ended = True
        elif key == "escape":
            self._go(Page.PEERS) if self.page is not Page.PEERS else self._set_filter("")
        elif key in ("h", "?"):
            self._go(Page.HELP)
        elif key == "w":
            self._go(Page.READERS)
        elif key in _MOVES:
            self._move(_MOVES[key](self._height))
        elif self.page is Page.PEERS:
            self._press_on_peers(key)

    def _press_on_peers(self, key: str) -> None:
        if key == "/":
            self._typing = True
        elif key == "enter" and self._shown:
            self._move(0)  # it stays the one whose receipts are shown
            self._go(Page.RECEIPTS)
        elif key in ("s", "S"):
            self._sorted_by = (self._sorted_by + (1 if key == "s" else -1)) % len(COLUMNS)
            self._reverse = False
        elif key == "r":
            self._reverse = not self._reverse
        elif key in ("left", "right"):
            self._left = min(max(0, self._left + (1 if key == "right" else -1)), len(COLUMNS) - 2)

    def _type(self, key: str) -> None:
        if key in ("enter", "escape", "ctrl+c"):
            self._typing = False
            self.ended = key == "ctrl+c"
            if key == "escape":
                self._set_filter("")
        elif key == "backspace":
            self._set_filter(self.filter[:-1])
        elif len(key) == 1 and key.isprintable() and len(self.filter) < MAX_FILTER:
            self._set_filter(self.filter + key)

    def _set_filter(self, text: str) -> None:
        self.filter, self._top = text, 0

    def _go(self, page: Page) -> None:
        self.page, self._top = page, 0

    def _move(self, lines: int) -> None:
        if self.page is not Page.PEERS:
            self._top = min(max(0, self._top + lines), max(0, self._length - self._height))
        elif self._shown:
            names = [peer.endpoint for peer in self._shown]
            at = names.index(self.selected) if self.selected in names else 0
            self.selected = names[min(max(0, at + lines), len(names) - 1)]

    # What is shown

    def lines(
        self, snapshot: RunSnapshot, receipts_of: Callable[[str], Sequence[Receipt]], width: int, height: int
    ) -> list[Text]:
        """Exactly `height` lines of at most `width` cells.

        Args:
            snapshot: the run.
            receipts_of: function that returns the last receipts of a peer, the oldest first.
            width: cells of a line of the terminal.
            height: lines of the terminal.
        """
        above = summary(snapshot)[: max(1, min(MAX_SUMMARY, height // 3))]
        self._height = max(1, height - len(above) - 2)  # without the head and the last line
        if self.page is Page.PEERS:
            title, body = self._peers(snapshot, width)
        else:
            title, body = self._text(snapshot, receipts_of, width)
        lines = [*above, title, *body]
        lines = lines[: height - 1] + [Text()] * (height - 1 - len(lines)) + [self._last_line(width)]
        return [_cropped(line, width) for line in lines[-height:]]

    def _peers(self, snapshot: RunSnapshot, width: int) -> tuple[Text, list[Text]]:
        column = COLUMNS[self._sorted_by]
        self._shown = column.sorted(matching(snapshot.peers, self.filter), reverse=self._reverse)
        names = [peer.endpoint for peer in self._shown]
        if self.selected not in names:
            self.selected = ""
        at = names.index(self.selected) if self.selected else 0
        self._top = min(max(self._top, at - self._height + 1, 0), at, max(0, len(names) - self._height))
        columns = [COLUMNS[0], *COLUMNS[1 + self._left :]]
        widths = _widths([column.width for column in columns], width)
        columns = columns[: len(widths)]
        lines = []
        for number, peer in enumerate(self._shown[self._top : self._top + self._height], self._top):
            line = row(peer, columns, widths, snapshot.time)
            if number == at:
                line.stylize("reverse")
            lines.append(line)
        title = head(columns, widths)
        if column in columns:
            start = sum(widths[: columns.index(column)]) + 2 * columns.index(column)
            title.stylize("underline", start, start + widths[columns.index(column)])
        return title, lines

    def _text(
        self, snapshot: RunSnapshot, receipts_of: Callable[[str], Sequence[Receipt]], width: int
    ) -> tuple[Text, list[Text]]:
        """The title and the lines of a page of text."""
        if self.page is Page.HELP:
            title, texts = "Keys", HELP.split("\n")
        elif self.page is Page.READERS:
            title, texts = "Followers and explorers", reader_lines(snapshot.readers) or ["none"]
        else:
            title = f"Receipts of {self.selected}"
            receipts = receipts_of(self.selected)
            wrapper = TextWrapper(max(8, width), subsequent_indent="    ", break_on_hyphens=False)
            texts = [line for each in reversed(receipts) for line in describe(Round((each,))).split("\n")]
            texts = [part for line in texts or ["none yet"] for part in wrapper.wrap(line)]
        self._length = len(texts)
        self._top = min(self._top, max(0, len(texts) - self._height))
        return Text(title, style="bold"), [Text(text) for text in texts[self._top : self._top + self._height]]

    def _last_line(self, width: int) -> Text:
        if self._typing:
            return Text(f"filter: {self.filter}_  (Enter ends, Esc removes)", style="reverse")
        if self.page is not Page.PEERS:
            place = f"{self._top + 1}-{min(self._top + self._height, self._length)} of {self._length}"
            return Text(fitted(f" Esc back  up/down scroll  q end   {place}", width), style="reverse")
        last = min(self._top + self._height, len(self._shown))
        place = f"{min(self._top + 1, last)}-{last} of {len(self._shown)}"
        by = f"{COLUMNS[self._sorted_by].title}{' reversed' if self._reverse else ''}"
        chosen = f"  filter {self.filter!r}" if self.filter else ""
        text = f" {place}  s sort: {by}{chosen}  / filter  Enter receipts  <- -> columns  h help  q end"
        return Text(fitted(text, width), style="reverse")


_MOVES: dict[str, Callable[[int], int]] = {
    "up": lambda _: -1,
    "k": lambda _: -1,
    "down": lambda _: 1,
    "j": lambda _: 1,
    "pageup": lambda height: -height,
    "pagedown": lambda height: height,
    "home": lambda _: -(2**30),
    "end": lambda _: 2**30,
}


def _widths(wanted: Sequence[int], width: int) -> list[int]:
    """The widths of the columns that fit, two cells apart. The first column is always there."""
    widths: list[int] = []
    for each in wanted:
        if widths and sum(widths) + 2 * len(widths) + each > width:
            break
        widths.append(min(each, width))
    return widths


def _cropped(line: Text, width: int) -> Text:
    if line.cell_len <= width:
        return line
    line = line.copy()
    line.plain = set_cell_size(line.plain, max(0, width - 1)) + "~" * min(1, width)
    return line


# Keys as a terminal sends them.


_SEQUENCES = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1b[C": "right",
    "\x1b[D": "left",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1bOC": "right",
    "\x1bOD": "left",
    "\x1b[5~": "pageup",
    "\x1b[6~": "pagedown",
    "\x1b[H": "home",
    "\x1bOH": "home",
    "\x1b[1~": "home",
    "\x1b[F": "end",
    "\x1bOF": "end",
    "\x1b[4~": "end",
}

_CHARACTERS = {
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x03": "ctrl+c",
    " ": "pagedown",
}


def keys_in(data: bytes) -> list[str]:
    """The keys in what a terminal has sent at once. Unknown sequences are left out."""
    text, keys = data.decode(errors="replace"), []
    while text:
        if text[0] != "\x1b":
            keys.append(_CHARACTERS.get(text[0], text[0]))
            text = text[1:]
            continue
        known = next((sequence for sequence in _SEQUENCES if text.startswith(sequence)), None)
        if known is not None:
            keys.append(_SEQUENCES[known])
            text = text[len(known) :]
        elif text[1:2] not in ("[", "O"):  # Esc itself, perhaps with the next key
            keys.append("escape")
            text = text[1:]
        else:  # an unknown sequence ends with a letter or ~
            end = next((at for at, char in enumerate(text[2:], 2) if char.isalpha() or char == "~"), len(text))
            text = text[end + 1 :]
    return keys
