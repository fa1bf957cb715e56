"""The judge: requests to an OpenAI-compatible endpoint, and when to repeat them."""

from __future__ import annotations

import os
import re
from typing import Any

from openai import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    BadRequestError,
    DefaultHttpxClient,
    OpenAI,
    UnprocessableEntityError,
)
from pydantic import HttpUrl, ValidationError

from basics.errors import UserError
from basics.time_limit import within
from lab.instruct.comparison import Comparison, UnusableReplyError

MAX_RETRIES = 5  # by the client, which waits as long as the server asks, or up to 8 seconds each
REQUEST_SECONDS = 300.0
MAX_ASKS = 3  # attempts to get a usable reply
# Errors that every later request would get too: key, account, address or model name is wrong.
FATAL_STATUSES = (301, 302, 303, 307, 308, 401, 402, 403, 404, 405)
FATAL_CODE = "insufficient_quota"  # has status 429, like errors worth a retry
PROBE_SECONDS = 30.0
ANSWER_SECONDS = 900.0  # for one request with the client's retries
MAX_REPLY_BYTES = 2**22
NO_COMPLETION = (APIError, ValueError, AttributeError, TypeError, LookupError, RecursionError)


class Judge:
    """A language model behind an OpenAI-compatible endpoint. Thread-safe.

    Args:
        base_url: the endpoint; None for OpenAI's, which needs the key in OPENAI_API_KEY.

    Raises:
        UserError: the key is missing, or key or address cannot be one.
    """

    def __init__(self, base_url: str | None, model: str) -> None:
        key = os.environ.get("OPENAI_API_KEY", "").strip()
        if base_url is None and not key:
            raise UserError("OPENAI_API_KEY is not set: set it to your key, or name a server that"
                            " needs none with --base-url")
        if not re.fullmatch("[!-~]*", key):  # an error of the HTTP library would show it
            raise UserError("OPENAI_API_KEY contains spaces, line ends or non-ASCII characters; set"
                            " it to your key")
        try:
            HttpUrl(base_url or "https://api.openai.com")
        except ValidationError:
            raise UserError(f"--base-url is {_without_user(base_url or '')[:60]!r}; give an address"
                            " such as http://localhost:8000/v1") from None
        # Followed to another host, a redirect would take the questions and answers there.
        client = DefaultHttpxClient(follow_redirects=False, event_hooks={"response": [_cut]},
                                    headers={"Accept-Encoding": "identity"})
        self.model = model
        self.client = OpenAI(api_key=key or "none", base_url=base_url, max_retries=MAX_RETRIES,
                             timeout=REQUEST_SECONDS, http_client=client)
        self._address = _without_user(str(self.client.base_url))
        self._supports_schemas = True  # until the server rejects one
        self._is_stopped = False

    def stop(self) -> None:
        """Repeat no more questions; requests in flight may complete."""
        self._is_stopped = True

    def check_reachable(self) -> None:
        """Check once, without retries, that the endpoint answers. Raises: UserError."""
        client = self.client.with_options(max_retries=0, timeout=PROBE_SECONDS)
        try:
            within(PROBE_SECONDS, client.models.list)
        except (APIConnectionError, TimeoutError) as error:
            raise self._unreachable(error) from None
        except NO_COMPLETION:
            pass  # it answers; not every server lists its models to everybody

    def score(self, comparison: Comparison) -> dict[str, float]:
        """Ask the judge to score all answers to a question, up to `MAX_ASKS` times.

        Raises:
            UnusableReplyError: no reply could be used.
            UserError: no other question can be judged either.
        """
        complaint = ""
        for _ in range(MAX_ASKS):
            reply = self._ask(comparison, complaint)
            try:
                return comparison.read_scores(reply)
            except UnusableReplyError as error:
                complaint = str(error)
            if self._is_stopped:
                break
        raise UnusableReplyError(f"of the reply: {complaint}")

    def _ask(self, comparison: Comparison, complaint: str) -> str:
        messages = comparison.messages(complaint)
        if self._supports_schemas:
            try:
                return self._request(messages, response_format=comparison.response_format())
            except (BadRequestError, UnprocessableEntityError):
                pass
        try:
            reply = self._request(messages)
        except (BadRequestError, UnprocessableEntityError) as error:
            raise UnusableReplyError(f"status {error.status_code}: {_reason(error)}") from None
        self._supports_schemas = False  # the same request without a schema succeeded
        return reply

    def _request(self, messages: list[dict[str, str]], **options: Any) -> str:
        """Send one request; the client retries after a 429, a 5xx or a lost connection."""
        try:
            completion = within(ANSWER_SECONDS, lambda: self.client.chat.completions.create(
                model=self.model, messages=messages, **options))
            content = completion.choices[0].message.content
            return content if isinstance(content, str) else ""  # some servers send a list
        except (BadRequestError, UnprocessableEntityError):
            raise
        except APIStatusError as error:
            if error.status_code in FATAL_STATUSES or error.code == FATAL_CODE:
                raise UserError(f"{self._address}: status {error.status_code} for model"
                                f" {self.model[:40]!r} ({_reason(error)}); check OPENAI_API_KEY,"
                                " --model and --base-url") from None
            raise UnusableReplyError(f"status {error.status_code}: {_reason(error)}") from None
        except (APITimeoutError, TimeoutError):
            raise UnusableReplyError("the judge did not answer in time") from None
        except APIConnectionError as error:
            raise self._unreachable(error) from None
        except NO_COMPLETION:
            return ""  # not a completion, which the client does not check

    def _unreachable(self, error: APIConnectionError | TimeoutError) -> UserError:
        reason = _without_key(str(error.__cause__ or error) or "no answer", self.client.api_key)
        return UserError(f"{self._address}: cannot be reached ({reason[:60]}); check --base-url and"
                         " the network, then run the same command again")


def _cut(response: Any) -> None:
    """Read at most `MAX_REPLY_BYTES` of a reply, as sent: what is cut or packed is no JSON."""
    body = bytearray()
    for piece in response.stream:
        body += piece
        if len(body) > MAX_REPLY_BYTES:
            break
    response.stream.close()
    response.headers.pop("Content-Encoding", None)
    # The client's version decides whether this is a class of httpx or of httpx2.
    cut = bytes(body[:MAX_REPLY_BYTES])
    response.stream = type(response)(response.status_code, content=cut).stream


def _reason(error: APIStatusError) -> str:
    """Return the server's error message without the client's prefix."""
    body, moved_to = error.body, error.response.headers.get("Location")
    message = str((body.get("message") if isinstance(body, dict) else None) or error.message)
    message = f"it redirects to {moved_to}" if moved_to else message
    key = error.request.headers.get("Authorization", "").removeprefix("Bearer ")
    return " ".join(_without_key(message, key).split())[:60]  # some servers repeat it


def _without_key(message: str, key: str) -> str:
    return message if key in ("", "none") else message.replace(key, "***")


def _without_user(text: str) -> str:
    """Return an address, or what was meant to be one, without a name and a password in it."""
    return re.sub(r"^(\w*://)?.*@", r"\1", text, flags=re.DOTALL)
