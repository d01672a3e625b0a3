"""The results of a day in each way, counted from the database with the same statements for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from project.demo.compare.ways import DELAY, ON_COMMIT, OUTBOX, WAYS
from project.demo.report import APPLIED_TWICE, LEDGERS, Connection, number

# Triggers that record each effect whose order or cancellation is not committed when the handler writes the effect.
WATCH = """
CREATE TABLE demo_early (invoice text NOT NULL);
CREATE FUNCTION demo_note() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
    IF NOT EXISTS (SELECT FROM shop_order WHERE invoice = NEW.invoice)
        AND NOT EXISTS (SELECT FROM shop_cancellation WHERE invoice = NEW.invoice)
    THEN INSERT INTO demo_early VALUES (NEW.invoice); END IF;
    RETURN NULL;
END$$;
CREATE TRIGGER note AFTER INSERT ON shop_cartentry FOR EACH ROW WHEN (NEW.change < 0) EXECUTE FUNCTION demo_note();
CREATE TRIGGER note AFTER INSERT ON shop_pointsentry FOR EACH ROW EXECUTE FUNCTION demo_note();
CREATE TRIGGER note AFTER INSERT ON shop_shipment FOR EACH ROW EXECUTE FUNCTION demo_note();
CREATE TRIGGER note AFTER INSERT ON shop_letter FOR EACH ROW EXECUTE FUNCTION demo_note()
"""

# Empties the tables before the day of the next way. Only the last way writes to the outbox's tables.
CLEAR = """
TRUNCATE shop_customer, shop_product, shop_order, shop_cancellation, shop_refusal, shop_cartentry, shop_pointsentry,
    shop_shipment, shop_letter, demo_early CASCADE
"""

COMMITTED = "SELECT invoice FROM shop_order UNION ALL SELECT invoice FROM shop_cancellation"

# The invoices that lack an effect.
LOST = f"{LEDGERS} SELECT count(DISTINCT invoice) FROM (SELECT * FROM owed EXCEPT SELECT * FROM effect) missing"  # noqa: S608

# The invoices that have an effect, and were never committed.
GHOSTS = f"{LEDGERS} SELECT count(DISTINCT invoice) FROM effect WHERE invoice NOT IN ({COMMITTED})"  # noqa: S608

# The invoices that had an effect before they were committed.
EARLY = f"SELECT count(DISTINCT invoice) FROM demo_early WHERE invoice IN ({COMMITTED})"  # noqa: S608

ORDERS = "SELECT count(*) FROM shop_order"
ROLLED_BACK = "SELECT count(*) FROM shop_refusal WHERE what = 'payment'"


@dataclass(frozen=True, slots=True)
class Day:
    """
    The results of one day.

    Args:
        failed_requests: number of requests that failed because of a kill, or because RabbitMQ was down.
        planned: number of planned kills of the web process, of handlers and of the relay.
    """

    orders: int
    rolled_back: int
    failed_requests: int
    planned: int
    kills: int
    lost: int
    ghosts: int
    early: int
    applied_twice: int

    @property
    def is_kept(self) -> bool:
        return self.lost == self.ghosts == self.early == self.applied_twice == 0


Days = Mapping[str, Day]
"""The name of a way -> its day."""


def read(connection: Connection, *, failed_requests: int, planned: int, kills: int) -> Day:
    """Count the results of a day."""
    return Day(
        orders=number(connection, ORDERS),
        rolled_back=number(connection, ROLLED_BACK),
        failed_requests=failed_requests,
        planned=planned,
        kills=kills,
        lost=number(connection, LOST),
        ghosts=number(connection, GHOSTS),
        early=number(connection, EARLY),
        applied_twice=number(connection, APPLIED_TWICE),
    )


def missing(days: Days) -> list[str]:
    """Return lines about the expected faults without an outbox that did not occur, and about kills that did not happen."""
    wanted = [
        ("ghosts", DELAY, days[DELAY.name].ghosts),
        ("effects applied twice", DELAY, days[DELAY.name].applied_twice),
        ("lost orders", ON_COMMIT, days[ON_COMMIT.name].lost),
        ("effects applied twice", ON_COMMIT, days[ON_COMMIT.name].applied_twice),
    ]
    absent = [f"{fault} with {way.title}" for fault, way, found in wanted if not found]
    return absent + [f"{day.planned - day.kills} kills with {name}" for name, day in days.items() if day.kills < day.planned]


def table(days: Days) -> str:
    """Return the days side by side."""
    rows = [
        ("orders placed", "orders", ""),
        ("rolled back", "rolled_back", "payment declined after the order was sent"),
        ("killed with SIGKILL", "kills", "web processes, handlers, and the outbox's relay"),
        ("failed requests", "failed_requests", "the web process was killed, or RabbitMQ was down"),
        ("", "", ""),
        ("lost", "lost", "committed, and not applied by everyone it concerns"),
        ("ghosts", "ghosts", "applied, and never committed"),
        ("too early", "early", "applied before it was committed"),
        ("applied twice", "applied_twice", "effects that a message had more than once"),
    ]
    columns = [asdict(days[way.name]) for way in WAYS]
    lines = [("", [way.title for way in WAYS], "")]
    lines += [(name, [str(column[field]) if field else "" for column in columns], note) for name, field, note in rows]
    return "\n".join(f"  {name:<19}{''.join(f'{cell:>11}' for cell in cells)}  {note}".rstrip() for name, cells, note in lines)


def as_dict(days: Days) -> dict[str, Any]:
    """Return the report for `--json`."""
    ways = {name: asdict(day) for name, day in days.items()}
    return {"ways": ways, "missing": missing(days), "kept": days[OUTBOX.name].is_kept}
