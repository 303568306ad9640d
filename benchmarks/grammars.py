"""Tokens per run under grammars, with and without the proposer of forced tokens: figures that no clock changes.

python benchmarks/grammars.py [--model smollm2-135m] [--dtype int4]
"""

from __future__ import annotations

import argparse
from typing import Any

from foredraft import LLM, SamplingParams

SPECS = ("grammar", "suffix", "suffix+grammar", "ngram+suffix", "ngram+suffix+grammar")
TEXT: dict[str, Any] = {"type": "string", "maxLength": 80}


def record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def several(items: dict[str, Any], least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


KINDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a tool call": (
        record(
            name={"const": "get_weather"},
            arguments=record(
                city=TEXT,
                country_code={"type": "string", "pattern": "^[A-Z]{2}$"},
                unit={"enum": ["celsius", "fahrenheit"]},
                days={"type": "integer", "minimum": 1, "maximum": 7},
            ),
        ),
        [
            "What will the weather be like in Oslo this week?",
            "Will it rain in Madrid tomorrow?",
            "I fly to Nairobi for three days. What should I pack?",
            "Is it warm in Sydney now?",
        ],
    ),
    "a person": (
        record(
            first_name=TEXT,
            last_name=TEXT,
            date_of_birth={"type": "string", "format": "date"},
            occupation=TEXT,
            address=record(street=TEXT, postal_code={"type": "string", "pattern": "^[0-9]{5}$"}, city=TEXT),
        ),
        [
            "Invent a carpenter who lives in Bremen.",
            "Invent a teacher from Lyon.",
            "Invent a retired pilot.",
            "Invent a young violinist from Prague.",
        ],
    ),
    "an order with lines": (
        record(
            order_number={"type": "string", "pattern": "^ORD-[0-9]{5}$"},
            customer=TEXT,
            lines=several(
                record(
                    product=TEXT,
                    quantity={"type": "integer", "minimum": 1, "maximum": 20},
                    unit_price={"type": "integer", "minimum": 1, "maximum": 500},
                ),
                2,
                4,
            ),
            currency={"enum": ["EUR", "USD", "GBP"]},
            express_delivery={"type": "boolean"},
        ),
        [
            "Two lamps and a table for Mrs Berger.",
            "Ten notebooks and five pens for the school.",
            "A bicycle, a helmet and a lock for Jan.",
            "Flour, sugar and eggs for the bakery.",
        ],
    ),
    "a classification": (
        record(
            sentiment={"enum": ["positive", "neutral", "negative"]},
            topics=several({"enum": ["price", "quality", "delivery", "service", "other"]}, 1, 3),
            needs_answer={"type": "boolean"},
        ),
        [
            "The parcel came late and the box was open.",
            "Great shoes, I will buy here again!",
            "It works. It is a bit expensive.",
            "Nobody answers the phone.",
        ],
    ),
    "a summary in prose": (
        record(title=TEXT, summary={"type": "string", "maxLength": 400}),
        [
            "Summarise how bread is made.",
            "Summarise why the sky is blue.",
            "Summarise the rules of chess.",
            "Summarise how a bicycle stays upright.",
        ],
    ),
    "any JSON object": (
        {"type": "object"},
        [
            "Describe a house in JSON.",
            "Describe a film in JSON.",
            "Describe a meal in JSON.",
            "Describe a car in JSON.",
        ],
    ),
}


def tokens_per_run(llm: LLM, schema: dict[str, Any], prompts: list[str], temperature: float, spec: str) -> float:
    """Of all prompts together, one after the other, with stores that are empty at the beginning."""
    llm.engine.speculation.clear()
    outputs = []
    for seed, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=160, temperature=temperature, seed=seed, grammar=schema)
        outputs += llm.chat(f"{prompt} Answer in JSON.", params, spec=spec)
    emitted = sum(output.metrics.emitted_tokens for output in outputs)
    return emitted / sum(output.metrics.target_runs for output in outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="int4")
    arguments = parser.parse_args()
    llm = LLM(arguments.model, dtype=arguments.dtype, spec="off")
    print("| grammar | temperature | " + " | ".join(f"`{spec}`" for spec in SPECS) + " |")
    print("|---|---|" + "---|" * len(SPECS))
    for kind, (schema, prompts) in KINDS.items():
        for temperature in (0.0, 0.8):
            figures = [tokens_per_run(llm, schema, prompts, temperature, spec) for spec in SPECS]
            print(
                f"| {kind} | {temperature:g} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |", flush=True
            )


if __name__ == "__main__":
    main()
