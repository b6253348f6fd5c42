"""Fine-tune a ``transformers`` model on conversations with a LoRA adapter, and save the adapter in
the format of ``peft``.

pip install 'parallel2d[data,peft]'
python examples/chat.py --model FOLDER --data chat.jsonl --save ADAPTER

Without --model the example creates a small Llama with random weights, its tokenizer with a chat
template, and conversations. Further arguments are overrides of the training, such as
``strategy=zero3 train.epochs=3``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

# Marks the text of the assistant, which the loss covers: its words and the end of its turn
TEMPLATE = """\
{%- if tools %}<|im_start|>tools
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}
{%- generation %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor -%}
<|im_end|>{% endgeneration %}
{%- else %}{{ message.content }}<|im_end|>{% endif %}
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def conversations() -> list[dict[str, object]]:
    """Return questions and answers: sums, with a correction in a second turn."""
    rows = []
    for first in range(10):
        for second in range(10):
            turns = [
                ("user", f"What is {first} + {second}?"),
                ("assistant", f"{first + second}"),
                ("user", "And one more?"),
                ("assistant", f"{first + second + 1}"),
            ]
            messages = [{"role": role, "content": content} for role, content in turns]
            rows.append({"messages": messages})
    return rows


def build_small_model(folder: str) -> None:
    """Write a small Llama with random weights, and its tokenizer with `TEMPLATE`."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
    from tokenizers.decoders import ByteLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [json.dumps(row) for row in conversations()]
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<|im_start|>", "<|im_end|>"]
    )
    words.train_from_iterator(texts, trainer)
    words.add_tokens([AddedToken("<call>"), AddedToken("</call>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    set_seed(0)
    config = LlamaConfig(
        vocab_size=328,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=words.token_to_id("<|im_end|>"),
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def run(*words: str) -> None:
    """Run a command of this Python."""
    subprocess.run([sys.executable, "-m", *words], check=True)


def answer(model: str, adapter: str, question: str) -> str:
    """Return the model's answer with the adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter)
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = tuned.generate(**prompt, max_new_tokens=8, do_sample=False)
    return tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="folder with a model and a tokenizer with chat template")
    parser.add_argument("--data", help=".jsonl or .parquet with rows {messages: [...]}")
    parser.add_argument("--save", default="adapter", help="new folder for the adapter")
    given, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        model, data = given.model or os.path.join(folder, "model"), given.data
        if given.model is None:
            build_small_model(model)
        if data is None:
            data = os.path.join(folder, "chat.jsonl")
            with open(data, "w") as file:
                file.writelines(json.dumps(row) + "\n" for row in conversations())
        settings = "{r: 8, lora_alpha: 16, use_rslora: true, target_modules: all-linear}"
        run_dir = os.path.join(folder, "run")
        run(
            "parallel2d.train",
            *("model=hf", f"model.path={model}", f"model.adapter={settings}"),
            *("data=chat", f"data.path={data}", f"data.tokenizer={model}"),
            *("train.seq_len=64", "train.epochs=2", "optimizer.lr=0.01"),
            *(f"hydra.run.dir={run_dir}", *overrides),
        )
        run("parallel2d.checkpoint", "convert", run_dir, given.save, "--to", "peft")
        question = "What is 3 + 4?"
        print(f"{question} {answer(model, given.save, question)}")


if __name__ == "__main__":
    main()
