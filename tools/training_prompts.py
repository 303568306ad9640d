"""More prompts to train heads on, made out of those of a file: long summaries and questions over several passages,
short questions about its titles, sums with other numbers, German sentences to translate, functions to complete, and
requests for code in other languages or with tests.

A head learns how its model answers, and needs prompts of many kinds (docs/training.md). Nothing here is taken from
an evaluation, and `foredraft train text --exclude` leaves out whatever should still coincide with one.

    python tools/training_prompts.py prompts.jsonl --out more.jsonl
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
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

UNFINISHED = (  # ways to ask for the rest of a function
    "{code}\n",
    "Complete this function.\n\n```python\n{code}\n```",
    "Finish the following code:\n\n{code}",
    "Implement the body of `{name}`.\n\n```python\n{code}\n```",
    "```python\n{code}\n```\n\nContinue from here.",
    "Here is the beginning of a file. Write what is missing.\n\n```python\n{code}\n    ...\n```",
    "Please fill in {name} so that its example holds, and say in a sentence how it works:\n\n{code}\n    # your code",
    "I only have the signature and the docstring. What could the code look like?\n\n```python\n{code}\n    pass\n```",
)
ARGUMENTS = {  # names for the arguments of each type, in the order in which they are given; no name has two types
    "str": ("text", "other", "pattern", "letter"),
    "int": ("n", "k", "m", "limit", "start", "end"),
    "float": ("x", "y", "rate"),
    "bool": ("flag", "strict"),
    "list[int]": ("numbers", "others", "weights", "indices"),
    "list[str]": ("words", "names", "keys"),
    "list[list[int]]": ("matrix", "grid", "rows"),
    "list": ("values", "items", "elements"),
    "tuple": ("entries", "pair", "fields"),
    "dict": ("table", "mapping", "counts"),
    "set": ("members", "allowed"),
}
REQUEST = re.compile(
    r"(Write|Create|Implement|Design|Develop|Construct|Build) an? (?:[Pp]ython )?"
    r"((?:function|program|script) [^\n]+?)[.:]?(?:\nYour code[^\n]*\nassert .*|\n\n(.*))?", re.S,
)  # fmt: skip
PYTHON_ONLY = re.compile(
    r"python|pandas|numpy|matplotlib|flask|django|tkinter|lambda|comprehension|decorator|dunder|\bmodule|\blibrary|"
    r"\bimport|\bdef |\bclass\b|print\(|built-in|tuple|heap queue|itertools|collections|\bregex",
    re.I,
)
LANGUAGES = ("JavaScript", "TypeScript", "Java", "C++", "Rust", "Go", "C", "Kotlin")
TRANSLATED = (
    "{verb} a {language} {task}.",
    "In {language}, {lower} a {task}.",
    "How do I write this in {language}: a {task}?",
)
SHELL = re.compile(r"\b(files?|director(y|ies)|folders?|lines?|disk|URL)\b")
QUERY = re.compile(r"\b(CSV|database|columns?|records)\b")
CODE_TASKS = (  # what else can be asked of code that is described
    "Explain step by step how to write a Python {task}.",
    "{verb} a Python {task}. Explain every line of it afterwards.",
    "Write pytest tests for a Python {task}. Cover the edge cases.",
    "{verb} a Python {task}, and write tests for it with unittest.",
    "{verb} a Python {task}. Add type hints and a docstring.",
    "{verb} a Python {task}, with full type annotations and a docstring that shows two examples.",
)
SNIPPET_TASKS = (  # and of code that is quoted
    "Explain what this code does.",
    "Explain the following code line by line.",
    "Write tests for this code.",
    "Add type hints and a docstring to this code.",
    "Rewrite this code so that it is easier to read.",
)
AGAIN = 1000  # prompts that ask for code again in another language, and as many with another task


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
    for prompt in prompts:
        if code := unfinished_function(prompt):
            for form in rng.sample(UNFINISHED, 3):
                yield form.format(name=code.name, code=code.source(rng))
    translated, tasks = code_requests(prompts, rng)
    yield from rng.sample(translated, min(AGAIN, len(translated)))
    yield from rng.sample(tasks, min(AGAIN, len(tasks)))


def german(rng: random.Random) -> str:
    sentence = f"{rng.choice(SUBJECTS)} {rng.choice(PREDICATES)}"
    if rng.random() < 0.7:
        sentence += f" , {rng.choice(REASONS)}"
    if rng.random() < 0.3:
        sentence += f" . {rng.choice(SUBJECTS)} {rng.choice(PREDICATES)}"
    return sentence + " ."


@dataclass(frozen=True)
class UnfinishedFunction:
    """A function that has a description and an example, and no body yet."""

    name: str
    description: str
    types: tuple[str, ...]  # of the arguments, keys of ARGUMENTS
    returns: str
    example: str  # a call
    result: str  # of the example

    def source(self, rng: random.Random) -> str:
        """Signature and docstring, with or without type hints, in one of several layouts."""
        hinted = rng.random() < 0.6
        parameters: list[str] = []
        for place, kind in enumerate(self.types):
            earlier, names = self.types[:place].count(kind), ARGUMENTS[kind]
            name = names[earlier] if earlier < len(names) else f"{names[-1]}{earlier}"
            parameters.append(f"{name}: {kind}" if hinted else name)
        returns = f" -> {self.returns}" if hinted else ""
        opening = rng.choice(('"""', '"""', '"""\n    '))
        gap = rng.choice(("\n", "\n\n"))
        return (
            f"def {self.name}({', '.join(parameters)}){returns}:\n"
            f'    {opening}{self.description}{gap}    >>> {self.example}\n    {self.result}\n    """'
        )


