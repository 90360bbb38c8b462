"""Makes docs/reference/models.md of what the tests see and the GPU measured: make models-page (some minutes)."""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.quantization_schemes import SCHEMES
from server.text.chat_template import ChatTemplate
from server.text.parsers.detect import detect_format
from tests.models_memory import memory_rows
from tests.support.reference import LOGITS_ERROR
from tests.support.templates import published_templates

PAGE = Path("docs/reference/models.md")
RESULTS = Path("benchmarks/results")
MISSING = "**not measured**"
TEST_FILES = (
    "tests/unit/models/config/test_logits.py",
    "tests/unit/engine/test_families.py",
    "tests/unit/models/test_tensor_parallel.py",
    "tests/templates/test_published_templates.py",
)
LOGITS, GREEDY, RANKS, TEMPLATE = range(4)
KINDS_OF_TEST = {
    "test_whole_prefill_matches_transformers": LOGITS,
    "test_chunked_prefill_matches_transformers": LOGITS,
    "test_decode_token_by_token_matches_transformers": LOGITS,
    "test_ragged_rows_do_not_disturb_each_other": LOGITS,
    "test_a_text_over_many_chunks_of_attention_matches_transformers": LOGITS,
    "test_greedy_text_equals_transformers": GREEDY,
    "test_split_model_gives_the_logits_of_the_whole": RANKS,
    "test_every_prompt_is_the_one_of_transformers": TEMPLATE,
}
NODE = re.compile(r"::(\w+)\[(.+)\]$")
NOT_RUN = "**not run**"
NONE = "none was published there"


class Family(NamedTuple):
    """A row: what people download, the tests' checkpoints of it, and the beginnings of its templates' names."""

    models: str
    architecture: str
    checkpoints: tuple[str, ...]
    templates: tuple[str, ...] = ()
    form: str = ""  # of a template, where none was published in the packages


