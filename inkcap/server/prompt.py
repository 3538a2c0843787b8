"""From the prompt fields of a body to token ids."""

from typing import Any

from inkcap.base.errors import ContextTooLong
from inkcap.chat.effort import choose_effort
from inkcap.chat.render import Rendered, RenderOptions, render
from inkcap.server.schema import ChatBody, TokenizeBody
from inkcap.server.service import Service


async def chat_prompt(service: Service, body: ChatBody | TokenizeBody, size: int) -> Rendered:
    """The rendered conversation. `size` is the body's, in bytes: large ones are rendered in a thread."""
    settings = service.config.server
    messages: list[dict[str, Any]] = body.messages or []
    effort = choose_effort(messages, settings.default_effort, body.reasoning_effort, body.chat_template_kwargs)
    if isinstance(body, TokenizeBody) or body.truncate_prompt_tokens is None:
        refuse_hopeless(service, characters(messages))
    options = RenderOptions(
        tools_position=settings.tool_declare_position,
        prime_model_role=settings.prime_model_role and body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    salt = (body.cache_salt or "") if isinstance(body, ChatBody) else ""
    replays = None if body.continue_final_message else service.replays
    return await service.off_loop(
        size, lambda: render(service.tokenizer, messages, body.tools, effort, options, replays, salt)
    )


async def text_prompts(service: Service, prompt: str | list[Any], truncated: bool) -> list[list[int]]:
    """Ids of each prompt of a completion request: a string, ids, or a list of either."""
    for one in prompt if isinstance(prompt, list) else [prompt]:
        if isinstance(one, str) and not truncated:
            refuse_hopeless(service, len(one))
    several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    return [one if isinstance(one, list) else await encoded(service, one, "prompt") for one in several]


def characters(messages: list[dict[str, Any]]) -> int:
    """Of the text in `messages`, at least: what has another shape counts nothing here and is judged when rendered."""
    contents = [message.get("content") for message in messages]
    parts = [
        part.get("text")
        for content in contents
        if isinstance(content, list)
        for part in content
        if isinstance(part, dict)
    ]
    return sum(len(text) for text in (*contents, *parts) if isinstance(text, str))


def refuse_hopeless(service: Service, size: int) -> None:
    """Raise ContextTooLong for text of `size` characters that cannot fit, before minutes are spent on its tokens."""
    info = service.engine.info
    least = size // service.longest_token
    if info is not None and least >= info.max_length:
        raise ContextTooLong(
            f"prompt has {size:,} characters, so at least {least:,} tokens; this engine accepts {info.max_length:,} "
            "(model.max_length). Shorten it or raise the limit.",
            "prompt",
        )


async def encoded(service: Service, text: str, param: str) -> list[int]:
    """Ids of `text`; a long one is encoded in a thread."""
    return await service.off_loop(len(text), lambda: service.tokenizer.encode_text(text, param))
