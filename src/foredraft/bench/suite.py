"""The prompts of a benchmark: six kinds that come with it, or a file in Spec-Bench's format.

The built-in prompts were written for this project. All are distinct, because a proposer that remembers finished texts
profits from a prompt that it meets again, and they are short enough for a small model.
"""

from __future__ import annotations

from pathlib import Path

from foredraft.bench.code_samples import EDITS
from foredraft.bench.passages import TO_QUOTE, TO_REPEAT, TO_SUMMARISE
from foredraft.reports.prompts import Question, read_suite, spread

BUILT_IN_NAME = "builtin"

CHAT = (
    "My neighbour plays the trumpet every evening. How can I ask him politely to stop at nine?",
    "I have a free Saturday and no plans. Suggest a day outside that costs almost nothing.",
    "Write a short thank-you note to a colleague who covered my shift last week.",
    "What should I pack for a three-day walk in the mountains in September?",
    "Tell me a short story about a cat that is afraid of mice.",
    "I want to learn to cook. Which five dishes should I start with, and why?",
)

QUESTIONS = (
    "Why does ice float on water?",
    "What is the difference between weather and climate?",
    "How does a bicycle stay upright while it moves?",
    "What does the heart do, and what are its four chambers called?",
    "Why do leaves change their colour in autumn?",
    "How were books made before the printing press?",
)

MATHS = (
    "A shop sells pens in packs of 12 for 9 euros. How much do 60 pens cost? Show the steps.",
    "A tank holds 240 litres. It loses 5 litres an hour through a leak. After how many hours is it half empty? Show "
    "the steps.",
    "Anna is twice as old as Ben. Together they are 36. How old is each of them? Show the steps.",
    "A field is 45 metres long and 30 metres wide. How long is a fence around it, and what is the area of the field? "
    "Show the steps.",
    "A bus carries 48 people. How many buses are needed for 410 people? Show the steps.",
    "A jacket costs 80 euros. It is reduced by 25 percent, and then by another 10 percent. What is the price now? Show "
    "the steps.",
)


def built_in() -> list[Question]:
    """All prompts that come with the benchmark, kind by kind."""
    return [
        *(Question("chat", text) for text in CHAT),
        *(
            Question("code-editing", f"```{kind}\n{code}```\n\n{task} Print the whole code.")
            for task, kind, code in EDITS
        ),
        *(Question("summarisation", f"Summarise in two sentences:\n\n{text}") for text in TO_SUMMARISE),
        *(Question("question-answering", text) for text in QUESTIONS),
        *(Question("maths", text) for text in MATHS),
        *(Question("copy", f"Repeat this text exactly:\n\n{text}") for text in TO_REPEAT),
        *(Question("copy", f"{documents}\n\n{question}") for documents, question in TO_QUOTE),
    ]


def load_suite(name: str, limit: int | None = None) -> list[Question]:
    """The questions of `builtin` or of a file, one of each kind after the other; at most `limit`, evenly over the
    kinds."""
    questions = built_in() if name == BUILT_IN_NAME else read_suite(Path(name))
    return spread(questions, len(questions) if limit is None else limit)
