"""
A process in the place of the Spark job: `OUTBOX_TEST_JOB` says what it does. It is started, heard, ended as the job is.
"""

import argparse
import json
import os
import sys
from pathlib import Path

FINDING = {
    "kind": "lost",
    "stage": "broker",
    "topic": "orders",
    "source": "urn:uuid:ours",
    "lane": 1,
    "group": "",
    "subject": "",
    "first": 7,
    "last": 8,
    "count": 2,
    "detail": "",
    "ids": ["01a1ff7e-c94f-743d-851d-000000000007", "01a1ff7e-c94f-743d-851d-000000000008"],
    "about": [],
    "text": "lost: 2 x topic 'orders', lane 1, numbers 7 to 8, at broker",
}

REPORT = {
    "as_of": "2026-11-20T03:00:00+00:00",
    "since": "2026-11-14T03:00:00+00:00",
    "findings": [FINDING],
    "counts": {"orders": {"assigned": 10, "sent": 10, "broker": 8, "handled by points": 8}},
    "foreign": 0,
    "seconds": 1500.0,
    "steps": {"starting Spark": 1.0, "latency": 0.25},
    "latency": {
        "histograms": [["orders", "store", "", 1795100400, 100, 3], ["orders", "store", "", 1795100400, 104, 1]],
        "percentiles": [],
    },
    "backlog": [
        {
            "group": "points",
            "topic": "orders",
            "backlog": 4,
            "growth": 0.4,
            "cause": "consumption slower",
            "onset": "2026-11-20T02:50:00+00:00",
            "most_repeated": [["01a1ff7e-c94f-743d-851d-000000000007", 3]],
            "minutes": [[1795100400, 2, 0.2, "none"], [1795100460, 4, 0.4, "consumption slower"]],
        }
    ],
    "sources": ["urn:uuid:ours"],
    "digest": "sha256:abc",
    "code_version": "1.0+abc",
}

CLEAN = {**REPORT, "findings": []}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", choices=["audit"])
    parser.add_argument("--config", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--history")
    parser.add_argument("--with-parent", action="store_true")
    options = parser.parse_args()
    json.loads(options.config.read_text())
    what = os.environ["OUTBOX_TEST_JOB"]
    sys.stderr.write("starting Spark\n")
    sys.stderr.flush()
    match what:
        case "finds":
            options.output.write_text(json.dumps(REPORT))
            return 1
        case "is clean":
            options.output.write_text(json.dumps(CLEAN))
            return 0
        case "cannot":
            sys.stderr.write("Audit failed: Spark needs Java 17 or newer, but there is no java on PATH.\n")
            return 2
        case "waits":  # as the job does: as long as somebody holds the other end
            sys.stdin.buffer.read()
            Path(os.environ.get("OUTBOX_TEST_FILE", os.devnull)).touch()
            return 2
        case "hangs":
            while True:
                sys.stdin.buffer.read()
        case "tells its environment":
            sys.stderr.write(f"key: {os.environ.get('OUTBOX_AUDIT_KEY')}\n")
            return 2
    return 3


if __name__ == "__main__":
    sys.exit(main())
