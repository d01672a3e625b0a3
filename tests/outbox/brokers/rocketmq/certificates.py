"""A certificate for a stub."""

import subprocess
from pathlib import Path


def make_certificate(folder: Path) -> Path:
    """Make a certificate that vouches for itself; its key lies beside it."""
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    subprocess.run(["openssl", "req", "-x509", *kind, *files, *names], check=True, capture_output=True)
    return folder / "cert.pem"
