"""
How long messages take for each hop: histograms by topic, hop, consumer group and minute.

    published 10:00:00.000 (its id) -- claim 0.2 s --> claimed -- send 0.1 s --> sent
                                    -- store 0.4 s --> stored    -- handle 1.5 s --> handled     (all but send since the publish)

The time of publishing is in the message id, so no hop needs a join. Histograms can be added; `bins` defines their bins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F

from outbox.pipeline.spark.bins import BACKWARDS, BINS_PER_DOUBLING, INSTANT, SHARES, add, percentile
from outbox.pipeline.spark.columns import Bools, Coded, Ints, RowCounter, coded, constant, published_micros, times_of
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.findings import STAGE_OF, Breach, FindingKind, clock_has_jumped
from outbox.pipeline.spark.history import History
from outbox.pipeline.spark.scan import scan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


MINUTE = 60_000_000

COLUMNS = {
    "places": ("topic", "state", "message_id", "claimed_at", "at"),
    "broker": ("topic", "message_id", "at"),
    "inbox": ("consumer_group", "topic", "message_id", "at"),
}

# minute: since 1970.
HISTOGRAM = pa.schema(
    {
        "topic": pa.string(),
        "hop": pa.string(),
        "consumer_group": pa.string(),
        "minute": pa.int64(),
        "bin": pa.int32(),
        "n": pa.int64(),
    }
)

Times = tuple[Ints, Bools]  # microseconds since 1970, and which rows have one


@dataclass(frozen=True)
class Hop:
    """The times of a hop in some rows. is_one: which rows are about it."""

    name: str
    start: Times
    end: Times
    is_one: Bools | bool = True
    group: Coded | None = None


@dataclass(frozen=True)
class Latency:
    """Calculates latencies. tolerance_micros: negative latencies up to this count as 0, because clocks differ."""

    tolerance_micros: int = 0

    def histograms(self, frame: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """
        Yield the histograms of a part of a frame. Hops: `claim` (publish to claim), `send` (claim to sent), `store` (publish to
        stored), `handle` (publish to handled, by group).
        """
        counter = RowCounter(HISTOGRAM)
        for batch in batches:
            topic = coded(batch, "topic")
            for hop in HOPS[frame](batch):
                (start, has_start), (end, has_end) = hop.start, hop.end
                counts = has_start & has_end & hop.is_one
                texts = [topic, constant(hop.name, len(batch)), hop.group or constant("", len(batch))]
                numbers = [end // MINUTE, self._bins(end - start)]
                counter.add([text.of(counts) for text in texts], [number[counts] for number in numbers])
        yield from counter.batches()

    def _bins(self, micros: Ints) -> Ints:
        doublings = np.floor(np.log2(np.maximum(micros, 1)) * BINS_PER_DOUBLING).astype(np.int64)
        return np.select([micros < -self.tolerance_micros, micros <= 1], [BACKWARDS, INSTANT], doublings + 1)


def _of_places(batch: pa.RecordBatch) -> Iterator[Hop]:
    is_sent = coded(batch, "state").is_("sent")
    claimed = times_of(batch, "claimed_at")
    yield Hop("claim", published_micros(batch), claimed, is_sent)
    yield Hop("send", claimed, times_of(batch, "at"), is_sent)


def _of_broker(batch: pa.RecordBatch) -> Iterator[Hop]:
    yield Hop("store", published_micros(batch), times_of(batch, "at"))


def _of_inbox(batch: pa.RecordBatch) -> Iterator[Hop]:
    yield Hop("handle", published_micros(batch), times_of(batch, "at"), group=coded(batch, "consumer_group"))


HOPS = {"places": _of_places, "broker": _of_broker, "inbox": _of_inbox}


def latency_report(spark: SparkSession, config: PipelineConfig, history: History) -> dict[str, Any]:
    """
    Return histograms (rows of topic, hop, group, minute, bin, n), percentiles of each topic and hop, and findings.

    A finding of kind `clock` counts the messages with a negative latency beyond the tolerance.
    """
    count = Latency(int(config.clock_tolerance_seconds * 1_000_000)).histograms
    histograms = scan(spark, history, COLUMNS, count, HISTOGRAM)
    rows = histograms.groupBy(*HISTOGRAM.names[:-1]).agg(F.sum("n").alias("n")).collect()
    whole: dict[tuple[str, str, str], dict[int, int]] = defaultdict(dict)
    for row in rows:
        key = row.topic, row.hop, row.consumer_group
        whole[key] = add(whole[key], {row.bin: row.n})
    return {
        "histograms": [[row.topic, row.hop, row.consumer_group, row.minute * 60, row.bin, row.n] for row in rows],
        "percentiles": [
            {
                "topic": topic,
                "hop": hop,
                "group": group,
                "count": sum(bins.values()),
                **{f"p{share * 100:g}": percentile(bins, share) for share in SHARES},
            }
            for (topic, hop, group), bins in sorted(whole.items())
        ],
        "findings": [
            Breach(
                *(FindingKind.CLOCK, STAGE_OF[hop], topic),
                group=group,
                count=bins[BACKWARDS],
                detail=clock_has_jumped(config.clock_tolerance_seconds),
            ).as_dict()
            for (topic, hop, group), bins in sorted(whole.items())
            if bins.get(BACKWARDS)
        ],
    }
