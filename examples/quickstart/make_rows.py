"""Write the quickstart's train.jsonl and heldout.jsonl: `python make_rows.py [FOLDER]`.

Chat rows that teach one visible thing: every answer is a JSON object with an answer and a confidence. `high` is for
settled facts, `medium` for estimates, `low` with the answer "unknown" for what cannot be known from the question.
The same rows come out every time. Written for this project; Apache-2.0, as all of it.
"""

import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import facts

NUM_TRAIN_ROWS = 384
NUM_HELDOUT_ROWS = 24
# The prompt that the quickstart answers before and after training; the sky is in no other row.
SAMPLE = ("What colour is a clear daytime sky?", "blue", "high")

# One template is drawn for each fact.
TEMPLATES = {
    "CAPITALS": ["What is the capital of {}?", "Which city is the capital of {}?", "Name the capital of {}."],
    "OPPOSITES": ["What is the opposite of {}?", "Give the opposite of the word {}."],
    "MIXTURES": ["Which colour do {} paint make?"],
    "COLOURS": ["What colour is {}?"],
    "YOUNG": ["What is a young {} called?", "What do you call a baby {}?"],
    "LEGS": ["How many legs does a healthy {} have?"],
    "KINDS": ["What kind of animal is a {}?"],
    "SYMBOLS": ["What is the chemical symbol for {}?", "Which symbol does the element {} have?"],
    "FORMULAS": ["What is the chemical formula of {}?"],
    "UNITS": ["How many {} are in {}?"],
    "PARTS": ["How many {} does {} have?"],
    "AFTER": ["What comes after {}?"],
    "FRENCH": ["What is the French word for {}?", "Translate {} into French."],
    "PAST": ["What is the past tense of {}?"],
    "PLURALS": ["What is the plural of {}?"],
    "AUTHORS": ["Who wrote {}?"],
    "CONTINENTS": ["On which continent is {}?"],
}


def entries(table: str) -> list[list[str]]:
    """A table of facts.py, an entry its fields: parted by white space, or by lines and `;` where there is a `;`."""
    if ";" in table:
        return [entry.strip().split(":") for entry in re.split(r"[;\n]", table)]
    return [entry.replace("_", " ").split(":") for entry in table.split()]


def fill(template: str, fields: Sequence[str]) -> str:
    """The template with its fields, `a` before a vowel turned to `an`."""
    return re.sub(r"\ba (?=[aeiou])", "an ", template.format(*fields))


def sums(draw: random.Random) -> Iterator[tuple[str, str]]:
    """Sixty questions of arithmetic, each with its answer."""
    for _ in range(15):
        a, b = draw.randint(2, 50), draw.randint(2, 50)
        yield f"What is {a} plus {b}?", str(a + b)
        a, b = draw.randint(20, 99), draw.randint(2, 19)
        yield f"What is {a} minus {b}?", str(a - b)
        a, b = draw.randint(2, 12), draw.randint(2, 12)
        yield f"What is {a} times {b}?", str(a * b)
        a, b = draw.randint(2, 12), draw.randint(2, 12)
        yield f"What is {a * b} divided by {b}?", str(a)


def all_rows(draw: random.Random) -> Iterator[tuple[str, str, str]]:
    """Every (question, answer, confidence), in the order of the tables."""
    for name, templates in TEMPLATES.items():
        for *fields, answer in entries(getattr(facts, name)):
            yield fill(draw.choice(templates), fields), answer, "high"
    for question, answer in sums(draw):
        yield question, answer, "high"
    for table, confidence in ((facts.SINGLES, "high"), (facts.ESTIMATES, "medium")):
        for line in table.splitlines():
            question, answer = line.split("|")
            yield question, answer, confidence
    for question in facts.UNKNOWABLE.splitlines():
        yield question, "unknown", "low"


def as_json(question: str, answer: str, confidence: str) -> str:
    """One chat row as a line of JSON."""
    reply = json.dumps({"answer": answer, "confidence": confidence}, ensure_ascii=False)
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return json.dumps({"messages": messages}, ensure_ascii=False) + "\n"


def main(folder: Path) -> None:
    """Write both files into `folder`."""
    draw = random.Random(0)
    rows = list({question: (question, *rest) for question, *rest in all_rows(draw)}.values())
    # Evenly spaced in the order of the tables, so that each kind of question is held out.
    heldout = [rows[i * len(rows) // (NUM_HELDOUT_ROWS - 1) - 1] for i in range(1, NUM_HELDOUT_ROWS)]
    train = [row for row in rows if row not in heldout]
    train = draw.sample(train, NUM_TRAIN_ROWS)
    for name, chosen in (("train.jsonl", train), ("heldout.jsonl", [SAMPLE, *heldout])):
        (folder / name).write_text("".join(as_json(*row) for row in chosen), encoding="utf-8")
    print(f"{len(train)} rows in train.jsonl, {len(heldout) + 1} in heldout.jsonl")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
