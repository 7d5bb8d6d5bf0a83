"""A real S3 server, moto's, in a process of its own. To requests for an upload in parts that has ended it answers
NoSuchUpload, as S3 does; moto 5.2 itself answers 500."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUCKET = "artifacts"
SECRET = "a-secret-of-the-tests"
_CODE = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from grpo.processes.lifetime import die_with_parent
die_with_parent(os.getppid())
from moto.s3.exceptions import NoSuchUpload
from moto.s3.models import S3Backend
from moto.server import main
def known(method):
    def called(self, bucket_name, multipart_id, *more, **named):
        if multipart_id not in self.get_bucket(bucket_name).multiparts:
            raise NoSuchUpload(upload_id=multipart_id)
        return method(self, bucket_name, multipart_id, *more, **named)
    return called
for name in ("upload_part", "complete_multipart_upload"):
    setattr(S3Backend, name, known(getattr(S3Backend, name)))
main(sys.argv[1:])
"""


@dataclass
class S3Server:
    """Its address, and the process, which a test may stop."""

    url: str
    process: subprocess.Popen

    def environment(self, prefix: str) -> dict[str, str]:
        """Variables with which a home keeps its artifacts below this prefix of the server's bucket."""
        keys = {
            "AWS_ACCESS_KEY_ID": "user",
            "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-tests",
            "AWS_REGION": "us-east-1",
        }
        return {"R1FLOW_STORE": f"s3://{BUCKET}/{prefix}", "AWS_ENDPOINT_URL": self.url, **keys}

    def client(self) -> Any:
        """A plain client of boto3, to look and to damage."""
        import boto3

        keys = {"aws_access_key_id": "user", "aws_secret_access_key": "x", "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=self.url, **keys)


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """Starts the server, creates the bucket, and stops it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", _CODE, "-p", str(port)]
    environment = {**os.environ, "MOTO_PORT": str(port)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env=environment, **quiet)
    server = S3Server(f"http://127.0.0.1:{port}", process)
    try:
        _wait(port, process)
        server.client().create_bucket(Bucket=BUCKET)
        yield server
    finally:
        process.kill()
        process.wait()


def _wait(port: int, process: subprocess.Popen) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        assert process.poll() is None, "moto's server ended"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
            return
        time.sleep(0.1)
    raise TimeoutError("moto's server does not answer")
