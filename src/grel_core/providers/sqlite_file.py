"""The file behind SQLite leases: its tables, its clock, and a transaction for the rules. Blocking; one thread only."""

import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from grel_core.clock import wall_microseconds
from grel_core.errors import CoordinationBackendError
from grel_core.lease.names import Key
from grel_core.lease.rules import Instant, Peek, Record, Rule, Waiter, forget_at, heirs, reap, settle

FORMAT = 1
"""Of the tables. A newer library reads and keeps older ones; this one refuses newer ones."""
SWEEP_EVERY, SWEEP_ROWS = 16, 64
"""So many rows are looked at for reaping, once every so many writes: old names go as fast as new ones come."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS grel_meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS grel_lease (key TEXT PRIMARY KEY, body TEXT NOT NULL, forget INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS grel_reader (
    key TEXT NOT NULL, token TEXT NOT NULL, until INTEGER NOT NULL, PRIMARY KEY (key, token)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS grel_reader_until ON grel_reader (key, until);
"""
FIELDS = ("fence", "holder", "until", "start", "duration", "since", "renewed", "lapsed", "ended", "transitions", "mark")
META = "SELECT value FROM grel_meta WHERE name = ?"
SET_META = "INSERT INTO grel_meta VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value"
LOAD = "SELECT body FROM grel_lease WHERE key = ?"
SAVE = (
    "INSERT INTO grel_lease VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET body = excluded.body, forget = excluded.forget"
)
READERS = "SELECT token, until FROM grel_reader WHERE key = ?"
# A rule needs its own claim and the longest one of the others: with these two it decides as if it saw all of them.
READERS_THAT_MATTER = (
    "SELECT token, until FROM grel_reader WHERE key = ?1 AND token = ?2 UNION ALL SELECT * FROM ("
    "SELECT token, until FROM grel_reader WHERE key = ?1 AND token <> ?2 ORDER BY until DESC LIMIT 1)"
)
SAVE_READER = "INSERT INTO grel_reader VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET until = excluded.until"
DROP_READER = "DELETE FROM grel_reader WHERE key = ? AND token = ?"
DROP_LAPSED_READERS = "DELETE FROM grel_reader WHERE key = ? AND until <= ?"
SWEEP = "SELECT key, forget FROM grel_lease WHERE key > ? ORDER BY key LIMIT ?"
FORGET = "DELETE FROM grel_lease WHERE key = ?"


