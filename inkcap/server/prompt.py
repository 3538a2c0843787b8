"""From the prompt fields of a body to token ids."""

from typing import Any

from inkcap.chat.effort import choose_effort
from inkcap.chat.render import Rendered, RenderOptions, render
from inkcap.server.schema import ChatBody, TokenizeBody
from inkcap.server.service import Service


async def chat_prompt(service: Service, body: ChatBody | TokenizeBody, size: int) -> Rendered:
    """The rendered conversation. `size` is the body's, in bytes: large ones are rendered in a thread."""
    settings = service.config.server
    messages: list[dict[str, Any]] = body.messages or []
    effort = choose_effort(messages, settings.default_effort, body.reasoning_effort, body.chat_template_kwargs)
    options = RenderOptions(
        tools_position=settings.tool_declare_position,
        prime_model_role=settings.prime_model_role and body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    return await service.off_loop(size, lambda: render(service.tokenizer, messages, body.tools, effort, options))


async def text_prompts(service: Service, prompt: str | list[Any]) -> list[list[int]]:
    """Ids of each prompt of a completion request: a string, ids, or a list of either."""
    several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    return [one if isinstance(one, list) else await encoded(service, one, "prompt") for one in several]


async def encoded(service: Service, text: str, param: str) -> list[int]:
    """Ids of `text`; a long one is encoded in a thread."""
    return await service.off_loop(len(text), lambda: service.tokenizer.encode_text(text, param))
