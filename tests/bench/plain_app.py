"""An application that reads a body and says so: what `plain_uvicorn` serves.

python -m uvicorn tests.bench.plain_app:app --port 8123
"""

from typing import Any


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
        await send({"type": "http.response.body", "body": b"."})
