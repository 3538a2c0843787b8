"""Responses that are kept in this process for later requests, oldest forgotten first. They do not survive it."""

import asyncio
from collections import OrderedDict
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from inkcap.base.errors import BadRequest
from inkcap.server.conversation import Message
from inkcap.server.errors import shorten
from inkcap.server.responses_items import Item


class NoSuchResponse(BadRequest):
    """No response of this id is kept."""

    status = 404


class Kept(Protocol):
    """A response, finished or not."""

    @property
    def identity(self) -> str: ...

    @property
    def running(self) -> bool: ...

    @property
    def size_bytes(self) -> int:
        """Memory that it takes, about."""
        ...

    @property
    def output(self) -> list[Item]:
        """Its items so far."""
        ...

    def reply(self) -> Struct:
        """What a client sees of it now."""
        ...

    def conversation(self) -> list[Message]:
        """The messages that a following request continues."""
        ...

    def cancel(self) -> None:
        """End it, if it runs."""
        ...


class ResponseStore:
    """`limit` responses at most, and `limit_bytes` at most, but always the newest one."""

    def __init__(self, limit: int, limit_bytes: int) -> None:
        self.limit = limit
        self.limit_bytes = limit_bytes
        self.entries: OrderedDict[str, Kept] = OrderedDict()
        self.background: set[asyncio.Task[None]] = set()

    def keep(self, response: Kept) -> None:
        if self.limit == 0:
            return
        self.entries[response.identity] = response
        size = sum(entry.size_bytes for entry in self.entries.values())
        for name in list(self.entries)[:-1]:
            if len(self.entries) <= self.limit and size <= self.limit_bytes:
                break
            if not self.entries[name].running:
                size -= self.entries.pop(name).size_bytes

    def get(self, identity: str, param: str = "response_id") -> Kept:
        """A kept response. Raises NoSuchResponse."""
        try:
            return self.entries[identity]
        except KeyError:
            raise NoSuchResponse(
                f"no response {shorten(identity)} is kept here; this server keeps the newest {self.limit:,} "
                "(server.stored_responses) until it ends",
                param,
            ) from None

    def earlier(self, identity: str | None) -> list[Message]:
        """The messages of `previous_response_id`, and all before them. Raises NoSuchResponse, BadRequest."""
        if identity is None:
            return []
        previous = self.get(identity, "previous_response_id")
        if previous.running:
            raise BadRequest("previous_response_id names a response that still runs", "previous_response_id")
        return previous.conversation()

    def resolve(self, items: str | list[dict[str, Any]]) -> None:
        """Put kept items of answers where `items` only refer to them by id. Raises NoSuchResponse."""
        if isinstance(items, str):
            return
        for i, item in enumerate(items):
            if item.get("type") == "item_reference":
                items[i] = self._item(item.get("id"), f"input[{i}].id")

    def _item(self, identity: object, param: str) -> dict[str, Any]:
        # as `item_id` makes them: kind, name of the response, place
        name, _, place = str(identity).partition("_")[2].rpartition("_")
        response = self.entries.get(f"resp_{name}")
        if response is not None and place.isdecimal() and int(place) < len(response.output):
            item = response.output[int(place)]
            if item.id == identity:
                return msgspec.to_builtins(item)
        raise NoSuchResponse(f"no item {shorten(identity)} of a response is kept here", param)

    def forget(self, identity: str) -> None:
        """End a response if it runs, and drop it. Raises NoSuchResponse."""
        self.get(identity).cancel()
        del self.entries[identity]

    def end(self) -> None:
        """End what runs in the background."""
        for task in self.background:
            task.cancel()
