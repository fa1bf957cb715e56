"""The judge: requests to an OpenAI-compatible endpoint, and when to repeat them."""

import json
import os
import re
from contextlib import suppress
from typing import Any

import requests
from pydantic import HttpUrl, ValidationError
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError
from urllib3.util import Retry

from basics.errors import UserError
from basics.machine import within
from lab.instruct.comparison import Comparison, UnusableReplyError

OPENAI = "https://api.openai.com/v1"
REPEATED = (408, 409, 429, *range(500, 600))  # statuses of errors that may pass
MAX_REPEATS = 5
LONGEST_PAUSE = 60.0  # seconds, if a server asks for a longer one before a request is repeated
REQUEST_SECONDS = 300.0  # without any data
ANSWER_SECONDS = 900.0  # for one request with all its repeats
MAX_ASKS = 3  # attempts to get a usable reply
# Errors that every later request would get too: key, account, address or model name is wrong.
FATAL_STATUSES = (301, 302, 303, 307, 308, 401, 402, 403, 404, 405)
FATAL_CODE = "insufficient_quota"  # has status 429, like errors worth a repeat
MAX_REPLY_BYTES = 2**22
NOT_THERE = (ValueError, LookupError, TypeError, RecursionError)  # reading a part of a reply


class Repeats(Retry):
    """When a request is repeated; the pause that a server asks for has a limit."""

    def increment(self, *args: Any, **given: Any) -> Retry:
        later = super().increment(*args, **given)
        if response := given.get("response"):
            response.close()  # a repeat would read all of its body first, without any limit
        return later

    def parse_retry_after(self, retry_after: str) -> float:
        with suppress(ValueError):
            return min(LONGEST_PAUSE, max(0.0, float(retry_after)))
        return 0.0  # a date, or no time: then the pauses grow


class Judge:
    """A language model behind an OpenAI-compatible endpoint. Thread-safe.

    Args:
        base_url: the endpoint; None for OpenAI's, which needs the key in OPENAI_API_KEY.

    Raises:
        UserError: the key is missing, or key or address cannot be one.
    """

    def __init__(self, base_url: str | None, model: str) -> None:
        self.key = os.environ.get("OPENAI_API_KEY", "").strip()
        if base_url is None and not self.key:
            raise UserError("OPENAI_API_KEY is not set: set it to your key, or name a server that"
                            " needs none with --base-url")
        if not re.fullmatch("[!-~]*", self.key):  # an error of the HTTP library would show it
            raise UserError("OPENAI_API_KEY contains spaces, line ends or non-ASCII characters; set"
                            " it to your key")
        self.model, self.url = model, (base_url or OPENAI).rstrip("/")
        self.address = _without_user(self.url)  # to be shown
        try:
            HttpUrl(self.url)
        except ValidationError:
            raise UserError(f"--base-url is {self.address[:60]!r}; give an address such as"
                            " http://localhost:8000/v1") from None
        self.session = requests.Session()
        repeats = Repeats(MAX_REPEATS, connect=2, status_forcelist=REPEATED, allowed_methods=None,
                          backoff_factor=0.5, backoff_max=8, raise_on_status=False)
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter(pool_maxsize=64, max_retries=repeats))
        self.session.headers["Accept-Encoding"] = "identity"  # nothing is unpacked
        self.session.auth = self._authorise  # else a .netrc file could replace the key
        self._is_stopped = False

    def _authorise(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self.key or 'none'}"
        return request

    def stop(self) -> None:
        """Repeat no more questions; requests in flight may complete."""
        self._is_stopped = True

    def score(self, comparison: Comparison) -> dict[str, float]:
        """Ask the judge to score all answers to a question, up to `MAX_ASKS` times.

        Raises:
            UnusableReplyError: no reply could be used.
            UserError: no other question can be judged either.
        """
        complaint = ""
        for _ in range(MAX_ASKS):
            reply = self._ask(comparison.messages(complaint))
            try:
                return comparison.read_scores(reply)
            except UnusableReplyError as error:
                complaint = str(error)
            if self._is_stopped:
                break
        raise UnusableReplyError(f"the reply cannot be used: {complaint}")

    def _ask(self, messages: list[dict[str, str]]) -> str:
        """Return the reply, empty if it is no completion. Raises: as `score`."""
        try:
            response, body = within(ANSWER_SECONDS, lambda: self._post(messages))
        except (requests.Timeout, TimeoutError):
            raise UnusableReplyError("the judge did not answer in time") from None
        except requests.RequestException as error:
            reason = str(error).rsplit(": ", 1)[-1].strip("\"')")  # before it: the library's words
            raise UserError(f"{self.address}: cannot be reached ({reason[:60]}); check --base-url"
                            " and the network, then run the same command again") from None
        if response.status_code == 200:
            with suppress(*NOT_THERE):
                content = json.loads(body)["choices"][0]["message"]["content"]
                return content if isinstance(content, str) else ""  # some servers send a list
            return ""
        reason, code = _reason(body, response.headers.get("Location"), self.key)
        status = response.status_code
        if status in FATAL_STATUSES or code == FATAL_CODE:
            raise UserError(f"{self.address}: status {status} for model {self.model[:40]!r}"
                            f" ({reason}); check OPENAI_API_KEY, --model and --base-url")
        raise UnusableReplyError(f"status {status}: {reason}")

    def _post(self, messages: list[dict[str, str]]) -> tuple[requests.Response, bytes]:
        """Send a request; return the response and at most `MAX_REPLY_BYTES` of its body."""
        # Followed to another host, a redirect would take the questions and answers there.
        with self.session.post(
                f"{self.url}/chat/completions", json={"model": self.model, "messages": messages},
                timeout=REQUEST_SECONDS, allow_redirects=False, stream=True) as response:
            with suppress(HTTPError):  # the connection was lost: the reply cannot be used
                return response, response.raw.read(MAX_REPLY_BYTES, decode_content=False)
            return response, b""


def _reason(body: bytes, location: str | None, key: str) -> tuple[str, str | None]:
    """Return the server's error message, without the key that some repeat, and its code."""
    message, code = body.decode(errors="replace"), None
    with suppress(*NOT_THERE):
        error = json.loads(body)["error"]
        message, code = str(error["message"]), error.get("code")
    message = f"it redirects to {location}" if location else message
    message = message.replace(key, "***") if key else message
    return " ".join(message.split())[:60], code


def _without_user(text: str) -> str:
    """Return an address, or what was meant to be one, without a name and a password in it."""
    return re.sub(r"^(\w*://)?.*@", r"\1", text, flags=re.DOTALL)
