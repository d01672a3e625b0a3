"""Turn recorded deliveries into copies at the broker, as `statements.RECORDED` does in SQL for rows in the database."""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

MESSAGE = ["topic", "message_id"]
PLACE = [*MESSAGE, "queue", "pos", "delivery_count"]


def once(rows: DataFrame) -> DataFrame:
    """
    Return one row for each place.

    Takes and returns the columns of `lake.frames.RECORDED`. A place is recorded again if its row has left the table: when an old
    message is redelivered, or the broker's offset is set back. For a broker that does not report places, all deliveries are kept.
    """
    has_place = F.col("pos").isNotNull()
    placed = rows.where(has_place).dropDuplicates(PLACE)
    return placed.unionAll(rows.where(~has_place).dropDuplicates(["id", "recorded_at"]))


def copies(rows: DataFrame) -> DataFrame:
    """
    Return the rows that are copies: first deliveries, and later ones that no earlier delivery explains.

    Takes the result of `once`, and returns the same columns.
    """
    later = rows.where("delivery_count > 1")
    of_later = (
        rows.join(later.select(*MESSAGE).distinct(), MESSAGE, "left_semi")
        .groupBy(*MESSAGE, "delivery_count")
        .agg(F.count("*").alias("n"))
    )
    earlier = Window.partitionBy(*MESSAGE).orderBy("delivery_count").rowsBetween(Window.unboundedPreceding, -1)
    explained = of_later.select(*MESSAGE, "delivery_count", F.coalesce(F.max("n").over(earlier), F.lit(0)).alias("explained"))
    copy = F.row_number().over(Window.partitionBy(*MESSAGE, "delivery_count").orderBy("id", "recorded_at"))
    unexplained = later.withColumn("copy", copy).join(explained, [*MESSAGE, "delivery_count"]).where("copy > explained")
    return rows.where("delivery_count = 1").unionAll(unexplained.select(*rows.columns))
