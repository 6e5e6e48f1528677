"""As much of the API server of Kubernetes as kubectl needs to label, annotate and taint a node."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

RESOURCES = {
    "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "v1",
    "resources": [{
        "name": "nodes", "singularName": "node", "namespaced": False, "kind": "Node",
        "verbs": ["get", "list", "patch"], "shortNames": ["no"],
    }],
}  # fmt: skip


class Server(ThreadingHTTPServer):
    """Has one node, and the requests that changed it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.node: dict[str, Any] = {
            "kind": "Node", "apiVersion": "v1", "spec": {},
            "metadata": {"name": "gpu-17", "uid": "1", "resourceVersion": "1", "labels": {}, "annotations": {}},
        }  # fmt: skip
        self.asked: list[str] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        known: dict[str, Any] = {
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
            "/api/v1": RESOURCES,
            "/api/v1/nodes/gpu-17": self.server.node,
        }
        self.answer(known.get(path))

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(f"{self.command} {self.path.partition('?')[0]}")
        merge(self.server.node, body)
        self.answer(self.server.node)

    def answer(self, body: Any) -> None:
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        content = json.dumps(missing if body is None else body).encode()
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


def merge(into: dict[str, Any], patch: dict[str, Any]) -> None:
    """Maps are merged, lists replaced, and null removes: so it is for labels, annotations and taints."""
    for key, value in patch.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict):
            merge(into.setdefault(key, {}), value)
        elif not key.startswith("$"):
            into[key] = value


@contextmanager
def api_server() -> Iterator[Server]:
    """A server for the time of the block."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
