"""
Write a made-up history to a folder or a database, and the truth about it.

    python -m benchmarks.synthetic var/history --messages 10000000 --lost 90 --duplicated 40 --orphans 20 --seed 7
    python -m benchmarks.synthetic postgresql://shop@127.0.0.1/made_up --messages 100000 --lost 60 --duplicated 20 --seed 7

The first writes all frames as Parquet, and truth.json with what an audit has to find and the configuration to find it with. The
second fills the tables of a database that was migrated and is empty: outbox, lanes, embedded broker, inbox; one that has rows is
refused. The same truth goes to truth.json here; no order lacks its message in it, and nothing is twice at the broker, which would
not take it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from outbox.pipeline.spark import PipelineError
from outbox.pipeline.spark.config import PipelineConfig, Source
from outbox.pipeline.spark.session import build_session


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the arguments' command; return the exit code."""
    options = _parser().parse_args(arguments)
    # In here: behind `build_session`, which says what to install where pyspark is missing.
    from benchmarks.synthetic.database import write_database
    from benchmarks.synthetic.plan import Plan
    from benchmarks.synthetic.write import write_history

    names = ("messages", "lost", "duplicated", "orphans", "topics", "lanes", "groups", "seed")
    plan = Plan(**{name: getattr(options, name) for name in names})
    source = Source(options.target, reader="python")  # needs no driver's jar: a database is written by COPY
    config = PipelineConfig(source, master=options.master, driver_memory=options.driver_memory)
    try:
        spark = build_session(config, name="outbox synthetic")
        try:
            truth = (write_database if source.is_postgres else write_history)(spark, plan, options.target)
        finally:
            spark.stop()
    except (PipelineError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    path = Path(options.truth or ("truth.json" if source.is_postgres else f"{options.target}/truth.json"))
    path.write_text(json.dumps(truth, indent=2) + "\n")
    print(f"{plan.messages} messages made up, the truth in {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.synthetic", description=__doc__)
    parser.add_argument("target", help="the folder where it goes, as Parquet; or postgresql://…, a database migrated and empty")
    parser.add_argument("--messages", type=int, required=True, metavar="N")
    parser.add_argument("--lost", type=int, default=0, metavar="N", help="in all, spread over the hops")
    parser.add_argument("--duplicated", type=int, default=0, metavar="N", help="at the broker and in the inbox")
    parser.add_argument("--orphans", type=int, default=0, metavar="N", help="at broker and inbox, without an outbox row")
    parser.add_argument("--topics", type=int, default=4, metavar="N")
    parser.add_argument("--lanes", type=int, default=2, metavar="N")
    parser.add_argument("--groups", type=int, default=1, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--truth", metavar="FILE", help="default: truth.json, in the folder or here")
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--driver-memory", default="2g", metavar="SIZE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
