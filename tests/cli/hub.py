"""A stand-in for the Hugging Face Hub on this machine's loopback: the few addresses that a download asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse


@dataclass
class Hub:
    """Files of repositories by name. With ``cut``, connections for large files break after so many bytes."""

    files: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    cut: int | None = None
    commit: str = "c" * 40
    address: str = ""
    asked: list[tuple[str, str]] = field(default_factory=list)  # (file, range)


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Runs the hub until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Quiet."""

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            parts = [unquote(part) for part in urlparse(self.path).path.strip("/").split("/")]
            api = parts[:2] == ["api", "models"]
            name = "/".join(parts[2:4] if api else parts[:2])
            if name in hub.gated:
                return self.refuse(403, "GatedRepo")
            if name not in hub.files:
                return self.refuse(401, "RepoNotFound")
            revision = parts[5] if api and len(parts) > 5 else parts[3] if not api else "main"
            if revision not in ("main", hub.commit):
                return self.refuse(404, "RevisionNotFound")
            files = hub.files[name]
            if not api:
                return self.send_file("/".join(parts[4:]), files["/".join(parts[4:])])
            if parts[4] == "tree":
                return self.send_json([{"type": "file", "path": path, "size": len(content), "oid": oid(content)}
                                       for path, content in files.items()])
            return self.send_json({"id": name, "modelId": name, "sha": hub.commit, "private": False, "tags": [], "downloads": 0,
                                   "likes": 0, "siblings": [{"rfilename": path} for path in files]})

        def refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def send_json(self, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def send_file(self, path: str, content: bytes) -> None:
            wanted = self.headers.get("Range", "")
            start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
            self.send_response(206 if wanted else 200)
            self.send_header("ETag", f'"{oid(content)}"')
            self.send_header("X-Repo-Commit", hub.commit)
            self.send_header("Accept-Ranges", "bytes")
            if wanted:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            if self.command == "HEAD":
                return
            hub.asked.append((path, wanted))
            if hub.cut is not None and len(content) > hub.cut:
                content = content[: start + hub.cut]
                self.close_connection = True
            self.wfile.write(content[start:])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
