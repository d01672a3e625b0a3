"""What the recorder wrote down, as copies at the broker; as `statements.RECORDED`, which is for rows of the table alone."""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

MESSAGE = ["topic", "message_id"]
PLACE = [*MESSAGE, "queue", "pos", "nth"]


def once(rows: DataFrame) -> DataFrame:
    """
    Leave one row of each place.

    Takes what `lake.frames.RECORDED` has, and gives the same. In the table a place cannot come again, but it can when its row
    has left the table: the recorder is handed an old message once more, or the broker's offset goes back. A broker that does
    not say where a message lies has a row for each delivery.
    """
    has_place = F.col("pos").isNotNull()
    placed = rows.where(has_place).dropDuplicates(PLACE)
    return placed.unionAll(rows.where(~has_place).dropDuplicates(["id", "recorded_at"]))


def copies(rows: DataFrame) -> DataFrame:
    """
    Return the rows that stand for copies: of deliveries other than the first, those that no earlier one explains.

    Takes what `once` gives, and gives the same.
    """
    later = rows.where("nth > 1")
    of_later = (
        rows.join(later.select(*MESSAGE).distinct(), MESSAGE, "left_semi").groupBy(*MESSAGE, "nth").agg(F.count("*").alias("n"))
    )
    earlier = Window.partitionBy(*MESSAGE).orderBy("nth").rowsBetween(Window.unboundedPreceding, -1)
    explained = of_later.select(*MESSAGE, "nth", F.coalesce(F.max("n").over(earlier), F.lit(0)).alias("explained"))
    copy = F.row_number().over(Window.partitionBy(*MESSAGE, "nth").orderBy("id", "recorded_at"))
    unexplained = later.withColumn("copy", copy).join(explained, [*MESSAGE, "nth"]).where("copy > explained")
    return rows.where("nth = 1").unionAll(unexplained.select(*rows.columns))
