"""A process that is started like a server of ours and does what STUB says: lives, dies, hangs, or finds its port taken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer


def flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"model_path": os.environ.get("STUB_PATH", flag("--model-path"))}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    mode = os.environ["STUB"]
    print("stub", mode, "key", os.environ["RLMCA_SGLANG_API_KEY"], flush=True)
    if mode == "die":
        print("CUDA error: no kernel image", flush=True)
        sys.exit(3)
    if mode == "busy" and int(flag("--port")) == int(os.environ["STUB_BUSY"]):
        print("[Errno 98] error while attempting to bind on address: address already in use", flush=True)
        sys.exit(1)
    if mode == "hang":
        time.sleep(600)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", stubborn])
    HTTPServer(("127.0.0.1", int(flag("--port"))), Handler).serve_forever()
