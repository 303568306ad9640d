"""The prompts that come with an audit: a few of different kinds."""

from __future__ import annotations

from foredraft.reports.prompts import Question

BUILT_IN = (
    Question("explanation", "Explain to a child why the moon changes its shape over a month."),
    Question("code", "Write a Python class Stack with push, pop, peek and __len__, then a test for each method."),
    Question(
        "editing",
        "Repeat this list with every price doubled and nothing else changed:\n"
        "apples: 2 dollars\npears: 3 dollars\nplums: 5 dollars\ncherries: 8 dollars\nfigs: 6 dollars",
    ),
    Question(
        "mathematics", "A train leaves at 9:40 and travels 210 km at 84 km/h. When does it arrive? Show the steps."
    ),
    Question("data", 'Write ten JSON objects, one a line, with the fields "id", "name" and "city".'),
    Question("translation", "Translate into German, then into French: The library opens at ten and closes at six."),
    Question(
        "summary",
        "Summarise in one sentence: The harbour was built in 1850 for wooden ships. When iron ships came they were too "
        "deep for it, so the town dug a second basin. Today the old harbour holds boats, and the new one holds cranes.",
    ),
    Question(
        "story", "Write the beginning of a story about a lighthouse keeper who receives a letter without a stamp."
    ),
)
