"""The demo with a script in the place of its server: no process is left when the demo itself is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from shim.commands.demo import show
from shim.ledger import running

ROOT = Path(__file__).parents[2]

# It is ready at once and has a child. Like vLLM's processes at times, neither ends by SIGTERM or SIGINT.
SERVER = """
import os, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
class Ready(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
child = os.fork()
signal.alarm(60)  # both end even if this test fails
if not child:
    signal.pause()
print("pids", os.getpid(), child, flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Ready).serve_forever()
"""
DEMO = """
import sys
from pathlib import Path
from shim.commands.demo import server
with server([sys.executable, sys.argv[1]], Path("model"), Path(sys.argv[2]), 60):
    print("up", flush=True)
    sys.stdin.read()
"""


def test_kill_9_of_the_demo_ends_every_process_of_its_server(clean_env, tmp_path):
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    demo = subprocess.Popen(
        [sys.executable, "-c", DEMO, str(script), str(tmp_path)],
        env=clean_env | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with demo:
        assert demo.stdout.readline() == b"up\n"
        pids = [int(word) for word in (tmp_path / "server.log").read_text().split()[1:3]]
        assert all(map(running, pids))
        demo.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(running, pids))


def test_a_demo_without_a_patch_that_is_needed_is_not_ok(capsys):
    one = {"vllm": "0.33.0", "model": "m", "answer": "a", "chat": "c", "processes": [], "ready_s": 1.0}
    show(one | {"ok": False, "left_out": ["cpu_rotary"]})
    assert "NOT ok: GLM5_SHIM_SKIP leaves out cpu_rotary, which GLM-5 needs" in capsys.readouterr().out
