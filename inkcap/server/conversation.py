"""Chat messages from the blocks and items of other APIs: what an assistant said in pieces becomes whole messages.

Messages come out in the one form the chat API uses, so that a conversation renders the same whichever way it came in.
"""

from typing import Any

import msgspec
from pydantic import ValidationError

from inkcap.base.errors import BadRequest
from inkcap.server.errors import shorten, summarize
from inkcap.server.schema import ChatBody

Message = dict[str, Any]


class Transcript:
    """Messages in order. Thinking, text and calls that follow each other become one message of the assistant.

    A message holds thinking, then text, then calls; a piece out of that order opens another message, which the renderer
    still takes as the same turn.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._thoughts: list[str] = []
        self._texts: list[str] = []
        self._calls: list[Message] = []

    def add(self, message: Message) -> None:
        """A message of another role, or one that is whole already."""
        self.close()
        self.messages.append(message)

    def think(self, text: str) -> None:
        if self._texts or self._calls:
            self.close()
        self._thoughts.append(text)

    def say(self, text: str) -> None:
        if self._calls:
            self.close()
        self._texts.append(text)

    def call(self, identity: str, name: str, arguments: str) -> None:
        function = {"name": name, "arguments": arguments}
        self._calls.append({"id": identity, "type": "function", "function": function})

    def answer(self, identity: str, content: str | list[Message], failed: bool = False) -> None:
        """The result of a call."""
        message: Message = {"role": "tool", "tool_call_id": identity, "content": content}
        self.add({**message, "is_error": True} if failed else message)

    def close(self) -> list[Message]:
        """Finish the assistant's message, if one is open. Gives all messages."""
        if self._thoughts or self._texts or self._calls:
            message: Message = {"role": "assistant", "content": "".join(self._texts) or None}
            if thought := "".join(self._thoughts):
                message["reasoning"] = thought
            if self._calls:
                message["tool_calls"] = self._calls
            self.messages.append(message)
            self._thoughts, self._texts, self._calls = [], [], []
        return self.messages


def fields(value: object, path: str) -> dict[str, Any]:
    """`value`, which must be an object."""
    if not isinstance(value, dict):
        raise BadRequest(f"{path} is {shorten(value)}; it must be an object", path)
    return value


def string(value: dict[str, Any], key: str, path: str) -> str:
    """A field that must be a string."""
    found = value.get(key)
    if not isinstance(found, str):
        raise BadRequest(f"{path}.{key} is {shorten(found)}; it must be a string", f"{path}.{key}")
    return found


def flag(value: dict[str, Any], key: str, path: str) -> bool:
    """A field that is true, false, null or absent; the last two are false."""
    found = value.get(key)
    if not isinstance(found, bool | None):
        raise BadRequest(f"{path}.{key} is {shorten(found)}; it must be true or false", f"{path}.{key}")
    return bool(found)


def written(value: object, path: str) -> str:
    """`value` as JSON. Raises BadRequest for half of a surrogate pair."""
    try:
        return msgspec.json.encode(value).decode()
    except (UnicodeEncodeError, RecursionError):
        raise BadRequest(f"{path} cannot be written as JSON: it is nested too deeply or is no text", path) from None


def chat_body(asked: dict[str, Any]) -> ChatBody:
    """A chat request of these fields. Raises BadRequest where the chat API's own body would not take them."""
    try:
        return ChatBody.model_validate(asked)
    except ValidationError as error:
        raise BadRequest(*summarize([dict(mistake) for mistake in error.errors()])) from None
