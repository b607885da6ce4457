"""Chat templates for base models and for tokenizers without one, by the names that people know them under.

Each writes the published prompt format of its family. BOS is written where the family starts with it, and nothing is
written for it by a tokenizer that has none.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fastjax.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BOS = "{{ bos_token if bos_token is defined and bos_token else '' }}"
_EOS = "eos_token"
_ALTERNATE = """\
{%- set first = 1 if messages and messages[0]['role'] == 'system' else 0 %}
{%- set system = messages[0]['content'] | trim if first else '' %}
{%- for message in messages[first:] %}
{%- if message['role'] != ('user' if loop.index0 is even else 'assistant') %}
{{- raise_exception('after an optional system message, roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- endfor %}
"""

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA_3 = f"""\
{_BOS}
{{%- for message in messages %}}
{{{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}}}
{{{{- message['content'] | trim + '<|eot_id|>' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}}}{{% endif %}}"""

LLAMA_2 = f"""\
{_ALTERNATE}
{{%- for message in messages[first:] %}}
{{%- if message['role'] == 'user' %}}
{_BOS.replace("{{", "{{-", 1)}
{{{{- '[INST] ' + ('<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' if loop.first and system else '') }}}}
{{{{- message['content'] | trim + ' [/INST]' }}}}
{{%- else %}}
{{{{- ' ' + message['content'] | trim + ' ' + {_EOS} }}}}
{{%- endif %}}
{{%- endfor %}}"""

# The system message stands before the first user message. Mistral's newer tokenizers put it before the last one; then
# every answer but the last would be learned without it.
MISTRAL = f"""\
{_ALTERNATE}
{_BOS.replace("{{", "{{-", 1)}
{{%- for message in messages[first:] %}}
{{%- if message['role'] == 'user' %}}
{{{{- '[INST] ' + (system + '\\n\\n' if loop.first and system else '') + message['content'] + '[/INST]' }}}}
{{%- else %}}
{{{{- ' ' + message['content'] | trim + {_EOS} }}}}
{{%- endif %}}
{{%- endfor %}}"""

ZEPHYR = f"""\
{{%- for message in messages %}}
{{{{- '<|' + message['role'] + '|>\\n' + message['content'] + {_EOS} + '\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|assistant|>\\n' }}}}{{% endif %}}"""

VICUNA = f"""\
{_ALTERNATE}
{_BOS.replace("{{", "{{-", 1)}
{{{{- (system or "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, \
detailed, and polite answers to the user's questions.") + ' ' }}}}
{{%- for message in messages[first:] %}}
{{%- if message['role'] == 'user' %}}
{{{{- 'USER: ' + message['content'] | trim + ' ' }}}}
{{%- else %}}
{{{{- 'ASSISTANT: ' + message['content'] | trim + {_EOS} }}}}
{{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- 'ASSISTANT:' }}}}{{% endif %}}"""

ALPACA = f"""\
{_ALTERNATE}
{_BOS.replace("{{", "{{-", 1)}
{{{{- (system or 'Below is an instruction that describes a task. Write a response that appropriately completes the \
request.') + '\\n\\n' }}}}
{{%- for message in messages[first:] %}}
{{%- if message['role'] == 'user' %}}
{{{{- '### Instruction:\\n' + message['content'] + '\\n\\n' }}}}
{{%- else %}}
{{{{- '### Response:\\n' + message['content'] + {_EOS} + ('' if loop.last else '\\n\\n') }}}}
{{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '### Response:\\n' }}}}{{% endif %}}"""

NAMED_TEMPLATES: Mapping[str, str] = {
    "chatml": CHATML,
    "llama-3": LLAMA_3,
    "llama-2": LLAMA_2,
    "mistral": MISTRAL,
    "zephyr": ZEPHYR,
    "vicuna": VICUNA,
    "alpaca": ALPACA,
}
# Tokens that close or open turns: split into pieces they are only text, and no answer would end by itself.
_TOKENS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama-3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}


def read_template(name: str) -> str:
    """The text of a named template, or of a file.

    Raises: UserError for what is neither, and for a file that is no text.
    """
    known = re.sub(r"^llama(?=\d)", "llama-", name.lower())
    if known in NAMED_TEMPLATES and not Path(name).is_file():
        return NAMED_TEMPLATES[known]
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else getattr(error, "strerror", None) or error
        raise UserError(
            f"chat_template={name!r}: {why}; give a file with a Jinja template, or one of {', '.join(NAMED_TEMPLATES)}"
        ) from None


def use_template(tokenizer: "PreTrainedTokenizerBase", name: str) -> str | None:
    """Gives the tokenizer a named template, or that of a file; returns what a person should be told of it, if anything.

    Raises: UserError as `read_template`, for a template that Jinja cannot read, and for one that needs an EOS token
      that the tokenizer does not have.
    """
    import jinja2

    text = read_template(name)
    try:
        _compile(text)
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        where = f" in line {line}" if line else ""
        raise UserError(f"chat_template={name!r} is no Jinja template{where}: {error}; mend the file") from None
    bundled = text in NAMED_TEMPLATES.values()
    if bundled and _EOS in text and not tokenizer.eos_token:
        raise UserError(
            f"chat_template={name!r} closes answers with the EOS token, and the tokenizer has none; set eos_token in "
            "its tokenizer_config.json, or use chatml"
        )
    tokenizer.chat_template = text
    needed = next((_TOKENS.get(known, ()) for known, own in NAMED_TEMPLATES.items() if own == text), ())
    missing = [token for token in needed if tokenizer.convert_tokens_to_ids(token) in (None, tokenizer.unk_token_id)]
    if missing:
        return (
            f"chat_template={name} writes {', '.join(missing)}, which this tokenizer has not as tokens: they are split "
            "into pieces, and generation does not stop at them; mistral, zephyr and alpaca close answers with the EOS "
            "token"
        )
    return None


def _compile(text: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    # Compiled, and rendered for no conversation at all.
    render_jinja_template(conversations=[], chat_template=text)
