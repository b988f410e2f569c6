"""A chat endpoint on loopback, for tests of judges."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Endpoint:
    "Answers each chat request with `reply(its last message)`; a context that closes the server."

    def __init__(self, reply: Callable[[str], str]):
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                chat = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = reply(chat["messages"][-1]["content"])
                usage = dict(prompt_tokens=10, completion_tokens=1)
                choices = [dict(message=dict(content=answer))]
                body = json.dumps(dict(choices=choices, usage=usage)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()