FAMILIES = (
    Family(
        "Llama 2, 3, 3.1, 3.2, 3.3; TinyLlama; SmolLM2",
        "LlamaForCausalLM",
        (
            "llama2",
            "llama3.1",
            "tinyllama",
            "llama_all_biases",
            "llama_wide_heads",
            "linear_rope",
            "dynamic_rope",
            "yarn_rope",
        ),
        ("meta-llama-Llama-3", "llama3", "NousResearch-Hermes-3-Llama", "deepseek-ai-DeepSeek-R1-Distill-Llama"),
    ),
    Family(
        "Mistral 7B v0.1–v0.3, Nemo, Small",
        "MistralForCausalLM",
        ("mistral", "mistral_full", "mistral_nemo"),
        ("mistralai-Mistral-Nemo", "Mistral-Small-3.2", "unsloth-mistral-Devstral"),
    ),
    Family(
        "Ministral 3, its text",
        "Ministral3ForCausalLM",
        ("ministral3", "ministral3_windows"),
        ("mistralai-Ministral-3",),
    ),
    Family("Mixtral 8x7B, 8x22B", "MixtralForCausalLM", ("mixtral", "mixtral_windows"), ("mistralai-Mistral-Nemo",)),
    Family("Qwen2, Qwen2.5", "Qwen2ForCausalLM", ("qwen2", "qwen2_windows"), ("Qwen-Qwen2.5", "qwen2_5.", "Qwen-QwQ")),
    Family("Qwen1.5-MoE, Qwen2-57B-A14B", "Qwen2MoeForCausalLM", ("qwen2_moe", "qwen2_moe_windows"), ("Qwen-Qwen2.5",)),
    Family("Qwen3", "Qwen3ForCausalLM", ("qwen3", "qwen3_yarn"), ("Qwen-Qwen3-0.6B", "qwen3.", "qwen3_instruct")),
    Family(
        "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
        "Qwen3MoeForCausalLM",
        ("qwen3_moe", "qwen3_moe_steps"),
        ("qwen3.", "qwen3_instruct", "Qwen3-Coder"),
    ),
    Family("Gemma", "GemmaForCausalLM", ("gemma",), ("gemma.",)),
    Family("Gemma 2", "Gemma2ForCausalLM", ("gemma2", "gemma2_uncapped"), ("google-gemma-2",)),
    Family("Gemma 3, its text", "Gemma3ForCausalLM", ("gemma3", "gemma3_linear"), ("gemma3.",)),
    Family(
        "Gemma 4, its text",
        "Gemma4ForCausalLM",
        ("gemma4", "gemma4_shared", "gemma4_experts"),
        ("gemma4", "google-gemma-4"),
    ),
    Family("Gemma 4 unified, its text", "Gemma4UnifiedForCausalLM", ("gemma4_unified",), ("gemma4", "google-gemma-4")),
    Family("gpt-oss", "GptOssForCausalLM", ("gpt_oss",), ("gptoss", "openai-gpt-oss")),
    Family("Phi-3, Phi-3.5, Phi-4, Phi-4-mini", "Phi3ForCausalLM", ("phi3", "phi3_long"), ("microsoft-Phi", "phi3")),
    Family("SmolLM3", "SmolLM3ForCausalLM", ("smollm3", "smollm3_windows"), ("HuggingFaceTB-SmolLM3",)),
    Family("Granite 3", "GraniteForCausalLM", ("granite", "granite_biases"), ("ibm-granite-granite-3",)),
    Family("OLMo 2", "Olmo2ForCausalLM", ("olmo2", "olmo2_biases"), form="ChatML-like, written for the tests"),
    Family("OLMo 3", "Olmo3ForCausalLM", ("olmo3", "olmo3_biases"), form=NONE),
    Family("Seed-OSS", "SeedOssForCausalLM", ("seed_oss", "seed_oss_biases"), ("ByteDance-Seed-OSS",)),
    Family("Arcee AFM", "ArceeForCausalLM", ("arcee", "arcee_biases"), form=NONE),
    Family("Apertus", "ApertusForCausalLM", ("apertus", "apertus_biases"), ("Apertus-8B",)),
    Family("ERNIE 4.5, dense", "Ernie4_5ForCausalLM", ("ernie4_5", "ernie4_5_biases"), form=NONE),
    Family("GLM-4-0414", "Glm4ForCausalLM", ("glm4", "glm4_whole_heads"), form=NONE),
    Family("Hunyuan, dense", "HunYuanDenseV1ForCausalLM", ("hunyuan", "hunyuan_biases"), form=NONE),
    Family("EXAONE 4", "Exaone4ForCausalLM", ("exaone4", "exaone4_full"), form=NONE),
    Family(
        "Command R7B, Command A",
        "Cohere2ForCausalLM",
        ("cohere2", "cohere2_biases"),
        ("cohere2.", "CohereForAI-c4ai-command-r7b"),
    ),
    Family(
        "Granite 3 MoE (1B-A400M, 3B-A800M)",
        "GraniteMoeForCausalLM",
        ("granite_moe", "granite_moe_biases"),
        ("ibm-granite-granite-3",),
    ),
    Family("Granite MoE with a shared expert", "GraniteMoeSharedForCausalLM", ("granite_moe_shared",), form=NONE),
    Family("Phi-3.5-MoE", "PhimoeForCausalLM", ("phimoe", "phimoe_windows"), ("microsoft-Phi-3.5",)),
    Family("ERNIE 4.5 MoE", "Ernie4_5_MoeForCausalLM", ("ernie4_5_moe", "ernie4_5_moe_steps"), form=NONE),
    Family("Hunyuan MoE", "HunYuanMoEV1ForCausalLM", ("hunyuan_moe", "hunyuan_moe_biases"), form=NONE),
    Family(
        "LFM2, LFM2.5, dense",
        "Lfm2ForCausalLM",
        ("lfm2", "lfm2_biases"),
        ("LFM2", "lfm2.", "lfm2_v2", "lfm2_2_5.", "lfm2_2_5_v2"),
    ),
    Family(
        "LFM2-MoE (8B-A1B)",
        "Lfm2MoeForCausalLM",
        ("lfm2_moe", "lfm2_moe_unbiased"),
        ("LFM2", "lfm2.", "lfm2_v2", "lfm2_2_5.", "lfm2_2_5_v2"),
    ),
    Family(
        "Granite 4 (H-Small, H-Tiny, H-Micro, Micro)",
        "GraniteMoeHybridForCausalLM",
        ("granite_hybrid", "granite_hybrid_dense"),
        ("ibm-granite-granite-4",),
    ),
    Family("Bamba", "BambaForCausalLM", ("bamba", "bamba_biases"), form=NONE),
    Family("Falcon-H1", "FalconH1ForCausalLM", ("falcon_h1", "falcon_h1_norm", "falcon_h1_norm_first"), form=NONE),
    Family(
        "Nemotron-H, Nemotron Nano 2, Nemotron 3",
        "NemotronHForCausalLM",
        ("nemotron_h", "nemotron_h_biases", "nemotron_3", "nemotron_3_latent"),
        ("NVIDIA-Nemotron", "nemotron_3_"),
    ),
    Family(
        "MiniMax-M2, M2.1, M2.5, M2.7",
        "MiniMaxM2ForCausalLM",
        ("minimax_m2", "minimax_m2_rotary_dim"),
        ("MiniMax-M2",),
    ),
    Family("dots.llm1", "Dots1ForCausalLM", ("dots1", "dots1_windows"), form=NONE),
    Family("Solar Open", "SolarOpenForCausalLM", ("solar_open", "solar_open_groups"), ("upstage-Solar-Open",)),
    Family("K-EXAONE", "ExaoneMoeForCausalLM", ("exaone_moe", "exaone_moe_no_rope"), form=NONE),
    Family(
        "Command A+ (its text), North Mini Code",
        "Cohere2MoeForCausalLM",
        ("cohere2_moe", "cohere2_moe_prefix", "cohere2_moe_softmax"),
        ("Cohere2MoE",),
    ),
    Family("Mistral Small 4, its text", "Mistral4ForCausalLM", ("mistral4", "mistral4_groups"), form=NONE),
    Family("Mellum 2", "MellumForCausalLM", ("mellum", "mellum_full"), form=NONE),
    Family("GLM-4.5, 4.6, 4.7", "Glm4MoeForCausalLM", ("glm4_moe", "glm4_moe_groups"), ("GLM-4.6", "glm4moe")),
    Family("GLM-4.7-Flash", "Glm4MoeLiteForCausalLM", ("glm4_moe_lite", "glm4_moe_lite_listed"), ("GLM-4.7-Flash",)),
    Family(
        "DeepSeek-V2, V2-Lite",
        "DeepseekV2ForCausalLM",
        ("deepseek_v2_lite", "deepseek_v2"),
        form=NONE,
    ),
    Family(
        "DeepSeek-V3, R1, V3.1",
        "DeepseekV3ForCausalLM",
        ("deepseek_v3", "deepseek_v3_halves"),
        ("deepseek-ai-DeepSeek-V3.1", "llama-cpp-deepseek-r1"),
    ),
    Family("Kimi-Linear 48B-A3B", "KimiLinearForCausalLM", ("kimi_linear", "kimi_linear_groups"), form=NONE),
    Family("Llama 4, its text", "Llama4ForCausalLM", ("llama4", "llama4_no_norm"), form=NONE),
    Family("Ministral 8B", "MinistralForCausalLM", ("ministral", "ministral_windows"), form=NONE),
    Family(
        "Qwen3-Next-80B-A3B",
        "Qwen3NextForCausalLM",
        ("qwen3_next", "qwen3_next_dense", "qwen3_next_steps"),
        form=NONE,
    ),
    Family("Qwen3.5, dense, its text", "Qwen3_5ForCausalLM", ("qwen3_5",), ("Qwen3.5", "qwen3_5_")),
    Family("Qwen3.5-35B-A3B, its text", "Qwen3_5MoeForCausalLM", ("qwen3_5_moe",), ("Qwen3.5", "qwen3_5_")),
    Family("OLMo-Hybrid", "OlmoHybridForCausalLM", ("olmo_hybrid", "olmo_hybrid_rope"), form=NONE),
)
# the same models within one that also sees; tests/unit/models/test_text_part.py
TEXT_PARTS = (
    "Mistral3ForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)


class Recorder:
    """A pytest plugin: how each test that a cell stands for ended."""

    def __init__(self) -> None:
        self.outcomes: dict[tuple[int, str], list[bool]] = {}
        self.errors: dict[str, float] = {}  # of logits, by checkpoint

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep every failure, and the end of the call."""
        found = NODE.search(report.nodeid)
        if found is None or (report.when != "call" and report.passed):
            return
        column = KINDS_OF_TEST.get(found[1])
        if column is not None:
            self.outcomes.setdefault((column, found[2]), []).append(report.passed)
        for name, value in report.user_properties:
            if column == LOGITS and name == LOGITS_ERROR:
                self.errors[found[2]] = max(float(str(value)), self.errors.get(found[2], 0.0))

    def count(self, column: int, names: Iterable[str]) -> str:
        """Say how many of the named cases passed; a failure and a case that did not run are said aloud."""
        ends = [self.outcomes.get((column, name)) for name in names]
        if not ends or None in ends:
            return NOT_RUN
        return str(len(ends)) if all(all(end) for end in ends if end) else "**differs**"

    def largest_error(self, checkpoints: Iterable[str]) -> str:
        """Return the largest error of logits over checkpoints, rounded up."""
        try:
            return rounded_up(max(self.errors[name] for name in checkpoints))
        except KeyError:
            return NOT_RUN


def rounded_up(error: float) -> str:
    """Write an error with the next of 1, 2 and 5 as its first digit: its other digits depend on the machine."""
    if error == 0:
        return "0"
    digits, _, exponent = f"{error:e}".partition("e")
    first = next(first for first in (1, 2, 5, 10) if float(digits) <= first)
    return f"1e{int(exponent) + 1}" if first == 10 else f"{first}e{int(exponent)}"


def forms_found(paths: Iterable[Path]) -> list[str]:
    """Return two cells: the forms of calls, and the openings of reasoning, that detection finds in chat templates."""
    calls, openings = set(), set()
    for path in paths:
        source = path.read_text()
        template = ChatTemplate(source, variables={}, special_tokens=[], added_tokens=[])
        found = detect_format(source, names_read=template.names_read, added_tokens=[])
        calls.add(found.tools)
        openings.add(found.reasoning and found.reasoning.opening)
    return [", ".join(f"`{name}`" for name in sorted(filter(None, names))) or "none" for names in (calls, openings)]


def template_cells(seen: Recorder, family: Family, templates: dict[str, Path]) -> list[str]:
    """Return how many templates give transformers' prompts, and what answers to them look like. templates: by name."""
    if not family.templates:
        return [family.form, "no template", "no template"]
    paths = {name: path for name, path in templates.items() if f"{name}.".startswith(family.templates)}
    count = seen.count(TEMPLATE, paths)
    openings = [cell.replace("|", "\\|") for cell in forms_found(paths.values())]  # | would end the cell
    return [f"{count} published" if count.isdigit() else count, *openings]


def family_rows(seen: Recorder, templates: dict[str, Path]) -> list[str]:
    """Return a table row per family."""
    rows = []
    ranks = seen.count(RANKS, sorted({name for column, name in seen.outcomes if column == RANKS}))
    for family in FAMILIES:
        greedy = [name for name in family.checkpoints if (GREEDY, name) in seen.outcomes]
        is_split = "2 and 4 ranks" if ranks == "2" else ranks
        cells = [family.models, f"`{family.architecture}`", seen.count(LOGITS, family.checkpoints)]
        cells += [seen.largest_error(family.checkpoints), seen.count(GREEDY, greedy)]
        rows.append(" | ".join([*cells, *template_cells(seen, family, templates), is_split]))
    return [f"| {row} |" for row in rows]


def newest(benchmark: str, folder: Path) -> dict[str, Any]:
    """Return of each scheme what the newest report of a benchmark that has it says; none: {}."""
    reports = [json.loads(path.read_text()) for path in folder.glob("quantization*.json")]
    found = [report for report in reports if report["benchmark"] == benchmark]
    return {
        name: {**seen, "gpu": report.get("versions", {}).get("gpu", "")}
        for report in sorted(found, key=itemgetter("date"))
        for name, seen in report["schemes"].items()
    }


def scheme_rows(folder: Path = RESULTS) -> list[str]:
    """Return a table row per quantisation scheme of the newest measurements; what was not measured is said aloud."""
    timed, trained = newest("quantization", folder), newest("quantization-trained", folder)
    rows = []
    for name in SCHEMES:
        is_timed, is_trained = ("describe" in report.get(name, {}) for report in (timed, trained))
        words = (timed if is_timed else trained).get(name, {}).get("describe", name)
        cells = [words if name in words or words != "unquantized" else f"{name}, {words}"]
        cells.append(percent(max(timed[name]["errors"].values())) if is_timed else MISSING)
        cells += trained_cells(trained[name], words) if is_trained else [MISSING] * 4
        cells += timed_cells(timed[name]) if is_timed else [MISSING] * 2
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def trained_cells(result: dict[str, Any], words: str) -> list[str]:
    """Return what a scheme does to trained weights; where its groups are not those of `words`, with which they are."""
    groups = re.search(r"groups of \d+", result["describe"])
    note = f" ({groups[0]})" if groups and groups[0] not in words else ""
    return [
        percent(max(result["errors"].values())) + note,
        percent(result["logits_error"]),
        f"{result['kl']:.5f}",
        percent(result["same_tokens"]),
    ]


def timed_cells(result: dict[str, Any]) -> list[str]:
    """Return the size and speed of a scheme, and the card if it is no H100."""
    rates = " / ".join(format(rate, ",.0f") for rate in result["decode_tok_per_s"].values())
    card = " (H200)" if "H200" in result.get("gpu", "") else ""
    return [f"{result['weights_gib']:.2f}", rates + card]


def percent(share: float) -> str:
    """Say a share in hundredths."""
    return f"{100 * share:.2f} %"


def page(seen: Recorder) -> str:
    """Return docs/reference/models.md."""
    templates = {path.stem: path for path in published_templates()}
    memory = memory_rows(family.architecture for family in FAMILIES)
    return with_tables(PAGE, {"families": family_rows(seen, templates), "memory": memory, "schemes": scheme_rows()})


def with_tables(path: Path, tables: Mapping[str, Sequence[str]]) -> str:
    """Return a page with other rows in its tables, each between comments that name it."""
    lines = path.read_text().splitlines()
    for name, rows in tables.items():
        start, end = lines.index(f"<!-- {name} -->"), lines.index(f"<!-- end of {name} -->")
        lines[start + 3 : end] = rows  # after the heading and the rule
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the tests and write the page. Returns pytest's exit code."""
    seen = Recorder()
    code = pytest.main([*TEST_FILES, "-q", "-m", "not gpu"], plugins=[seen])  # the whole tables
    PAGE.write_text(page(seen))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
