"""Messages in the words of the Python face: the rooms below speak of flags."""

import contextlib
import re
from collections.abc import Iterator

from fastjax.errors import FastjaxError

# In this order: the first that fits a place wins.
_WORDS = (
    (r"Go on with the same command and --resume auto", "Go on with trainer.train(resume_from_checkpoint=True)"),
    (r"or replace it with --overwrite_output_dir", "or remove it"),
    (r"\bgo on with its run with --resume auto", "go on with its run by trainer.train(resume_from_checkpoint=True)"),
    (r"\bdelete it with --overwrite_output_dir", "delete it with SFTConfig(overwrite_output_dir=True)"),
    (r"--resume auto", "trainer.train(resume_from_checkpoint=True)"),
    (r"--overwrite_output_dir", "SFTConfig(overwrite_output_dir=True)"),
    (r"--resume_override (\S+)", r"SFTConfig(resume_override=[...]) of \1"),
    (r"resume='auto'", "resume_from_checkpoint=True"),
    (r"resume=('[^']*')", r"resume_from_checkpoint=\1"),
    (r"start anew without resume\b", "start anew with SFTConfig(overwrite_output_dir=True)"),
    (r"OUTPUT_DIR/checkpoints/STEP, or auto", "OUTPUT_DIR/checkpoints/STEP, or True"),
    (r"\beval_data\b", "eval_dataset"),
    (r"--([a-z_]+)", r"\1"),
)


@contextlib.contextmanager
def in_python_words() -> Iterator[None]:
    """Errors that pass through speak of arguments instead of flags."""
    try:
        yield
    except FastjaxError as error:
        error.args = (translate_message(str(error)), *error.args[1:])
        raise


def translate_message(text: str) -> str:
    """The message with every flag in the words of SFTConfig and SFTTrainer."""
    for pattern, words in _WORDS:
        text = re.sub(pattern, words, text)
    return text
