"""A judge on the loopback interface with faults on demand."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tests.support.hub_server import Handler, listening

WORTH = re.compile(r"worth (\d+)")  # an answer contains the score that this judge gives it


@dataclass
class Fault:
    """A fault of the next requests."""

    kind: str  # an HTTP status, or a kind of `faulty_reply`
    times: int = 1
    about: str = ""  # only for questions that contain this text


@dataclass
class Endpoint:
    """A judge: the faults to inject, and the requests received."""

    faults: list[Fault] = field(default_factory=list)
    base_url: str = ""
    elsewhere: str = ""  # where a redirect leads
    requests: list[dict[str, Any]] = field(default_factory=list)  # for judgements only
    keys: set[str] = field(default_factory=set)
    knows_schemas: bool = True  # else a request with a `response_format` is refused
    lock: threading.Lock = field(default_factory=threading.Lock)
    before_reply: Callable[[int], None] = lambda _: None  # gets the number of the request

    def fault_for(self, data: dict[str, Any]) -> str:
        for fault in self.faults:
            if fault.times and fault.about in data["instruction"]:
                fault.times -= 1
                return fault.kind
        return ""

    def asked(self) -> list[dict[str, Any]]:
        """Return the data of each request."""
        return [data_of(request) for request in self.requests]


def data_of(request: dict[str, Any]) -> dict[str, Any]:
    """Return the data between the boundary lines, which must enclose the whole last message."""
    first, *lines, last = request["messages"][-1]["content"].split("\n")
    assert first == last and first in request["messages"][0]["content"]
    return json.loads("\n".join(lines))


def faulty_reply(kind: str, scores: dict[str, int]) -> Any:
    """Return a reply with a fault, or an unusual but valid one."""
    first, *others = scores
    reply = json.dumps(scores)
    return {
        "": reply,
        "fenced": f"```json\n{json.dumps(scores, indent=2)}\n```",
        "prose": f"Both {{are}} weak. My scores: {json.dumps({'scores': scores})} Good luck!",
        "fraction": json.dumps({label: score + 0.5 for label, score in scores.items()}),
        "list": [{"type": "text", "text": reply}],  # the client does not check that it is a text
        "junk": "I would rather not {say}.",
        "empty": "",
        "deep": '{"a":' * 200_000,
        "missing": json.dumps({label: scores[label] for label in others}),
        "extra": json.dumps(scores | {"answer_99": 50}),
        "text": json.dumps(scores | {first: "100"}),
        "truth": json.dumps(scores | {first: True}),
        "nan": json.dumps(scores | {first: float("nan")}),
        "too high": json.dumps(scores | {first: 101}),
        "twice": f'{{"{first}": 99, {reply[1:]}',
        "too low": json.dumps(scores | {first: -1}),
        "several": json.dumps(scores | {first: (scores[first] + 1) % 100}) + reply,
    }[kind]


@contextmanager
def judging(endpoint: Endpoint) -> Iterator[Endpoint]:
    """Serve a judge inside the context."""
    with listening(_handler_of(endpoint)) as address:
        endpoint.base_url = f"{address}/v1"
        yield endpoint


def _handler_of(endpoint: Endpoint) -> type[Handler]:
    class JudgeHandler(Handler):
        def do_POST(self) -> None:
            request = json.loads(self.body())
            with endpoint.lock:
                endpoint.requests.append(request)
                endpoint.keys.add(self.headers["Authorization"])
                kind, number = endpoint.fault_for(data_of(request)), len(endpoint.requests)
            endpoint.before_reply(number)
            if kind == "page":
                self.send(200, b"<html>not an endpoint</html>", {"Content-Type": "text/html"})
            elif kind == "broken":
                self.send(200, b'{"choices": [')
            elif kind == "lost":
                self.send(200, b"{", {"Content-Length": "400"})
                self.close_connection = True
            elif kind == "brackets":
                self.send(200, b"[" * 200_000)
            elif "response_format" in request and not endpoint.knows_schemas:
                self.refuse(400, "response_format json_schema is not supported")
            elif kind == "quota":
                self.refuse(429, "You exceeded your quota", code="insufficient_quota")
            elif kind.isdigit():
                self.refuse(int(kind), f"refused with {kind}")
            else:
                self.judge(data_of(request)["answers"], kind)

        def judge(self, answers: dict[str, str], kind: str) -> None:
            scores = {label: int(WORTH.search(text)[1]) for label, text in answers.items()}
            message = {"role": "assistant", "content": faulty_reply(kind, scores)}
            body = json.dumps(
                {
                    "id": "1",
                    "object": "chat.completion",
                    "created": 1,
                    "model": "judge",
                    "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
                }
            )
            self.send(200, body.encode())

        def refuse(self, status: int, message: str, *, code: str | None = None) -> None:
            error = {"error": {"message": message, "type": "error", "code": code}}
            self.send(
                status,
                json.dumps(error).encode(),
                {"Retry-After": "0.05"}
                | ({"Location": endpoint.elsewhere} if status == 307 else {}),
            )

        def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            with suppress(ConnectionError):  # the client waits no longer
                super().send(status, body, {"Content-Type": "application/json"} | (headers or {}))

    return JudgeHandler