class File:
    """One connection to the file at `path`.

    `keep` says for how many microseconds an idle record is kept; `timeout` bounds the wait for other processes.
    """

    def __init__(self, path: Path, *, prefix: str, keep: Callable[[Key], int], timeout: float) -> None:
        self._path, self._prefix, self._keep, self._timeout = path, prefix, keep, timeout
        self._boot = boot_id()
        self._inode: tuple[int, int] | None = None
        self._cursor = ""
        self._writes = 0
        self._version: int | None = None
        self._seen: dict[Key, str | None] = {}
        self._connect()

    def instant(self) -> Instant:
        """Now. The monotonic clock is one for the whole host, and starts anew with each boot."""
        wall = wall_microseconds()
        return Instant(time.monotonic_ns() // 1_000 if self._boot else wall, wall)

    # Opening.

    def _connect(self) -> None:
        """Open the file and make it ready; several processes may do so at once."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                self._prepare()
                return
            except sqlite3.OperationalError as error:
                # Switching to WAL does not wait for others, whatever the timeout: see "busy" in sqlite.org/wal.html.
                if "locked" not in str(error) or time.monotonic() >= deadline:
                    raise
                time.sleep(0.01)

    def _prepare(self) -> None:
        self._db = sqlite3.connect(self._path, timeout=self._timeout, isolation_level=None, check_same_thread=False)
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._inode = self._identity()
            self._db.execute("BEGIN IMMEDIATE")
            for statement in SCHEMA.split(";"):
                self._db.execute(statement)
            self._check_format()
            self._check_boot()
            self._db.execute("COMMIT")
        except BaseException:
            self._db.close()
            raise

    def _check_format(self) -> None:
        row = self._db.execute(META, ("format",)).fetchone()
        if row is None:
            self._db.execute(SET_META, ("format", str(FORMAT)))
        elif int(row[0]) > FORMAT:
            raise CoordinationBackendError(
                f"{self._path} was written by a newer version of this library (format {row[0]}); update this one"
            )

    def _check_boot(self) -> None:
        """After a reboot every holder is gone, and the clock that the leases were counted on as well."""
        row = self._db.execute(META, ("boot",)).fetchone()
        if row is not None and row[0] == self._boot:
            return
        now = self.instant().now
        for key, body in self._db.execute("SELECT key, body FROM grel_lease").fetchall():
            record = decode(body)
            record = replace(
                record, lapsed=record.lapsed or record.holder is not None, holder=None, waiters=(), ended=now
            )
            keep = self._keep(Key(key.removeprefix(f"{self._prefix}:").partition(":")[0], ""))
            self._db.execute(SAVE, (key, encode(record), forget_at(record, keep)))
        self._db.execute("DELETE FROM grel_reader")
        self._db.execute(SET_META, ("boot", self._boot))

    def _identity(self) -> tuple[int, int]:
        status = self._path.stat()
        return status.st_dev, status.st_ino

    def _reopen_if_replaced(self) -> None:
        """A file that was deleted or replaced lives on only for us: others hold leases in the new one."""
        with suppress(OSError):
            if self._identity() == self._inode:
                return
        self._db.close()
        self._inode = None
        self._connect()

    def close(self) -> None:
        """Close the connection."""
        self._db.close()

    # Rules.

    def run(self, work: Sequence[tuple[Key, Rule[Any]]], *, durable: bool) -> tuple[list[Any], list[Key]]:
        """Run every rule, in order: the answers, and the keys for which someone in line may go ahead now.

        A lone rule that changes nothing, such as a refused one, takes no write lock. With `durable`, the commit
        survives a power cut.
        """
        self._reopen_if_replaced()
        if len(work) == 1:
            key, rule = work[0]
            at = self.instant()
            before = self._load(key, rule, at)
            after, answer = rule(before, at)
            if after is before:
                return [answer], []
        if durable:
            self._db.execute("PRAGMA synchronous = FULL")
        try:
            return self._transact(work)
        finally:
            if durable:
                self._db.execute("PRAGMA synchronous = NORMAL")

    def _transact(self, work: Sequence[tuple[Key, Rule[Any]]]) -> tuple[list[Any], list[Key]]:
        answers: list[Any] = []
        woken: list[Key] = []
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for key, rule in work:
                at = self.instant()
                before = self._load(key, rule, at)
                after, answer = rule(before, at)
                if after is not before:
                    self._save(key, before, after, at)
                    if set(heirs(after)) - set(heirs(before)):
                        woken.append(key)
                answers.append(answer)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        return answers, woken

    def _load(self, key: Key, rule: Rule[Any], at: Instant) -> Record:
        text = key.text(self._prefix)
        row = self._db.execute(LOAD, (text,)).fetchone()
        if row is None:
            return Record()
        record = decode(row[0])
        if record.readers:
            token = getattr(rule, "token", "")
            rows = (
                self._db.execute(READERS, (text,))
                if isinstance(rule, Peek)
                else self._db.execute(READERS_THAT_MATTER, (text, token))
            )
            record = replace(record, readers=dict(rows.fetchall()))
        return settle(reap(record, at.now, self._keep(key)), at.now)

    def _save(self, key: Key, before: Record, after: Record, at: Instant) -> None:
        text = key.text(self._prefix)
        self._db.execute(SAVE, (text, encode(after), forget_at(after, self._keep(key))))
        if before.readers != after.readers:
            self._db.execute(DROP_LAPSED_READERS, (text, at.now))
            for token in before.readers.keys() - after.readers.keys():
                self._db.execute(DROP_READER, (text, token))
            for token, until in after.readers.items():
                self._db.execute(SAVE_READER, (text, token, until))
        self._writes += 1
        if self._writes % SWEEP_EVERY == 0:
            self._sweep(at.now)

    def _sweep(self, now: int) -> None:
        """Forget what is due among the next few rows."""
        rows = self._db.execute(SWEEP, (self._cursor, SWEEP_ROWS)).fetchall()
        self._cursor = rows[-1][0] if len(rows) == SWEEP_ROWS else ""
        for key, forget in rows:
            if forget <= now:
                self._db.execute(FORGET, (key,))
                self._db.execute(DROP_LAPSED_READERS, (key, now))

    # Changes by other processes.

    def changed(self, keys: Sequence[Key]) -> list[Key]:
        """Those of `keys` whose record another process has changed since the last call."""
        self._reopen_if_replaced()
        (version,) = self._db.execute("PRAGMA data_version").fetchone()
        known = self._seen.keys() >= set(keys)
        if version == self._version and known:
            return []
        self._version = version
        seen: dict[Key, str | None] = {}
        for key in keys:
            row = self._db.execute(LOAD, (key.text(self._prefix),)).fetchone()
            seen[key] = row[0] if row else None
        before, self._seen = self._seen, seen
        return [key for key in keys if key not in before or before[key] != seen[key]]


def encode(record: Record) -> str:
    """`record` as JSON; of the readers only whether there are any, since they have a table of their own."""
    fields = [getattr(record, name) for name in FIELDS]
    return json.dumps([*fields, dict(record.meta), bool(record.readers), record.waiters], separators=(",", ":"))


def decode(body: str) -> Record:
    """The record that `encode` wrote; its readers are only marked."""
    *values, meta, read, waiters = json.loads(body)
    return Record(
        **dict(zip(FIELDS, values, strict=True)),
        meta=meta,
        readers={"": 0} if read else {},
        waiters=tuple(Waiter(*waiter) for waiter in waiters),
    )


def boot_id() -> str:
    """What tells this boot of the host from any other; empty where the system has no such thing."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
