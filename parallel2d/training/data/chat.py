"""`ChatTemplate` renders the conversations of ``data=chat`` to text, and marks the targets in this
text.

The chat template of the tokenizer renders a row. Only the assistant's text is a target. This text
is the content of the template's ``{% generation %}`` blocks. If the template has no such blocks,
the conversation is rendered up to and including each assistant turn, and compared with the
rendering before this turn. The template runs in the sandbox of ``transformers``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel2d.base.config import DataConfig
from parallel2d.base.errors import ConfigError
from parallel2d.base.files import printable, read_json
from parallel2d.training.data.tables import library

_LARGEST = 16 << 20  # bytes of a template, and of the file with its special tokens
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REMEDY = "give data.chat_template a template with {% generation %} around the assistant's text"

Parts = list[tuple[str, bool]]


class ChatTemplate:
    """The template in ``data.chat_template``, or by default in the folder of ``data.tokenizer``.

    Raises `ConfigError` for a missing or unreadable template.
    """

    def __init__(self, config: DataConfig) -> None:
        where = f"data=chat data.tokenizer={config.tokenizer}"
        self._library: Any = library("transformers", "hf", where)
        self._compiler: Any = library("transformers.utils.chat_template_utils", "hf", where)
        settings: dict[str, Any] = {}
        source: str | None
        folder = Path(config.tokenizer).expanduser()
        folder = folder if folder.is_dir() else folder.parent
        try:
            if config.tokenizer != "bytes" and (folder / "tokenizer_config.json").is_file():
                settings = read_json(str(folder / "tokenizer_config.json"), _LARGEST)
            if config.chat_template is not None:
                source = _text_of(Path(config.chat_template).expanduser())
            elif config.tokenizer != "bytes" and (folder / "chat_template.jinja").is_file():
                source = _text_of(folder / "chat_template.jinja")
            else:
                source = _default_template(settings.get("chat_template"))
        except (OSError, ValueError) as error:
            reason = printable(getattr(error, "strerror", None) or error, 300)
            raise ConfigError(f"{where}: the chat template cannot be read: {reason}") from None
        if source is None:
            raise ConfigError(
                f"{where} has no chat template: name the folder of a model whose tokenizer has one "
                "(chat_template.jinja), or give data.chat_template=FILE"
            )
        self._source = source
        self._variables = {**_special_tokens(settings), **config.chat_arguments}
        self._has_marks = bool(_MARKS.search(source))
        identity = json.dumps([source, self._variables], sort_keys=True, default=str)
        # Digest of the template and its variables, which determine the text and the targets of a
        # row
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()

    def parts(self, row: Any) -> Parts:
        """Return the text of a row in parts, each with a flag: True for text of the assistant.

        Raises ValueError with the reason if the row is not a conversation, if the template refuses
        it, or if the assistant's text cannot be identified.
        """
        messages, tools = _conversation(row)
        whole, spans = self._render(messages, tools)
        if not self._has_marks:
            spans = self._spans_by_prefix(messages, tools, whole)
        parts: Parts = []
        at = 0
        for start, end in spans:
            parts += [(whole[at:start], False), (whole[start:end], True)]
            at = end
        parts = [part for part in [*parts, (whole[at:], False)] if part[0]]
        if not any(is_target for _, is_target in parts):
            raise ValueError("the conversation has no text of the assistant")
        return parts

    def _spans_by_prefix(
        self, messages: Sequence[Any], tools: Any, whole: str
    ) -> list[tuple[int, int]]:
        """Return the begin and end of each assistant turn in ``whole``. A turn begins where the
        rendering of the earlier messages with a generation prompt ends. The turn ends where the
        rendering that includes this turn ends."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, _ = self._render(messages[:number], tools, prompts=True)
            through, _ = self._render(messages[: number + 1], tools)
            if not through.startswith(before) or not whole.startswith(through):
                raise ValueError(
                    "the chat template renders the conversation before and through message "
                    f"{number + 1} differently from its beginning, so that the assistant's text "
                    f"cannot be told apart: {_REMEDY}"
                )
            spans.append((len(before), len(through)))
        return spans

    def _render(
        self, messages: Sequence[Any], tools: Any, prompts: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and the spans of the template's ``{% generation %}`` blocks."""
        try:
            texts, spans = self._compiler.render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=self._source,
                return_assistant_tokens_mask=self._has_marks,
                add_generation_prompt=prompts,
                **self._variables,
            )
        # A template may raise errors of Jinja, and any error of an operation on the row.
        except Exception as error:
            raise ValueError(
                f"the chat template refuses the row: {printable(error, 200)}"
            ) from None
        return texts[0], spans[0] if spans else []


def _conversation(row: Any) -> tuple[list[dict[str, Any]], Any]:
    """Return the messages and the tools of a row. Raises ValueError if the row is not a chat."""
    messages = row.get("messages") if isinstance(row, Mapping) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError('no field messages with a list of {"role": ..., "content": ...}')
    plain = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError('messages must be a list of {"role": ..., "content": ...}')
        # As in transformers, keys with the value None are removed, because many templates would
        # render "None".
        plain.append({key: value for key, value in message.items() if value is not None})
    tools = row.get("tools")
    # Columns of a table have a single type, so tools are often stored as JSON text
    if isinstance(tools, str):
        tools = json.loads(tools)
    if not isinstance(tools, list | None):
        raise ValueError("tools must be a list of function descriptions")
    return plain, tools or None


def without_nulls(value: Any) -> Any:
    """Return a row of a table without null values, which a table has for keys of other rows."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return list(map(without_nulls, value))
    return value


def _text_of(file: Path) -> str:
    with open(file, encoding="utf-8") as opened:
        text = opened.read(_LARGEST + 1)
    if len(text) > _LARGEST:
        raise ValueError(f"{file.name} has more than {_LARGEST >> 20} MiB")
    return text


def _default_template(given: Any) -> str | None:
    """Return the template in a ``tokenizer_config.json``: the text, or the template named
    ``default`` in a list."""
    if isinstance(given, list):
        named = {}
        for entry in given:
            if "template" in entry:
                named[entry["name"]] = entry["template"]
        given = named.get("default")
    return given if isinstance(given, str) else None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a template may use as variables, such as ``bos_token``."""
    tokens = {}
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
    return tokens
