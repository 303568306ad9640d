"""The sections of docs/benchmarks.md, one function per table: records in, Markdown out."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from published import Figures, Record

PLAIN, OFF, AUTO, ALL = "plain", "off", "auto", "all"
COPY, CHAT = KINDS = "copying", "open chat"  # the kinds of prompts that engines are compared with
NONE = "–"
TITLE = ["machine", "model", "weights"]
SUITES = {"suite": "many kinds", "functions": "functions", "maths": "maths"}


def table(headers: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Text to the left; columns whose cells begin with digits to the right."""
    first, *others = [list(headers), *map(list, rows)]

    def marker(column: int) -> str:
        cells = [row[column].strip("*`") for row in others if row[column] not in ("", NONE)]
        return "--:" if cells and all(cell[0] in "0123456789+−" for cell in cells) else "---"

    markers = f"|{'|'.join(map(marker, range(len(first))))}|"
    head, *body = (f"| {' | '.join(line)} |" for line in (first, *others))
    return "\n".join([head, markers, *body])


def machine_title(record: Record) -> str:
    machine = record["machine"]
    return machine["name"] if machine.get("device") == "cuda" else f"{machine['name']}, {machine['threads']} threads"


def title(record: Record) -> list[str]:
    """The first cells of a row: machine, model, weights."""
    return [machine_title(record), record["model"]["name"], record["model"]["dtype"]]


def with_part(records: Iterable[Record], part: str) -> list[Record]:
    return [record for record in records if part in record]


def plain_section(records: list[Record]) -> str:
    rates = [
        [*title(record), *_rates(figures["plain"]), *_rates(figures["prompt"]), f"{figures['memory_mb']:,} MB"]
        for record in records
        if (figures := record["plain"])
    ]
    counts = list(records[0]["plain"]["rows_ms"])
    rows = []
    for record in records:
        times = record["plain"]["rows_ms"]
        more = [f"{times[count] / times['1']:.2f}×" for count in counts[1:]]
        rows.append([*title(record), f"{record['plain']['floor_ms']:.2f}", f"{times['1']:.2f}", *more])
    both = ["llama.cpp", "ratio"]
    return "\n\n".join(
        [
            "## Plain decoding",
            "One sequence, greedy, without drafts: 128 tokens after a prompt of one, and a prompt of 512 tokens to its "
            "first token, in tokens per second. llama.cpp is its own `llama-bench`, built for the same CPU; the two "
            f"engines take turns. {NONE} stands where there was none: it is built for CPUs, and reads GGUF files.",
            table([*TITLE, "plain", *both, "prompt", *both, "memory"], rates),
            "A run of several rows of distinct tokens in units of one row, which is what verifying a draft costs. The "
            "floor is the time to read once what one row needs: all weights, and of experts those that it chooses.",
            table([*TITLE, "floor, ms", "1 row, ms", *(f"{count} rows" for count in counts[1:])], rows),
        ]
    )


def _rates(figures: Figures) -> list[str]:
    theirs, ratio = figures["llama.cpp"], figures["ratio"]
    return [_rate(figures["foredraft"]), *([_rate(theirs), f"{ratio:.2f}×"] if theirs else [NONE, NONE])]


def exactness_section(records: list[Record]) -> str:
    rows = []
    for record in records:
        figures = record["exactness"]
        one, other, price = figures["exact"], figures["not_exact"], figures["price"]
        alone = [f"{one['ms_per_token']:.2f}", f"{other['ms_per_token']:.2f}", percent(price["latency"])]
        at_once = [_rate(one["tokens_per_s"]), _rate(other["tokens_per_s"]), percent(price["throughput"])]
        rows.append([*title(record), *alone, str(figures["sequences"]), *at_once])
    off = "`exact=False`"
    headers = ["alone, ms a token", off, "price", "requests at once", "tok/s", off, "price"]
    return "\n\n".join(
        [
            "## The price of exactness",
            "Plain decoding with `exact=True`, the default, and without it, in turn: one request alone, and many at "
            "once. The price is the time that exactness adds: the median of what rounds give, each by itself.",
            table([*TITLE, *headers], rows),
        ]
    )


def percent(ratio: float) -> str:
    """Of time: 1.02 is 2 % more."""
    return f"{100 * (ratio - 1):+.1f} %".replace("-", "−")


