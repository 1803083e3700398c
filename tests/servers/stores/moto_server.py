"""S3 by moto, whose requests are answered one at a time: its threads share objects without locks.

A bucket that was listed while another test deleted from it, and an object that was read while somebody put it again,
were answered with a status of 500.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from functools import cache
from threading import Lock, Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment


def serve_moto() -> str:
    """Start it in this process, until that ends; gives its URL."""
    from botocore.utils import parse_to_aware_datetime
    from moto.core import serialize
    from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
    from moto.s3.models import S3Backend
    from werkzeug.serving import make_server

    class Handler(MotoRequestHandler):
        disable_nagle_algorithm = True  # an answer is several writes, and a client waits 40 ms for the second

        def log(self, type: str, message: str, *args: Any) -> None:
            """Print nothing."""

    # Half of each listing was to read the times in it.
    vars(serialize)["parse_to_aware_datetime"] = cache(parse_to_aware_datetime)
    _list_below_prefixes(S3Backend)
    # S3 alone: moto's own server looks at each request through the modules of all services.
    application = _one_at_a_time(create_backend_app("s3"))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def _list_below_prefixes(backend: Any) -> None:
    """Let moto's class of S3 list the keys below a prefix only: all tests share a bucket, and each listing took all."""
    list_all = backend.list_objects

    def list_objects(self: Any, bucket: Any, prefix: str | None, *args: Any, **options: Any) -> Any:
        keys = {name: bucket.keys[name] for name in dict.keys(bucket.keys) if name.startswith(prefix or "")}
        return list_all(self, SimpleNamespace(keys=keys), prefix, *args, **options)

    backend.list_objects = list_objects


def _one_at_a_time(application: WSGIApplication) -> WSGIApplication:
    """The application, which is given a request when it has come whole: others don't wait for those who send slowly."""
    from werkzeug.exceptions import ClientDisconnected
    from werkzeug.wsgi import get_input_stream

    lock = Lock()

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        try:
            body = get_input_stream(environ).read()
        except ClientDisconnected as error:
            return error(environ, start_response)
        with lock:
            return application({**environ, "wsgi.input": io.BytesIO(body)}, start_response)

    return answer
