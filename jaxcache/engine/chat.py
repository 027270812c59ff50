"""Chat templates: messages to the prompt that a model was trained on.

The templates come with models, so they are strangers' programs: they run in jinja's sandbox and may change
nothing. The functions they find are those that transformers gives them.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def apply_chat_template(
    template: str | None,
    messages: Any,
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """The prompt for `messages`, a list of mappings (each has a `role`, most a `content`), by the Jinja source
    `template`.

    `add_generation_prompt`: end with the beginning of an answer. `variables` are passed to the template, for
    what only some models know (`enable_thinking=False`). The result has every special token in it: encode it
    with `add_special_tokens=False`.

    A `ValueError` for messages or a template that do not work, with the template's own words where it has some.
    """
    if template is None:
        raise ValueError("this model has no chat template: give a prompt instead of messages, or a template")
    _check(messages)
    try:
        return _compiled(template).render(
            messages=messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            bos_token=bos_token,
            eos_token=eos_token,
            **variables,
        )
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is no valid Jinja, line {error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise ValueError(f"the chat template does not accept these messages: {error}") from error


def _check(messages: Any) -> None:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(
            'messages must be a list such as [{"role": "user", "content": "Hello"}], with at least one message, '
            f"got {messages!r}"
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{i}] must be a mapping with a 'role' (a string), got {message!r}")
        content = message.get("content")
        if not (content is None or isinstance(content, str | list | tuple)):
            raise ValueError(f"messages[{i}]['content'] must be a string or a list of parts, got {content!r}")


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks an answer for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Takes what transformers' filter takes, in its order; jinja's own would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
