"""The screen of `averaging top`: the table of peers, and pages with receipts and readers of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static

from averaging.errors import printable
from averaging.monitor.collector import Collector
from averaging.monitor.snapshot import PeerView, RunSnapshot, matching
from averaging.monitor.table import COLUMNS, MAX_CELL, reader_lines, style_of, summary
from averaging.receipts import Round, describe


class TopApp(App[None]):
    """Shows the run of a collector until the user ends it. Textual handles keys, sizes and scrolling."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #summary { height: auto; max-height: 8; text-wrap: nowrap; text-overflow: ellipsis; }
    DataTable { height: 1fr; }
    Input { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "end"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("s", "sort(1)", "sort"),
        Binding("S", "sort(-1)", show=False),
        Binding("r", "reverse", "reverse"),
        Binding("slash", "filter", "filter"),
        Binding("w", "readers", "followers"),
        Binding("escape", "unfilter", show=False),
    ]

    def __init__(self, collector: Collector) -> None:
        super().__init__()
        self._collector = collector
        self._snapshot = collector.snapshot()
        self._sorted_by, self._reverse = 0, False

    def compose(self) -> ComposeResult:
        yield Static(id="summary")
        yield DataTable[Text](cursor_type="row", fixed_columns=1)
        yield Input(placeholder="a part of a name, role, state, strategy, lane or software")
        yield Footer()

    def on_mount(self) -> None:
        table = self.table
        for column in COLUMNS:
            table.add_column(column.title, key=column.title)
        table.focus()
        self.run_worker(self._follow())

    @property
    def table(self) -> DataTable[Text]:
        return self.query_one(DataTable)

    async def _follow(self) -> None:
        async for snapshot in self._collector.snapshots():
            self.show(snapshot)

    def show(self, snapshot: RunSnapshot) -> None:
        """Shows a snapshot. The selected peer stays selected while others come, go and change places."""
        self._snapshot = snapshot
        column, table, selected = COLUMNS[self._sorted_by], self.table, self.selected
        filtered = self.query_one(Input).value
        peers = column.sorted(matching(snapshot.peers, filtered), reverse=self._reverse)
        with self.batch_update():
            _show_rows(table, peers, snapshot.time)
            names = [peer.endpoint for peer in peers]
            if selected in names:
                table.move_cursor(row=names.index(selected))
            lines = summary(snapshot)
            order = f"{column.title}{' reversed' if self._reverse else ''}"
            chosen = f", filter {filtered!r}" if filtered else ""
            lines.append(Text(f"{len(peers)} of {len(snapshot.peers)}, sorted by {order}{chosen}", "dim"))
            self.query_one("#summary", Static).update(Text("\n").join(lines))

    @property
    def selected(self) -> str:
        """Endpoint of the selected peer; empty if none is shown."""
        table = self.table
        return str(table.ordered_rows[table.cursor_row].key.value) if table.row_count else ""

    def action_sort(self, step: int) -> None:
        self._sorted_by, self._reverse = (self._sorted_by + step) % len(COLUMNS), False
        self.show(self._snapshot)

    def action_reverse(self) -> None:
        self._reverse = not self._reverse
        self.show(self._snapshot)

    def action_filter(self) -> None:
        self.query_one(Input).display = True
        self.query_one(Input).focus()

    def action_unfilter(self) -> None:
        self.query_one(Input).value = ""
        self.on_input_submitted()

    def on_input_changed(self) -> None:
        self.show(self._snapshot)

    def on_input_submitted(self) -> None:
        self.query_one(Input).display = False
        self.table.focus()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        endpoint = str(event.row_key.value)
        receipts = self._collector.receipts_of(endpoint)
        lines = [describe(Round((each,))) for each in reversed(receipts)]
        self.push_screen(TextPage(f"Receipts of {endpoint}, the newest first", lines))

    def action_readers(self) -> None:
        self.push_screen(TextPage("Followers and explorers", reader_lines(self._snapshot.readers)))


class TextPage(Screen[None]):
    """A page of text that scrolls. Lines that are too long are wrapped."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "app.pop_screen", "back")]

    def __init__(self, title: str, lines: Sequence[str]) -> None:
        super().__init__()
        self._text = Text.assemble((printable(title), "bold"), "\n\n", "\n".join(lines) or "none yet")

    def compose(self) -> ComposeResult:
        yield VerticalScroll(Static(self._text))
        yield Footer()


def _show_rows(table: DataTable[Text], peers: Sequence[PeerView], now: float) -> None:
    """Makes the rows those of `peers`, in this order. Only cells that differ are touched, so that nothing flickers."""
    for name in {str(key.value) for key in table.rows} - {peer.endpoint for peer in peers}:
        table.remove_row(name)
    for peer in peers:
        texts = [printable(column.shown(peer, now), MAX_CELL) for column in COLUMNS]
        cells = [
            Text(text, style_of(peer), justify="right" if column.right else "left")
            for column, text in zip(COLUMNS, texts, strict=True)
        ]
        if peer.endpoint not in table.rows:
            table.add_row(*cells, key=peer.endpoint)
            continue
        for column, cell, shown in zip(COLUMNS, cells, table.get_row(peer.endpoint), strict=True):
            if (cell.plain, cell.style) != (shown.plain, shown.style):
                table.update_cell(peer.endpoint, column.title, cell, update_width=True)
    places = {printable(peer.endpoint, MAX_CELL): place for place, peer in enumerate(peers)}
    table.sort(COLUMNS[0].title, key=lambda cell: places[cell.plain])
