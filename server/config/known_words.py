"""Known words: what users of vLLM, SGLang, llama.cpp and ollama type, with a sentence and the command to type instead.

One table for each kind: commands, names of models, routes; flags are in server/config/known_flags.py. A word that is in
none gets no suggestion but a near miss, since a wrong one is worse than none. Reads the list of `quire models`, and
imports the standard library, and server.config's known_flags and setting.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from server.config.known_flags import FLAGS, about_flag
from server.config.setting import nearest

_SIMILARITY = 0.65  # of a typed command and one of ours, which are short
_HUB_LOGIN = "gated models of the hub need a token, HF_TOKEN or that of hf auth login"
_DOWNLOADS = "there is no separate download: quire serve MODEL fetches what is missing, after a check"
# word → the sentence; {rest}: the arguments that followed it
COMMANDS = {
    "run": "a model is talked to with chat: quire chat {rest}",
    "pull": _DOWNLOADS + ". Type quire serve {rest}",
    "download": _DOWNLOADS + ". Type quire serve {rest}",
    "download-weights": _DOWNLOADS + ". Type quire serve {rest}",
    "login": _HUB_LOGIN,
    "signin": _HUB_LOGIN,
    "search": "quire models WORD lists ids that have a word",
    "list": "quire models lists models by name; hf cache ls lists what was downloaded",
    "ls": "quire models lists models by name; hf cache ls lists what was downloaded",
    "ps": "quire top shows a running server and its requests",
    "show": "quire doctor says what a model is and takes: quire doctor {rest}",
    "info": "quire doctor says what a model is and takes: quire doctor {rest}",
    "inspect": "quire doctor says what a model is and takes: quire doctor {rest}",
    "status": "quire top shows a running server and its requests; GET /ready says whether it answers",
    "health": "GET /ready says whether a running server answers",
    "metrics": "a running server has GET /metrics; quire top shows the main ones",
    "logs": "a server writes its log to standard error; under systemd: journalctl -u quire",
    "webui": "the chat page is at / of a running server: quire serve MODEL",
    "ui": "the chat page is at / of a running server: quire serve MODEL",
    "remove": "downloads are in the Hugging Face cache: hf cache rm {rest}",
    "delete": "downloads are in the Hugging Face cache: hf cache rm {rest}",
    "rm": "downloads are in the Hugging Face cache: hf cache rm {rest}",
    "stop": "a server ends with Ctrl-C or SIGTERM, or systemctl stop",
    "kill": "a server ends with Ctrl-C or SIGTERM, or systemctl stop",
    "create": "a model is a folder in Hugging Face layout: quire serve FOLDER; a system message is part of a request",
    "push": "nothing is published from here: hf upload does that",
    "start": "a server is started with serve: quire serve {rest}",
    "server": "a server is started with serve: quire serve {rest}",
    "api_server": "a server is started with serve: quire serve {rest}",
    "launch": "a server is started with serve: quire serve {rest}",
    "launch-server": "a server is started with serve: quire serve {rest}",
    "launch_server": "a server is started with serve: quire serve {rest}",
    "run-batch": "a file of requests is answered with batch: quire batch IN.jsonl -o OUT.jsonl",
    "complete": "quire chat talks to a model; POST /v1/completions continues a text",
    "generate": "quire chat talks to a model; from Python: from quire import LLM",
    "embed": "embeddings are served: quire serve MODEL, then POST /v1/embeddings",
    "tokenize": "a running server has POST /tokenize",
    "train": "models are not trained here",
    "finetune": "models are not trained here",
    "env": "the machine is described by doctor: quire doctor",
    "collect-env": "the machine is described by doctor: quire doctor",
    "benchmark": "measurements are those of bench: quire bench serve or quire bench offline",
    "version": "the version is printed by a flag: quire --version",
    "help": "help is a flag: quire --help, or quire COMMAND --help",
    "convert": "weights are read as they are, in safetensors; --quantization of quire serve rounds them on load",
    "quantize": "weights are rounded on load: quire serve MODEL --quantization int4, fp8 or w8a8",
}

_LLAMA_31, _DISTILL = "meta-llama/Llama-3.1-", "deepseek-ai/DeepSeek-R1-Distill-"
# ollama's name and tag → hub id; a name alone is the tag that ollama takes for it
MODELS = {
    "llama3.3": "meta-llama/Llama-3.3-70B-Instruct", "llama3.3:70b": "meta-llama/Llama-3.3-70B-Instruct",
    "llama3.2": "meta-llama/Llama-3.2-3B-Instruct", "llama3.2:3b": "meta-llama/Llama-3.2-3B-Instruct",
    "llama3.2:1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama3.1": f"{_LLAMA_31}8B-Instruct", "llama3.1:8b": f"{_LLAMA_31}8B-Instruct",
    "llama3.1:70b": f"{_LLAMA_31}70B-Instruct", "llama3.1:405b": f"{_LLAMA_31}405B-Instruct",
    "llama3": "meta-llama/Meta-Llama-3-8B-Instruct", "llama3:8b": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama2": "meta-llama/Llama-2-7b-chat-hf", "llama2:7b": "meta-llama/Llama-2-7b-chat-hf",
    "qwen3": "Qwen/Qwen3-8B", "qwen2.5": "Qwen/Qwen2.5-7B-Instruct", "qwen2.5-coder": "Qwen/Qwen2.5-Coder-7B-Instruct",
    **{f"qwen3:{size.lower()}": f"Qwen/Qwen3-{size}"
       for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B")},
    "qwen3:30b": "Qwen/Qwen3-30B-A3B", "qwen3:235b": "Qwen/Qwen3-235B-A22B",
    "qwen3-coder": "Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-coder:30b": "Qwen/Qwen3-Coder-30B-A3B-Instruct",
    **{f"qwen2.5:{size.lower()}": f"Qwen/Qwen2.5-{size}-Instruct"
       for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")},
    **{f"qwen2.5-coder:{size.lower()}": f"Qwen/Qwen2.5-Coder-{size}-Instruct"
       for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B")},
    "qwq": "Qwen/QwQ-32B", "qwq:32b": "Qwen/QwQ-32B",
    "qwen2.5vl": "Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5vl:7b": "Qwen/Qwen2.5-VL-7B-Instruct",
    "qwen2.5vl:3b": "Qwen/Qwen2.5-VL-3B-Instruct",
    "gemma3": "google/gemma-3-4b-it", **{f"gemma3:{size}": f"google/gemma-3-{size}-it"
                                         for size in ("1b", "4b", "12b", "27b")},
    "gemma2": "google/gemma-2-9b-it", **{f"gemma2:{size}": f"google/gemma-2-{size}-it" for size in ("2b", "9b", "27b")},
    "mistral": "mistralai/Mistral-7B-Instruct-v0.3", "mistral:7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "mistral-nemo": "mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo:12b": "mistralai/Mistral-Nemo-Instruct-2407",
    "mixtral": "mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral:8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "phi4": "microsoft/phi-4", "phi4:14b": "microsoft/phi-4",
    "phi4-mini": "microsoft/Phi-4-mini-instruct", "phi4-mini:3.8b": "microsoft/Phi-4-mini-instruct",
    "phi3.5": "microsoft/Phi-3.5-mini-instruct", "phi3.5:3.8b": "microsoft/Phi-3.5-mini-instruct",
    "gpt-oss": "openai/gpt-oss-20b", "gpt-oss:20b": "openai/gpt-oss-20b", "gpt-oss:120b": "openai/gpt-oss-120b",
    "deepseek-r1:1.5b": f"{_DISTILL}Qwen-1.5B", "deepseek-r1:7b": f"{_DISTILL}Qwen-7B",
    "deepseek-r1:14b": f"{_DISTILL}Qwen-14B", "deepseek-r1:32b": f"{_DISTILL}Qwen-32B",
    "deepseek-r1:70b": f"{_DISTILL}Llama-70B", "deepseek-r1:671b": "deepseek-ai/DeepSeek-R1",
    "smollm2": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    **{f"smollm2:{size.lower()}": f"HuggingFaceTB/SmolLM2-{size}-Instruct" for size in ("135M", "360M", "1.7B")},
    "tinyllama": "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama:1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "llava": "llava-hf/llava-1.5-7b-hf", "llava:7b": "llava-hf/llava-1.5-7b-hf",
    "llama4": "meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4:scout": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "gemma4": "google/gemma-4-E4B-it", "gemma4:e2b": "google/gemma-4-E2B-it", "gemma4:e4b": "google/gemma-4-E4B-it",
    "gemma4:26b": "google/gemma-4-26B-A4B-it", "gemma4:31b": "google/gemma-4-31B-it",
    "gemma3:270m": "google/gemma-3-270m-it",
    "qwen3.5:4b": "Qwen/Qwen3.5-4B", "qwen3.5:27b": "Qwen/Qwen3.5-27B", "qwen3.5:35b": "Qwen/Qwen3.5-35B-A3B",
    "qwen3.5:122b": "Qwen/Qwen3.5-122B-A10B", "qwen3.6:27b": "Qwen/Qwen3.6-27B", "qwen3.6:35b": "Qwen/Qwen3.6-35B-A3B",
    "qwen3-vl": "Qwen/Qwen3-VL-8B-Instruct", "qwen3-vl:30b": "Qwen/Qwen3-VL-30B-A3B-Instruct",
    "qwen3-vl:235b": "Qwen/Qwen3-VL-235B-A22B-Instruct",
    **{f"qwen3-vl:{size}": f"Qwen/Qwen3-VL-{size.upper()}-Instruct" for size in ("2b", "4b", "8b", "32b")},
    "qwen2.5vl:32b": "Qwen/Qwen2.5-VL-32B-Instruct", "qwen2.5vl:72b": "Qwen/Qwen2.5-VL-72B-Instruct",
    "qwen3-coder:480b": "Qwen/Qwen3-Coder-480B-A35B-Instruct", "qwen3-next": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "qwen3-next:80b": "Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3-embedding": "Qwen/Qwen3-Embedding-8B",
    **{f"qwen3-embedding:{size}": f"Qwen/Qwen3-Embedding-{size.upper()}" for size in ("0.6b", "4b", "8b")},
    "deepseek-r1": "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", "deepseek-r1:8b": "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B",
    "deepseek-v3.1": "deepseek-ai/DeepSeek-V3.1", "deepseek-v3.1:671b": "deepseek-ai/DeepSeek-V3.1",
    "ministral-3": "mistralai/Ministral-3-8B-Instruct-2512",
    **{f"ministral-3:{size}": f"mistralai/Ministral-3-{size.upper()}-Instruct-2512" for size in ("3b", "8b", "14b")},
    "mistral-small": "mistralai/Mistral-Small-24B-Instruct-2501",
    "mistral-small:24b": "mistralai/Mistral-Small-24B-Instruct-2501",
    "mistral-small3.1": "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    "mixtral:8x22b": "mistralai/Mixtral-8x22B-Instruct-v0.1", "phi4-reasoning": "microsoft/Phi-4-reasoning",
    "nemotron-3-nano": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nemotron-3-nano:30b": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "glm-4.7-flash": "zai-org/GLM-4.7-Flash",
    "granite3.3": "ibm-granite/granite-3.3-8b-instruct", "granite3.3:8b": "ibm-granite/granite-3.3-8b-instruct",
    "hermes3": "NousResearch/Hermes-3-Llama-3.1-8B", "hermes3:8b": "NousResearch/Hermes-3-Llama-3.1-8B",
    "zephyr": "HuggingFaceH4/zephyr-7b-beta", "zephyr:7b": "HuggingFaceH4/zephyr-7b-beta",
}  # fmt: skip

_NO_SPEECH, _NO_PICTURES = "speech is not served", "pictures are not served"
_NO_RERANK = "scores of pairs are not served; POST /v1/embeddings gives vectors to compare"
_MODEL_FACTS = "GET /v1/models has the model and its context length"
_ONE_MODEL = "a server has one model, that of quire serve MODEL"
_ADAPTERS = "adapters are loaded at the start: quire serve MODEL --lora NAME=FOLDER"
_CACHE = "cached blocks make room by themselves; --no-prefix-caching of quire serve keeps none"
_MEMORY = "memory is given back when the server ends"
# the last segments of a path that no route stands for → a sentence
ROUTES = {
    "api/pull": "a server has one model, which quire serve MODEL downloads",
    "api/push": "nothing is published from here",
    "api/create": _ONE_MODEL,
    "api/delete": "downloads are in the Hugging Face cache: hf cache rm",
    "api/copy": "--served-model-name of quire serve gives a model more names",
    "api/show": _MODEL_FACTS,
    "api/ps": "requests are shown at GET /kv/snapshot, totals at GET /metrics",
    "props": _MODEL_FACTS,
    "info": _MODEL_FACTS,
    "model_info": _MODEL_FACTS,
    "models/load": _ONE_MODEL,
    "models/unload": _ONE_MODEL,
    "update_weights_from_disk": _ONE_MODEL,
    "lora-adapters": _ADAPTERS,
    "flush_cache": _CACHE,
    "reset_prefix_cache": _CACHE,
    "load": "GET /metrics has the requests that run and that wait",
    "get_server_info": "GET /v1/models has the model, GET /metrics the figures",
    "abort_request": "DELETE /v1/requests/ID ends a request, as does a client that leaves",
    "encode": "POST /v1/embeddings gives vectors",
    "redoc": "GET /docs describes the API",
    "openapi.yaml": "GET /openapi.json describes the API",
    "slots": "requests are shown at GET /kv/snapshot",
    "infill": "fill-in-the-middle is not served",
    "apply-template": "POST /tokenize with messages renders the chat template",
    "rerank": _NO_RERANK,
    "reranking": _NO_RERANK,
    "score": _NO_RERANK,
    "audio/transcriptions": _NO_SPEECH,
    "audio/translations": _NO_SPEECH,
    "audio/speech": _NO_SPEECH,
    "images/generations": _NO_PICTURES,
    "images/edits": _NO_PICTURES,
    "moderations": "moderation is not served",
    "files": "files are not kept: quire batch IN.jsonl answers a file of requests",
    "batches": "quire batch IN.jsonl answers a file of requests",
    "assistants": "assistants are not served; POST /v1/responses is",
    "conversations": "conversations are not stored: POST /v1/responses takes the whole conversation as input",
    "threads": "threads are not served; POST /v1/responses is",
    "load_lora_adapter": _ADAPTERS,
    "unload_lora_adapter": _ADAPTERS,
    "sleep": _MEMORY,
    "is_sleeping": _MEMORY,
    "wake_up": _MEMORY,
    "v1": "it is the base URL of clients, and GET /v1/models lists the models",
    "engines": _MODEL_FACTS,
    "get_model_info": _MODEL_FACTS,
    "server_info": "GET /v1/models has the model, GET /metrics the figures",
    "generate_stream": "POST /v1/completions with stream continues a text",
    "health_generate": "GET /ready is 200 when requests are answered",
    "pooling": "POST /v1/embeddings gives vectors",
    "classify": "classes are not served; POST /v1/embeddings gives vectors",
    "invocations": "POST /v1/chat/completions and POST /v1/completions generate",
    "fine_tuning/jobs": "models are not trained here",
    "realtime": _NO_SPEECH,
}

KNOWN_MODELS = Path(__file__).resolve().parents[2] / "models" / "known_models.json"
_BARE_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]*(:[a-zA-Z0-9][a-zA-Z0-9._-]*)?")
_TAGGED_ID = re.compile(r"([\w.-]+/[\w.-]+):[\w.-]+")
_MIN_NAME_CHARS = 4  # what begins ids of the hub with fewer letters is more often a folder that is not there
_OLLAMA_URL = re.compile(r"^(https?://)?ollama\.com/(library/)?|^(ollama|library)/")
_HUB_URL = re.compile(
    r"(?:hf://|(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?:models/)?)([\w.-]+/[\w.-]+)(?::[\w.-]+)?"
    r"(?:/(?:tree|blob|resolve)/([\w.-]+).*)?/?(?:\?.*)?"
)
_GGUF = "GGUF is llama.cpp's format, which is not read: give the model's own repository or folder with safetensors"


def about_command(word: str, rest: Sequence[str], known: Iterable[str]) -> str:
    """Return the sentence on a first word that is no command, without its full stop."""
    if word in COMMANDS:
        arguments = [argument for argument in rest if not argument.startswith("-")][:1]
        typed = arguments[0] if arguments and "{rest}" in COMMANDS[word] else None
        about = None if typed is None or typed in MODELS else about_model(typed)
        is_model = typed is not None and ("/" in typed or Path(typed).is_dir()) and about is None
        shown = MODELS.get(typed or "", typed if typed is not None and is_model else "MODEL")
        said = f"{word} is no command here: {COMMANDS[word].format(rest=shown)}"
        return said if about is None else f"{said}; {about}"
    if word in MODELS or _HUB_URL.fullmatch(word) or "/" in word or Path(word).is_dir():
        sentence = about_model(word)
        return f"{word} is no command" + (f": {sentence}" if sentence else f": quire serve {word} serves a model")
    return f"{word} is no command{nearest(word, list(known), similarity=_SIMILARITY)}"


def about_first_flag(flag: str, value: str) -> str | None:
    """Return the sentence on another server's flag where a command is needed, without its full stop; None: in no table.

    value: the word that followed it.
    """
    sentence = about_flag(flag, ())
    if sentence is None:
        return None
    if FLAGS[flag] in (FLAGS["--model"], FLAGS["-hf"]) and value and not value.startswith("-"):
        return f"{flag} is no flag here: {about_model(value) or f'a model is served with quire serve {value}'}"
    return sentence if "quire serve" in sentence else f"{sentence}, and the command comes first: quire serve …"


def about_model(model: str) -> str | None:
    """Return the sentence on a MODEL that is no folder and no hub id, without its full stop; None: nothing is known."""
    url = _HUB_URL.fullmatch(model)
    tagged = _TAGGED_ID.fullmatch(model)
    if model.lower().endswith(".gguf") or ((url or tagged) and "gguf" in model.lower()):
        return _GGUF
    if url:
        revision = f" --revision {url[2]}" if url[2] not in (None, "main") else ""
        return f"a hub id is given without its URL: quire serve {url[1]}{revision}"
    if tagged:
        return f"a hub id has no tag: quire serve {tagged[1]}"
    word = _OLLAMA_URL.sub("", model, count=1)
    name, colon, tag = word.partition(":")
    hub_id = MODELS.get(name if tag == "latest" else word)
    if hub_id is not None:
        return f"{model} is ollama's name, and models are named as on the hub: quire serve {hub_id}"
    if not _BARE_NAME.fullmatch(word):
        return None
    ids = [one for one in _listed_ids() if _bare(one.rpartition("/")[2]).startswith(_bare(name))]
    exact = [one for one in ids if one.rpartition("/")[2] == word]
    if len(exact) == 1:
        return f"a hub id has its owner before it: {exact[0]}"
    if ids and len(name) >= _MIN_NAME_CHARS:
        return f"models are named as on the hub, OWNER/NAME: quire models {name} lists ids"
    return "it looks like a name of ollama, and models are named as on the hub, OWNER/NAME" if colon else None


def is_found(word: str, hub_id: str) -> bool:
    """Return whether a word, whatever its dashes, dots and capitals, is in a hub id: llama3.2 is in …/Llama-3.2-1B."""
    return (_bare(word) or word) in _bare(hub_id.rpartition("/")[2]) or word.lower() in hub_id.lower()


def about_route(path: str) -> str | None:
    """Return the sentence on a path of another server, without its full stop; None if it is in no table."""
    segments = [segment for segment in path.split("/") if segment]
    for count in (2, 1):
        sentence = ROUTES.get("/".join(segments[-count:]))
        if sentence is not None and len(segments) <= count + 2:
            return sentence
    return None


def _listed_ids() -> list[str]:
    """Return the hub ids that `quire models` lists."""
    table = json.loads(KNOWN_MODELS.read_text(encoding="utf-8"))
    return [row["model"] for kind in ("served", "unserved") for row in table[kind]]


def _bare(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
