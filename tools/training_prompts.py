"""More prompts to train heads on, made out of those of a file: long summaries and questions over several passages,
short questions about its titles, sums with other numbers, and German sentences to translate.

A head learns how its model answers, and needs prompts of many kinds (docs/training.md). Nothing here is taken from
an evaluation, and `foredraft train text --exclude` leaves out whatever should still coincide with one.

    python tools/training_prompts.py prompts.jsonl --out more.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from foredraft.train.prompts import read_prompts

LONG = 2200  # prompts of each kind that quotes several passages: they take most of the time
QUESTIONS = (
    "What is {}?", "Who was {}?", "When did {} begin?", "Where does the name {} come from?", "what does {} mean",
    "who discovered {}", "Why is {} important?", "How does {} work?", "What are the main parts of {}?",
    "Tell me the history of {}.", "Explain {} to a child.", "Compare {} with something similar.",
    "Write a blog post about {}.", "Write a short story in which {} plays a role.", "List ten keywords about {}.",
    "What would happen without {}?", "Give arguments for and against {}.", "Describe {} in one paragraph.",
    "what is the largest {} in the world", "when was {} invented", "Write an email to a friend about {}.",
    "Pretend to be an expert on {} and introduce yourself.", "Draft a lesson plan on {}.",
)  # fmt: skip
SUBJECTS = (
    "Die Regierung", "Der Bürgermeister der Stadt", "Ein Sprecher der Polizei", "Die Forscher aus Berlin",
    "Viele Familien", "Das Unternehmen", "Der junge Arzt", "Meine Nachbarin", "Die Europäische Union", "Der Trainer",
    "Eine Gruppe von Studenten", "Das Gericht in München", "Die kleine Schule im Dorf", "Der amerikanische Präsident",
    "Die Zeitung", "Ein alter Fischer", "Die Mannschaft", "Das Parlament", "Der neue Bahnhof", "Die Bank",
)  # fmt: skip
PREDICATES = (
    "hat am Montag einen neuen Plan vorgestellt", "will in den nächsten Jahren mehr Geld ausgeben",
    "lehnt den Vorschlag der Opposition ab", "sucht seit Wochen nach einer Lösung",
    "wurde nach dem Unfall von allen gelobt", "kann die Kosten für das Projekt nicht mehr bezahlen",
    "braucht dringend Hilfe von außen", "spielte eine wichtige Rolle in der Geschichte des Landes",
    "hofft auf besseres Wetter am Wochenende", "berichtet über die Folgen des Klimawandels",
    "verkauft jedes Jahr tausende Bücher", "fürchtet den Verlust von Arbeitsplätzen", "feiert heute ein großes Fest",
    "steht vor einer schwierigen Entscheidung", "hat das Gesetz gegen den Willen der Mehrheit geändert",
    "plant eine Reise nach Italien", "zeigt, wie man mit wenig Wasser auskommt",
)  # fmt: skip
REASONS = (
    "weil die Preise stark gestiegen sind", "obwohl niemand damit gerechnet hatte", "wie gestern bekannt wurde",
    "nachdem die Verhandlungen gescheitert waren", "und die Bürger sind damit sehr zufrieden",
    "aber die Kritik daran wird immer lauter", "damit die Kinder sicher zur Schule gehen können",
    "während andere Länder noch warten", "sagte der Minister in einem Interview",
    "denn die Lage hat sich in den letzten Monaten verschlechtert", "ohne die Betroffenen zu fragen",
)  # fmt: skip


def passages(prompts: list[str]) -> list[str]:
    """The passages that prompts quote: numbered ones, and what follows an instruction."""
    found = [text.strip() for prompt in prompts for text in re.findall(r"Passage \d+: (.*?)(?=\n\n|$)", prompt, re.S)]
    found += [
        prompt.split("\n\n", 1)[1] for prompt in prompts if re.match(r"(Summarize the|Continue|Read the)", prompt)
    ]
    found += [prompt.removeprefix("Summarize: ") for prompt in prompts if prompt.startswith("Summarize: ")]
    return sorted({text for text in found if len(text) > 200})


def titles(prompts: list[str]) -> list[str]:
    patterns = (
        r"What is said about (.+?)\?",
        r"What is (.+?)\?$",
        r"Who or what is (.+?), and",
        r"facts about (.+?)\.$",
    )
    return sorted({match for prompt in prompts for pattern in patterns for match in re.findall(pattern, prompt)})


def composites(prompts: list[str], rng: random.Random) -> Iterator[str]:
    texts, names = passages(prompts), titles(prompts)
    for text in rng.sample(texts, min(LONG, len(texts))):
        others = rng.sample(texts, rng.choice((0, 1, 2, 4)))
        yield rng.choice(("Summarize: ", "Summarize: ", "Write a headline for this: ")) + " ".join([text, *others])
    for text in rng.sample(texts, min(LONG, len(texts))):
        whole = "\n".join(rng.sample([text, *rng.sample(texts, 3)], 4))
        words = [word for word in re.findall(r"[A-Z][a-z]{3,}", text) if word not in ("This", "They", "There", "These")]
        topic = rng.choice(words or ["this"])
        asked = rng.choice(("What do the texts say about {}?", "Describe {}.", "Who or what is {}?", "Why {}?"))
        yield f"{whole}\n{asked.format(topic)}"
    for name in names:
        for question in rng.sample(QUESTIONS, 3):
            yield question.format(name)
    for prompt in prompts:
        if (
            len(re.findall(r"\d+", prompt)) > 1
            and re.search(r"\b(How|What|Calculate|Find)\b", prompt)
            and len(prompt) < 600
        ):
            yield re.sub(r"\b\d{1,3}\b", lambda number: str(_other_number(int(number[0]), rng)), prompt)
    for _ in range(3500):
        yield f"Translate German to English: {german(rng)}"
    for text in rng.sample(texts, min(1000, len(texts))):
        language = rng.choice(("German", "French", "Spanish"))
        yield f"Translate English to {language}: {text.split('. ')[0]}."


def german(rng: random.Random) -> str:
    sentence = f"{rng.choice(SUBJECTS)} {rng.choice(PREDICATES)}"
    if rng.random() < 0.7:
        sentence += f" , {rng.choice(REASONS)}"
    if rng.random() < 0.3:
        sentence += f" . {rng.choice(SUBJECTS)} {rng.choice(PREDICATES)}"
    return sentence + " ."


def _other_number(number: int, rng: random.Random) -> int:
    return max(1, number + rng.randint(-number // 3, number // 2 + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, help='JSON lines with "prompt"')
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prompts = read_prompts([arguments.prompts])
    made = sorted(set(composites(prompts, random.Random(arguments.seed))) - set(prompts))
    with arguments.out.open("w", encoding="utf-8") as file:
        for prompt in made:
            file.write(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n")
    print(f"{len(made):,} prompts in {arguments.out}")


if __name__ == "__main__":
    main()
