"""Conversations: the text and the targets equal those of the tokenizer's chat template; losses are
equal on every layout; rows without exact targets are refused by name.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
from test_examples import EXAMPLES, example

from parallel2d.base.config import DataConfig
from parallel2d.base.errors import ConfigError
from parallel2d.training.data import opening
from parallel2d.training.data.token_shards import TokenStore

pytestmark = pytest.mark.extras("transformers")
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"default": None}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}


def says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


WITH_TOOLS = [
    says("system", "Use tools."),
    says("user", "1 + 2? ☃"),
    says("assistant", None, tool_calls=[CALL]),
    says("tool", "3"),
    says("assistant", "3 é☃"),
    says("user", "And <|im_start|> once more?"),
    says("assistant", "It is 𝄞."),
    says("user", "Thanks"),
]
ROWS = [
    {"messages": WITH_TOOLS, "tools": TOOLS},
    {"messages": [says("user", "Hello"), says("assistant", "Good day."), says("assistant", "?")]},
]
# Without marks; its renderings of the beginnings of a conversation are beginnings of the whole
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    example("chat").build_small_model(path)
    return path


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def stored(model: str, path: Path, **options: Any) -> list[tuple[list[int], list[int]]]:
    """The ids and the mask of each conversation, as they are prepared."""
    given = {"validation_fraction": 0.0, "workers": 1, "tokenizer": model, **options}
    config = DataConfig(name="chat", path=str(path), cache_dir=str(path.parent / "cache"), **given)
    split = opening._open_store(config).splits["train"]
    return split_documents(split)


def split_documents(split: Any) -> list[tuple[list[int], list[int]]]:
    found = []
    for number in range(split.documents):
        begin, end = split.document_span(number)
        mask = split.may_be_target(begin, end - begin).astype(np.int64)
        found.append((split.ids(begin, end - begin).tolist(), mask.tolist()))
    return found


def expected(model: str, rows: list[Any]) -> list[tuple[list[int], list[int]]]:
    from transformers import AutoTokenizer

    tokenizer, found = AutoTokenizer.from_pretrained(model), []
    for row in rows:
        rendered = tokenizer.apply_chat_template(
            row["messages"],
            tools=row.get("tools"),
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        found.append((rendered["input_ids"], rendered["assistant_masks"]))
    return found


def targets_of(model: str, documents: list[Any]) -> list[str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = []
    for ids, mask in documents:
        texts.append(
            tokenizer.decode([token for token, target in zip(ids, mask, strict=True) if target])
        )
    return texts


@pytest.mark.parametrize("form", ["rows", "table", "folder"])
def test_chat_ids_and_targets_equal_apply_chat_template(tmp_path, model, form):
    path = write(tmp_path / "chat.jsonl", ROWS)
    if form == "folder":
        from parallel2d.data import main

        words = ["--from", "chat", "--tokenizer", model, "--validation-fraction", "0"]
        assert main(["prepare", str(path), "--output", str(tmp_path / "out"), *words]) == 0
        found = split_documents(TokenStore(tmp_path / "out").splits["train"])
    else:
        if form == "table":
            pyarrow = pytest.importorskip("pyarrow")
            from pyarrow import parquet

            path.unlink()
            path = tmp_path / "chat.parquet"
            rows = [{**row, "tools": json.dumps(row.get("tools"))} for row in ROWS]
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        found = stored(model, path)
    assert found == expected(model, ROWS)
    call = '<call>{"name": "add", "arguments": {"a": 1, "b": 2}}</call><|im_end|>'
    assert targets_of(model, found) == [
        f"{call}3 é☃<|im_end|>It is 𝄞.<|im_end|>",
        "Good day.<|im_end|>?<|im_end|>",
    ]


def test_template_without_generation_blocks_gives_targets_from_renderings(tmp_path, model):
    template = tmp_path / "plain.jinja"
    template.write_text(PLAIN)
    found = stored(model, write(tmp_path / "chat.jsonl", ROWS[1:]), chat_template=str(template))
    assert targets_of(model, found) == ["Good day.<|im_end|>\n?<|im_end|>\n"]


LAST = "{% for m in messages %}{{ m.role }}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        (ROWS[1], LAST, "chat.jsonl:1: .* message 2 differently from its beginning.*generation %}"),
        ({"messages": [says("user", "Hi")]}, None, "chat.jsonl:1: .* no text of the assistant"),
        ({"text": "Hi"}, None, "no field messages with a list of"),
        ({"messages": ["Hi"]}, None, 'must be a list of {"role": ...'),
        (ROWS[1], "{{ raise_exception('roles must alternate') }}", "refuses.*roles must alternate"),
        (ROWS[1], "{% if %}", "the chat template refuses the row"),
        (ROWS[1], "nowhere", "cannot be read: No such file"),
    ],
)
def test_rows_without_exact_targets_are_refused(tmp_path, model, row, template, message):
    options = {}
    if template is not None:
        options["chat_template"] = str(tmp_path / template)
        if template != "nowhere":
            options["chat_template"] = str(tmp_path / "own.jinja")
            (tmp_path / "own.jinja").write_text(template)
    with pytest.raises(ConfigError) as error:
        stored(model, write(tmp_path / "chat.jsonl", [row]), **options)
    assert re.search(message, str(error.value))


def test_missing_templates_and_other_files_are_refused(tmp_path):
    path = write(tmp_path / "chat.jsonl", ROWS)
    with pytest.raises(ConfigError, match="data.tokenizer=bytes has no chat template: name"):
        stored("bytes", path)
    (tmp_path / "chat.txt").write_text("Hi")
    with pytest.raises(ConfigError, match=r"reads .jsonl and .parquet, and chat.txt is neither"):
        stored("bytes", tmp_path / "chat.txt")


def test_changed_chat_template_prepares_a_new_cache_folder(tmp_path, model):
    path, template = write(tmp_path / "chat.jsonl", ROWS[1:]), tmp_path / "plain.jinja"
    template.write_text(PLAIN)
    first = stored(model, path)
    assert stored(model, path, chat_template=str(template)) != first
    assert stored(model, path, chat_arguments={"bos_token": "x"}) == first
    assert len([each for each in (tmp_path / "cache").iterdir() if each.is_dir()]) == 3


@pytest.mark.parametrize("strategy", ["hybrid", "zero3", "ddp", "hybrid_full"])
def test_chat_losses_equal_one_process_on_layouts_and_after_resume(ranks, folder, model, strategy):
    rows = example("chat").conversations()
    write(folder / "chat.jsonl", rows)
    words = ["model=hf", f"model.path={model}", "data=chat", "data.path=chat.jsonl"]
    words += [f"data.tokenizer={model}", "train.seq_len=48", "optimizer.lr=1e-2"]
    ranks.run(1, jobs.run, str(folder), str(folder / "alone"), [*words, "strategy=ddp"], 6)
    alone = jobs.rows(folder / "alone")
    given = [*words, f"strategy={strategy}"]
    ranks.run(4, jobs.run, str(folder), str(folder / "run"), given, 4)
    ranks.run(2, jobs.run, str(folder), str(folder / "run"), [*words, "strategy=hybrid"], 2)
    for row, other in zip(jobs.rows(folder / "run"), alone, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-10, abs=0)
        assert row["data/batch_hash"] == other["data/batch_hash"]
    # Only the assistant's tokens count: two answers of few tokens, with the ends of their turns
    mean = alone[0]["tokens"] / 16
    assert 4 <= mean <= 10


def test_example_trains_on_conversations_and_exports_the_adapter(tmp_path):
    command = [sys.executable, str(EXAMPLES / "chat.py"), "--save", str(tmp_path / "adapter")]
    words = ["launch.nproc_per_node=2", "metrics.console=plain"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "What is 3 + 4?" in done.stdout
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
