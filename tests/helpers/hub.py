"""A Hugging Face hub on the loopback: the few calls that load data files or files of a model, answered from memory; and its cache."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"


def cached_model(cache: Path, name: str, files: Mapping[str, bytes], *, revision: str = "main", sha: str = SHA) -> Path:
    """A folder of the hub's cache as a download of `files` leaves it (links to blobs apart); the snapshot."""
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / sha
    for folder in (snapshot, repo / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    (repo / "refs" / revision).write_text(sha)
    for path, content in files.items():
        (snapshot / path).write_bytes(content)
    return snapshot


@contextmanager
def loopback_hub(repos: Mapping[str, Mapping[str, bytes]], kind: str = "datasets") -> Iterator[tuple[str, list[str]]]:
    """(endpoint, requests seen so far) of a hub that holds data sets (or `kind="models"`): name -> path -> content."""
    seen: list[str] = []
    front = "" if kind == "models" else f"/{kind}"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def log_message(self, format: str, *args: object) -> None:
            """Quiet: pytest shows `seen` where it matters."""

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            seen.append(f"{self.command} {self.path}")
            path = unquote(urlsplit(self.path).path)
            for name, files in repos.items():
                if path.startswith(f"{front}/{name}/resolve/"):
                    self._file(files, path.removeprefix(f"{front}/{name}/resolve/").partition("/")[2])
                    return
                if path == f"/api/{kind}/{name}" or path.startswith(f"/api/{kind}/{name}/"):
                    self._api(name, files, path.removeprefix(f"/api/{kind}/{name}").strip("/"), body)
                    return
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        def _file(self, files: Mapping[str, bytes], path: str) -> None:
            if path not in files:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            content = files[path]
            etag = hashlib.sha1(content).hexdigest()
            span = self.headers.get("Range")
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
            if span is None:
                self._send(200, content, headers)
                return
            first, _, last = span.removeprefix("bytes=").partition("-")
            end = min(int(last) if last else len(content) - 1, len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{end}/{len(content)}"
            self._send(206, content[int(first) : end + 1], headers)

        def _api(self, name: str, files: Mapping[str, bytes], path: str, body: bytes) -> None:
            if path == "" or path.startswith("revision/"):
                siblings = [{"rfilename": file} for file in files]
                info = {"_id": "1", "id": name, "sha": SHA, "private": False, "gated": False, "tags": [], "downloads": 0, "likes": 0}
                self._json({**info, "siblings": siblings})
                return
            if path.startswith("tree/"):
                under = path.split("/", 2)[2] if path.count("/") > 1 else ""
                if under == "" or self._entries(files, under):
                    self._json(self._entries(files, under))
                else:
                    self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
                return
            if path.startswith("paths-info/"):
                text = body.decode()
                wanted = json.loads(text)["paths"] if text.startswith("{") else parse_qs(text).get("paths", [])
                self._json([entry for entry in self._entries(files, "") if entry["path"] in wanted])
                return
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})

        @staticmethod
        def _entries(files: Mapping[str, bytes], under: str) -> list[dict[str, object]]:
            inside = {path: content for path, content in files.items() if not under or path.startswith(under + "/")}
            folders = {"/".join(parts[:n]) for parts in (path.split("/") for path in inside) for n in range(1, len(parts))} - {under}
            listed: list[dict[str, object]] = [{"type": "directory", "oid": SHA, "size": 0, "path": folder} for folder in sorted(folders)]
            return listed + [
                {"type": "file", "oid": hashlib.sha1(content).hexdigest(), "size": len(content), "path": path}
                for path, content in inside.items()
            ]

        def _json(self, value: object) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
