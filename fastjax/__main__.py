"""`fastjax train|generate|evaluate|export|plan`: the commands under one name."""

import importlib
import sys
from collections.abc import Sequence

import fastjax
from fastjax.settings import nearest

COMMANDS = {
    "train": ("fastjax.train.__main__", "fine-tune a model: LoRA adapters or every weight"),
    "generate": ("fastjax.generate", "answer prompts with a model and its adapter"),
    "evaluate": ("fastjax.evaluate", "the loss of a model on a file of rows"),
    "export": ("fastjax.export", "merge an adapter into a Hugging Face folder"),
    "plan": ("fastjax.plan", "does a run fit a GPU, and how fast will it be"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first word names; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print("usage: fastjax COMMAND --flag VALUE ...\n")
        for name, (_, text) in COMMANDS.items():
            print(f"  {name:10}{text}")
        print("\nfastjax COMMAND --help tells the flags of a command.")
        return 0 if words else 2
    if words[0] == "--version":
        print(f"fastjax {fastjax.__version__}")
        return 0
    if words[0] not in COMMANDS:
        print(f"error: unknown command {words[0]!r}{nearest(words[0], COMMANDS)}", file=sys.stderr)
        print(f"Commands: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return importlib.import_module(COMMANDS[words[0]][0]).main(words[1:])


if __name__ == "__main__":
    sys.exit(main())