def auto_section(records: list[Record]) -> str:
    parts = [
        "## `auto` by kind of prompt",
        "Greedy, one request at a time, cold stores, all settings in turn, the prompt's time included. A cell is the "
        "speed in units of `off`, and in brackets the tokens per run. Where several fixed settings were measured, the "
        "best of them is bold: others may be better.",
        "The prompts of many kinds are a development file in Spec-Bench's format, which is not part of this "
        "repository (any file of that format works), or else the built-in ones. `functions` and `maths` are in "
        "`benchmarks/data/`.",
    ]
    for record in records:
        figures = record["auto"]
        specs = [spec for spec in next(iter(figures["suites"].values()))["kinds"][ALL]["specs"] if spec != OFF]
        rows = [
            [SUITES[name], kind, str(found["prompts"]), *_speeds(found["specs"], specs)]
            for name, suite in figures["suites"].items()
            for kind, found in suite["kinds"].items()
            if kind == ALL or len(suite["kinds"]) > 2  # one kind alone is all
        ]
        repeats = ", ".join(f"{SUITES[name]} {suite['repeats']}" for name, suite in figures["suites"].items())
        same = all(suite["same_text"] for suite in figures["suites"].values())
        parts += [
            f"### {', '.join(title(record))}",
            f"At most {figures['max_tokens']} tokens. Suite of many kinds: `{record['suite']}`. Repeats: {repeats}. "
            + ("Every text was the same in all settings." if same else "TEXTS DIFFERED."),
            table(["suite", "kind", "prompts", "`off`, tok/s", *(f"`{spec}`" for spec in specs)], rows),
        ]
    return "\n\n".join(parts)


def _speeds(found: Figures, specs: list[str]) -> list[str]:
    fixed = [spec for spec in specs if spec != AUTO]
    best = max(fixed, key=lambda spec: float(found[spec]["ratio_to_off"])) if len(fixed) > 1 else None

    def cell(spec: str) -> str:
        ratio = f"{found[spec]['ratio_to_off']:.2f}×"
        return f"{f'**{ratio}**' if spec == best else ratio} ({found[spec]['tokens_per_run']:.2f})"

    return [_rate(found[OFF]["tokens_per_s"]), *map(cell, specs)]


def batch_section(records: list[Record]) -> str:
    sizes = list(dict.fromkeys(size for record in records for size in record["batch"]["batches"]))
    rows = []
    for record in records:
        found, flip = record["batch"]["batches"], record["batch"]["flip"]
        for spec in (AUTO, record["batch"]["fixed"]):
            cells = [f"{found[size]['specs'][spec]['ratio_to_off']:.2f}×" if size in found else NONE for size in sizes]
            flips = ["", ""]
            if spec != AUTO:
                lost = float(found[next(iter(found))]["specs"][spec]["ratio_to_off"]) < 1
                flips = [
                    f"{flip['measured']:g}" if flip["measured"] else "never pays" if lost else "not reached",
                    f"{flip['planned']}" if flip["planned"] else f"beyond {flip['up_to']}",
                ]
            rows.append([*title(record), f"`{spec}`", *cells, *flips])
    same = all(record["batch"]["same_text"] for record in records)
    return "\n\n".join(
        [
            "## Several requests at once",
            "The speed in units of `off` at the same number of requests: on a GPU of prompts of many kinds, then of "
            "functions and maths as far as there is time, on a CPU of these two and of built-in prompts. Where a fixed "
            "setting stops to pay, as measured, on straight lines between the sizes, and as its drafts would by the "
            f"figures of one request and the cost of rows. {'Every text was the same.' if same else 'TEXTS DIFFERED.'}",
            table([*TITLE, "setting", *(f"{size} at once" for size in sizes), "stops to pay at", "as planned"], rows),
        ]
    )


def acceptance_section(records: list[Record]) -> str:
    first = next(iter(records[0]["acceptance"]["suites"].values()))
    specs = list(next(iter(first["temperatures"].values())))
    rows = []
    for record in records:
        for name, suite in record["acceptance"]["suites"].items():
            for temperature, found in suite["temperatures"].items():
                what = [SUITES[name], str(suite["prompts"]), f"{float(temperature):g}"]
                rates = [f"{found[spec]['tokens_per_run']:.2f}" for spec in specs]
                same = "yes" if all(each["same_text"] for each in found.values()) else "NO"
                rows.append([*title(record), *what, *rates, same])
    headers = [*TITLE, "suite", "prompts", "temperature"]
    return "\n\n".join(
        [
            "## What the heads reach",
            "Tokens per run with a draft, the target's own included: the model's EAGLE head as a chain of five and as "
            "a tree of sixteen. They do not depend on the machine's speed.",
            table([*headers, *(f"`{spec}`" for spec in specs), "same text"], rows),
        ]
    )