def unfinished_function(prompt: str) -> UnfinishedFunction | None:
    """The function that a prompt asks for, if the prompt has a test that calls it with literals."""
    request = re.fullmatch(r"Write a (?:python )?function to (.+?)\.?\nYour code [^\n]*\nassert ([^\\]+)", prompt)
    if request is None:
        return None
    try:
        match ast.parse(request[2], mode="eval").body:
            case ast.Compare(ast.Call(ast.Name(name), arguments, []) as call, [ast.Eq()], [result]):
                types = [_type(ast.literal_eval(literal)) for literal in (*arguments, result)]
                if all(kind in ARGUMENTS for kind in types):
                    description = request[1][0].upper() + request[1][1:] + "."
                    texts = ast.unparse(call), ast.unparse(result)
                    return UnfinishedFunction(name, description, tuple(types[:-1]), types[-1], *texts)
    except (SyntaxError, ValueError):  # not Python, or a call where a literal is needed
        pass
    return None


def code_requests(prompts: list[str], rng: random.Random) -> tuple[list[str], list[str]]:
    """Requests for Python code asked again: in other languages, and with other tasks. Each list is sorted."""
    translated: set[str] = set()
    tasks: set[str] = set()
    for prompt in prompts:
        if (snippet := re.search(r"\n\n(def \w+\(.*)", prompt, re.S)) and _is_python(snippet[1]):
            tasks.update(f"{task}\n\n```python\n{snippet[1].strip()}\n```" for task in rng.sample(SNIPPET_TASKS, 2))
        request = REQUEST.fullmatch(prompt)
        if request is None or not ("ython" in prompt.split("\n")[0] or "\nassert " in prompt):
            continue
        verb, task, given = request.groups()
        tasks.update(form.format(verb=verb, task=task) for form in rng.sample(CODE_TASKS, 2))
        if PYTHON_ONLY.search(f"{task}\n{given}"):
            continue
        languages = rng.sample(LANGUAGES, 2) + ["Bash"] * bool(SHELL.search(task))
        asked = [
            rng.choice(TRANSLATED).format(verb=verb, lower=verb.lower(), language=language, task=task)
            for language in languages
        ]
        if QUERY.search(task):
            asked.append(f"{verb} a SQL query that does the work of a {task}.")
        translated.update(f"{question}\n\n{given}" if given else question for question in asked)
    return sorted(translated), sorted(tasks)


def _type(value: object) -> str:
    """The type of a literal, in the words of `ARGUMENTS`."""
    match value:
        case [_, *_] if all(type(item) is int for item in value):
            return "list[int]" if isinstance(value, list) else "tuple"
        case [_, *_] if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return "list[str]"
        case [_, *_] if isinstance(value, list) and all(_type(item) == "list[int]" for item in value):
            return "list[list[int]]"
    return type(value).__name__


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


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
