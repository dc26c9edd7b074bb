"""What the demo shows: a live table on a terminal, plain lines elsewhere, and the summary."""

from dataclasses import dataclass, field
from typing import NamedTuple, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

RETRIES = (
    "retries: answers 423 (another buyer has the SKU) and 503 (the worker is stopping), and requests whose worker "
    "died; the buyer tries again"
)


@dataclass
class Run:
    """One sale of one SKU, and what becomes of it."""

    sku: str
    title: str
    stock: int
    locked: bool = True
    sold: int = 0
    refused: int = 0
    """Answers 423 and 503: the buyer tries again."""
    broken: int = 0
    """Requests whose worker died under them."""
    seconds: float = 0.0
    workers: dict[int, int] = field(default_factory=dict)
    """Process id to pieces sold."""

    @property
    def verdict(self) -> str:
        """What was sold, and what to think of it."""
        if self.sold > self.stock:
            return f"[red]{self.sold}, oversold"
        return f"[green]{self.sold}, exact" if self.sold == self.stock else str(self.sold)


class HandOver(NamedTuple):
    """From one leader to the next."""

    signal: str
    old: int
    """Process ids of the two workers."""
    new: int
    seconds: float
    limit: float

    def __str__(self) -> str:
        took = f"{self.seconds * 1000:.0f} ms (limit {self.limit * 1000:.0f} ms)"
        return f"{self.signal} to worker {self.old}: worker {self.new} led after {took}"


class View:
    """Draws `runs` and what is said, until it is left."""

    def __init__(self, title: str) -> None:
        self.runs: list[Run] = []
        self.leader = "nobody yet"
        self._title = title
        self._console = Console()
        self._said: list[str] = []
        self._live = Live(get_renderable=self._draw, console=self._console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """Tell what happens: below the table, or as a line where there is no terminal."""
        if self._live.is_started:
            self._said = [*self._said[-5:], text]
        else:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def summary(self, hand_overs: list[HandOver], checks: dict[str, bool]) -> None:
        """The end: what was sold, how long each hand-over took, and whether all of it is right."""
        self._live.stop()
        self._console.print(self._table())
        self._console.print(RETRIES, highlight=False, soft_wrap=True)
        for hand_over in hand_overs:
            self._console.print(str(hand_over), highlight=False)
        for check, right in checks.items():
            self._console.print(Text(f"{'ok  ' if right else 'FAIL'} {check}", style="green" if right else "bold red"))

    def _draw(self) -> Group:
        said = [Text(text, style="dim") for text in self._said]
        return Group(self._table(), Text(f"leader: {self.leader}", style="cyan"), *said)

    def _table(self) -> Table:
        table = Table("", "stock", "sold", "by worker", "retries", "seconds", title=self._title, box=SIMPLE_HEAD)
        for run in self.runs:
            workers = "+".join(str(pieces) for _, pieces in sorted(run.workers.items()))
            retries = str(run.refused + run.broken)
            table.add_row(run.title, str(run.stock), run.verdict, workers, retries, f"{run.seconds:.1f}")
        return table