def sources_section(records: list[Record]) -> str:
    lines = []
    for record in records:
        machine, model = record["machine"], record["model"]
        name = model if isinstance(model, str) else f"{model['name']} ({model['file']}), {model['dtype']}"
        versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
        commands = ", ".join(f"`{command}`" for command in record["command"].split("\n"))
        lines.append(
            f"* **{machine_title(record)}, {name}.** {machine['cpu']}, {machine['cores']} cores, {machine['system']}. "
            f"{record['date']}. Commit {record['commit']}{_earlier(record)}; {versions}. {commands}"
        )
    return "\n\n".join(["## Where and how", "\n".join(lines)])


def _earlier(record: Record) -> str:
    """The parts that were measured with another commit of the version."""
    parts = ", ".join(f"{part}: {commit}" for part, commit in record.get("earlier", {}).items())
    return f" ({parts})" if parts else ""


def peers_section(records: list[Record]) -> str:
    parts = [
        "## Beside other engines",
        "All engines read the same file and decode the same tokens, greedy, one prompt at a time. All prompts are "
        "distinct, and nothing is remembered between them. The copying prompts are code with one name changed and a "
        "list to repeat; they were taken because the default model does copy them.",
    ]
    for record in sorted(records, key=lambda record: -sum(record["prompts"].values())):
        parts += [f"### {record['model']}, {record['machine']['name']}", peers_body(record)]
    return "\n\n".join(parts)


def peers_body(record: Record) -> str:
    """The table and the sentences of one comparison."""
    counts = record["prompts"]
    introduction = (
        f"Prompts: {counts[COPY]} for {COPY}, {counts[CHAT]} of {CHAT}. At most {record['max_tokens']} tokens each. "
        f"Medians of {record['rounds']} interleaved rounds. The prefill of {record['prefill_tokens']} tokens is timed "
        "apart."
    )
    return "\n\n".join([introduction, _peers_table(record), *_to_llama(record), *_failures(record)])


def _peers_table(record: Record) -> str:
    headers = ["", *(header for kind in KINDS for header in (f"{kind}, tok/s", "to its own plain"))]
    rows = []
    for row in record["rows"]:
        plain = row["mode"] == PLAIN
        cells = [f"{row['engine']}, {_mode(row['mode'])}"]
        for kind in KINDS:
            ratio = row[kind]["ratio_to_plain"]
            cells += [_rate(row[kind]["tokens_per_s"]), "" if plain else "–" if ratio is None else f"{ratio:.2f}×"]
        same = {True: "yes", False: f"no: {row['difference']}", None: "" if plain else "–"}[row["same_text"]]
        rows.append([*cells, same, _rate(row["prefill_tokens_per_s"]) if plain else ""])
    return table([*headers, "same text as its own plain", f"prefill of {record['prefill_tokens']}, tok/s"], rows)


def _to_llama(record: Record) -> list[str]:
    ratios = record["to_llama_cpp"]
    if ratios is None:
        return []
    plain = ratios["plain"]
    sentences = [
        f"Foredraft to llama.cpp, both plain: {plain[COPY]:.2f}× on {COPY}, {plain[CHAT]:.2f}× on {CHAT}, "
        f"{plain['prefill']:.2f}× in prefill."
    ]
    for kind in (COPY, CHAT):
        fastest = dict(ratios["fastest"][kind])
        best = fastest.pop("mode")
        ours = ", ".join(f"`{mode}` {ratio:.2f}×" for mode, ratio in fastest.items())
        sentences.append(f"Foredraft to llama.cpp's fastest mode on {kind} ({_mode(best)}): {ours}.")
    return [" ".join(sentences)]


def _failures(record: Record) -> list[str]:
    return [
        f"{failure['engine']} ({'; '.join(map(_mode, failure['modes']))}) gave no figure: {failure['reason']}."
        for failure in record["failed"]
    ]


def _mode(mode: str) -> str:
    return mode.replace("lookup-", "prompt lookup, ") + (" draft tokens" if mode.startswith("lookup") else "")


def _rate(rate: float | None) -> str:
    return "no figure" if rate is None else f"{rate:.1f}" if rate < 100 else f"{rate:,.0f}"


SECTIONS: dict[str, Callable[[list[Record]], str]] = {
    "plain": plain_section,
    "exactness": exactness_section,
    "auto": auto_section,
    "batch": batch_section,
    "acceptance": acceptance_section,
}
