"""Known words: what users of vLLM, SGLang, llama.cpp and ollama type, with a sentence and the command to type instead.

One table for each kind: commands, flags of a server, names of models, routes. A word that is in none gets no suggestion
but a near miss, since a wrong one is worse than none. Imports the standard library and server.config.setting.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from server.config.setting import nearest

_SIMILARITY = 0.85  # of a typed flag and another server's: most of them are written without a slip
_DOWNLOADS = "there is no separate download: quire serve MODEL fetches what is missing, after a check"
# word → the sentence; {rest}: the arguments that followed it
COMMANDS = {
    "run": "a model is talked to with chat: quire chat {rest}",
    "pull": _DOWNLOADS + ". Type quire serve {rest}",
    "download": _DOWNLOADS + ". Type quire serve {rest}",
    "list": "quire models lists models by name; hf cache ls lists what was downloaded",
    "ls": "quire models lists models by name; hf cache ls lists what was downloaded",
    "ps": "quire top shows a running server and its requests",
    "show": "quire doctor says what a model is and takes: quire doctor {rest}",
    "rm": "downloads are in the Hugging Face cache: hf cache rm {rest}",
    "stop": "a server ends with Ctrl-C or SIGTERM, or systemctl stop",
    "create": "a model is a folder in Hugging Face layout: quire serve FOLDER; a system message is part of a request",
    "push": "nothing is published from here: hf upload does that",
    "start": "a server is started with serve: quire serve {rest}",
    "server": "a server is started with serve: quire serve {rest}",
    "api_server": "a server is started with serve: quire serve {rest}",
    "launch": "a server is started with serve: quire serve {rest}",
    "launch_server": "a server is started with serve: quire serve {rest}",
    "run-batch": "a file of requests is answered with batch: quire batch IN.jsonl -o OUT.jsonl",
    "complete": "quire chat talks to a model; POST /v1/completions continues a text",
    "generate": "quire chat talks to a model; from Python: from quire import LLM",
    "embed": "embeddings are served: quire serve MODEL, then POST /v1/embeddings",
    "collect-env": "the machine is described by doctor: quire doctor",
    "benchmark": "measurements are those of bench: quire bench serve or quire bench offline",
    "version": "the version is printed by a flag: quire --version",
    "help": "help is a flag: quire --help, or quire COMMAND --help",
    "convert": "weights are read as they are, in safetensors; --quantization of quire serve rounds them on load",
    "quantize": "weights are rounded on load: quire serve MODEL --quantization int4, fp8 or w8a8",
}

_ALWAYS = "it is always so here: leave it out"
_REQUEST = "it is a field of requests, not a flag"
_ENVIRONMENT = "it is the environment's"
# flag → the flag of the same meaning here, or a sentence
FLAGS = {
    # the model
    "--model": "MODEL is an argument: quire serve MODEL",
    "-m": "MODEL is an argument: quire serve MODEL",
    "--model-path": "MODEL is an argument: quire serve MODEL",
    "--model-id": "MODEL is an argument: quire serve MODEL",
    "-hf": "a hub id is an argument: quire serve OWNER/NAME",
    "-hfr": "a hub id is an argument: quire serve OWNER/NAME",
    "--hf-repo": "a hub id is an argument: quire serve OWNER/NAME",
    "-hff": "all files of a hub id are found by themselves: quire serve OWNER/NAME",
    "--hf-file": "all files of a hub id are found by themselves: quire serve OWNER/NAME",
    "-a": "--served-model-name",
    "--alias": "--served-model-name",
    "--tokenizer": "the tokenizer is the model's own: leave it out",
    "--tokenizer-path": "the tokenizer is the model's own: leave it out",
    "--tokenizer-mode": "the tokenizer is the model's own: leave it out",
    "--hf-overrides": "the model's config.json is read as it is: change it there",
    "--rope-scaling": "the model's config.json is read as it is: change rope_scaling there",
    "--rope-theta": "the model's config.json is read as it is: change rope_theta there",
    "--rope-freq-base": "the model's config.json is read as it is: change rope_theta there",
    "--generation-config": "the model's generation_config.json has the defaults of requests",
    "--override-generation-config": "the model's generation_config.json has the defaults of requests",
    "--trust-remote-code": "a model folder's own code is never run: leave it out",
    "--task": "--pooling last or mean makes embeddings; else the model generates",
    "--runner": "--pooling last or mean makes embeddings; else the model generates",
    "--embedding": "--pooling last or mean makes embeddings of any model's hidden states",
    "--embeddings": "--pooling last or mean makes embeddings of any model's hidden states",
    "--mmproj": "pictures are not read: the text of a model that sees is served",
    "--limit-mm-per-prompt": "pictures are not read: the text of a model that sees is served",
    "--mm-processor-kwargs": "pictures are not read: the text of a model that sees is served",
    "--enable-lora": "--lora NAME=FOLDER alone loads an adapter",
    "--lora-modules": "--lora",
    "--lora-paths": "--lora",
    "--max-loras": "all adapters of --lora are loaded: leave it out",
    "--max-lora-rank": "ranks are read from the adapters: leave it out",
    "--quantize": "--quantization",
    "--download-dir": f"{_ENVIRONMENT}: HF_HOME",
    "--hf-token": f"{_ENVIRONMENT}: HF_TOKEN, or hf auth login",
    "--jinja": _ALWAYS,
    "--guided-decoding-backend": "llguidance compiles every grammar: leave it out",
    "--structured-outputs-config": "llguidance compiles every grammar: leave it out",
    "--grammar-backend": "llguidance compiles every grammar: leave it out",
    "--response-role": "answers have the role assistant: leave it out",
    "--chat-template-file": "--chat-template",
    "--enable-auto-tool-choice": "tool calls are parsed by the form that the chat template shows: leave it out",
    "--tool-call-parser": "the form of tool calls is found in the chat template: leave it out",
    "--reasoning-parser": "the form of reasoning is found in the chat template: leave it out",
    "--reasoning-format": "the form of reasoning is found in the chat template: leave it out",
    "--enable-reasoning": "the form of reasoning is found in the chat template: leave it out",
    # memory and batching
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--context-length": "--max-model-len",
    "--max-seq-len": "--max-model-len",
    "--max-total-tokens": "--max-model-len",
    "--max-context-len": "--max-model-len",
    "-np": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "--max-running-requests": "--max-num-seqs",
    "--max-concurrent-requests": "--max-num-seqs",
    "-b": "--max-num-batched-tokens",
    "-ub": "--max-num-batched-tokens",
    "--batch-size": "--max-num-batched-tokens",
    "--ubatch-size": "--max-num-batched-tokens",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--max-batch-prefill-tokens": "--max-num-batched-tokens",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--cuda-memory-fraction": "--gpu-memory-utilization",
    "--num-gpu-blocks-override": "--kv-cache-memory",
    "--kv-cache-memory-bytes": "--kv-cache-memory",
    "-ctk": "--kv-cache-dtype",
    "-ctv": "--kv-cache-dtype",
    "--cache-type-k": "--kv-cache-dtype",
    "--cache-type-v": "--kv-cache-dtype",
    "--swap-space": "--kv-host-memory",
    "--slot-save-path": "--kv-disk",
    "--kv-transfer-config": "--disaggregate and --kv-transport let engines give each other blocks",
    "--disaggregation-mode": "--disaggregate",
    "--kv-offloading-size": "--kv-host-memory",
    "--cpu-offload-gb": "weights stay on the GPU: --quantization makes them smaller",
    "--disable-radix-cache": "--no-prefix-caching",
    "--no-enable-prefix-caching": "--no-prefix-caching",
    "--enable-prefix-caching": _ALWAYS,
    "--enable-chunked-prefill": _ALWAYS,
    "-cb": _ALWAYS,
    "--cont-batching": _ALWAYS,
    "--async-scheduling": "--overlap",
    "--scheduling-policy": f"{_REQUEST}: priority; --priority says whose",
    "--schedule-policy": f"{_REQUEST}: priority; --priority says whose",
    "-fa": "--attention-backend",
    "--flash-attn": "--attention-backend",
    "--disable-cuda-graph": "--enforce-eager",
    "--cuda-graph-sizes": "the sizes of graphs follow --max-num-seqs and --max-num-batched-tokens",
    "-O": "kernels are compiled at the start: leave it out",
    "--compilation-config": "kernels are compiled at the start: leave it out",
    "-ngl": "the whole model is on the GPU if there is one: leave it out; --device cpu uses none",
    "--n-gpu-layers": "the whole model is on the GPU if there is one: leave it out; --device cpu uses none",
    "--gpu-layers": "the whole model is on the GPU if there is one: leave it out; --device cpu uses none",
    "-t": f"{_ENVIRONMENT}: OMP_NUM_THREADS",
    "--threads": f"{_ENVIRONMENT}: OMP_NUM_THREADS",
    "--mlock": "weights are read into memory: leave it out",
    "--no-mmap": "weights are read into memory: leave it out",
    "--speculative-config": "--speculative ngram, with --num-speculative-tokens",
    "--speculative-model": "drafts come from the text itself: --speculative ngram",
    "--speculative-draft-model-path": "drafts come from the text itself: --speculative ngram",
    "--draft-max": "--num-speculative-tokens",
    "--model-draft": "drafts come from the text itself: --speculative ngram",
    "-md": "drafts come from the text itself: --speculative ngram",
    # several GPUs
    "-tp": "--tensor-parallel-size",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "--num-shard": "--tensor-parallel-size",
    "--enable-expert-parallel": "--expert-parallel",
    "-sm": "each layer is split: --tensor-parallel-size",
    "--split-mode": "each layer is split: --tensor-parallel-size",
    "-ts": "each GPU has an equal part: --tensor-parallel-size",
    "--tensor-split": "each GPU has an equal part: --tensor-parallel-size",
    "--nnodes": "no model spans hosts: --tensor-parallel-size is for the GPUs of one",
    "--distributed-executor-backend": "ranks are processes of this host: leave it out; Ray is docs/how-to/ray.md",
    "-pp": "layers are not split over GPUs: --tensor-parallel-size splits each",
    "--pipeline-parallel-size": "layers are not split over GPUs: --tensor-parallel-size splits each",
    "-dp": "one server has one engine: start several, behind a proxy (docs/how-to/scaling.md)",
    "--data-parallel-size": "one server has one engine: start several, behind a proxy (docs/how-to/scaling.md)",
    # http
    "--api-server-count": "--http-workers",
    "--threads-http": "--http-workers",
    "--ssl-keyfile": "--tls-key",
    "--ssl-key-file": "--tls-key",
    "--ssl-certfile": "--tls-cert",
    "--ssl-cert-file": "--tls-cert",
    "--allowed-origins": "--cors-origin",
    "--uvicorn-log-level": "--log-level",
    "--timeout": "--request-timeout",
    "--metrics": "GET /metrics is always there: leave it out",
    "--enable-metrics": "GET /metrics is always there: leave it out",
    "--slots": "requests and their blocks are shown at /kv: leave it out",
    "--disable-log-requests": "prompts and answers are never in the log: leave it out",
    "--disable-log-stats": "--log-level warning shows less",
    "--log-disable": "--log-level error shows least",
    "--max-log-len": "prompts and answers are never in the log: leave it out",
    "-v": "--log-level debug shows more",
    "--verbose": "--log-level debug shows more",
    "--no-webui": "the pages at / and /kv cost nothing while nobody opens them: leave it out",
    "--enable-prompt-tokens-details": _ALWAYS,
    "--enable-sleep-mode": "memory is given back when the server ends",
    # of requests
    "--temp": f"{_REQUEST}: temperature",
    "--temperature": f"{_REQUEST}: temperature",
    "--top-k": f"{_REQUEST}: top_k",
    "--top-p": f"{_REQUEST}: top_p",
    "--min-p": f"{_REQUEST}: min_p",
    "--seed": f"{_REQUEST}: seed",
    "-n": f"{_REQUEST}: max_tokens",
    "--n-predict": f"{_REQUEST}: max_tokens",
    "--grammar": f"{_REQUEST}: structured_outputs",
    "--return-tokens-as-token-ids": f"{_REQUEST}: return_token_ids",
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
}  # fmt: skip

# flag → value of another server → the value of the same meaning here
CHOICES = {
    "--dtype": {"half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32", "bf16": "bfloat16"},
    "--device": {"gpu": "cuda", "metal": "mps"},
    "--kv-cache-dtype": {"fp8_e5m2": "fp8", "q8_0": "int8"},
    "--quantization": {
        "awq_marlin": "awq", "gptq_marlin": "gptq", "bitsandbytes": "bitsandbytes-nf4", "nf4": "bitsandbytes-nf4",
        "int8": "w8a8",
    },
}  # fmt: skip

_NO_SPEECH, _NO_PICTURES = "speech is not served", "pictures are not served"
_NO_RERANK = "scores of pairs are not served; POST /v1/embeddings gives vectors to compare"
# the last segments of a path that no route stands for → a sentence
ROUTES = {
    "api/pull": "a server has one model, which quire serve MODEL downloads",
    "api/push": "nothing is published from here",
    "api/create": "a server has one model, that of quire serve MODEL",
    "api/delete": "downloads are in the Hugging Face cache: hf cache rm",
    "api/copy": "--served-model-name of quire serve gives a model more names",
    "api/show": "GET /v1/models has the model and its context length",
    "api/ps": "requests are shown at GET /kv/snapshot, totals at GET /metrics",
    "props": "GET /v1/models has the model and its context length",
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
    "threads": "threads are not served; POST /v1/responses is",
    "load_lora_adapter": "adapters are loaded at the start: quire serve MODEL --lora NAME=FOLDER",
    "unload_lora_adapter": "adapters are loaded at the start: quire serve MODEL --lora NAME=FOLDER",
    "sleep": "memory is given back when the server ends",
    "v1": "it is the base URL of clients, and GET /v1/models lists the models",
    "engines": "GET /v1/models has the model and its context length",
    "get_model_info": "GET /v1/models has the model and its context length",
    "server_info": "GET /v1/models has the model, GET /metrics the figures",
    "generate_stream": "POST /v1/completions with stream continues a text",
    "health_generate": "GET /ready is 200 when requests are answered",
    "pooling": "POST /v1/embeddings gives vectors",
    "classify": "classes are not served; POST /v1/embeddings gives vectors",
    "invocations": "POST /v1/chat/completions and POST /v1/completions generate",
    "fine_tuning/jobs": "models are not trained here",
    "realtime": _NO_SPEECH,
}

_OLLAMA_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*(:[a-z0-9][a-zA-Z0-9._-]*)?")
_HUB_URL = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?:models/)?([\w.-]+/[\w.-]+)(?::[\w.-]+)?"
    r"(?:/(?:tree|blob|resolve)/([\w.-]+).*)?/?(?:\?.*)?"
)
_GGUF = "GGUF is llama.cpp's format, which is not read: give the model's own repository or folder with safetensors"


def about_command(word: str, rest: Sequence[str], known: Iterable[str]) -> str:
    """Return the sentence on a first word that is no command, without its full stop."""
    if word in COMMANDS:
        arguments = [argument for argument in rest if not argument.startswith("-")][:1]
        shown = [MODELS.get(argument, argument) for argument in arguments] or ["MODEL"]
        return f"{word} is no command here: {COMMANDS[word].format(rest=shown[0])}"
    if word in MODELS or _HUB_URL.fullmatch(word) or "/" in word or Path(word).is_dir():
        sentence = about_model(word)
        return f"{word} is no command" + (f": {sentence}" if sentence else f": quire serve {word} serves a model")
    return f"{word} is no command{nearest(word, list(known))}"


def about_flag(flag: str, known: Iterable[str]) -> str | None:
    """Return the sentence on a flag of another server, without its full stop; None if it is in no table.

    known: the flags here, which are never called another's.
    """
    if flag in known or flag not in FLAGS:
        return None
    meaning = FLAGS[flag]
    is_flag = meaning.startswith("--") and " " not in meaning
    return f"{flag} is {meaning} here" if is_flag else f"{flag} is no flag here: {meaning}"


def is_negative(name: str) -> bool:
    """Return True for a flag's name, without dashes, that turns something off."""
    return name.startswith(("no-", "disable-"))


def similar_flags(typed: str, known: Iterable[str]) -> dict[str, str]:
    """Return what is shown of other servers' flags, by name without dashes, among which a typed one may be meant.

    known: the names here.
    """
    from difflib import get_close_matches

    names = {flag.lstrip("-"): flag for flag in FLAGS if flag.startswith("--")}
    shown = {}
    for name in get_close_matches(typed, names, cutoff=_SIMILARITY):
        if name not in known and is_negative(name) == is_negative(typed):
            flag, meaning = names[name], FLAGS[names[name]]
            is_flag = meaning.startswith("--") and " " not in meaning
            shown[name] = f"{flag}, which is {meaning} here," if is_flag else f"{flag}, no flag here ({meaning}),"
    return shown


def about_choice(message: str) -> str:
    """Return the end of argparse's message on a value that is no choice: what another server's value is here."""
    found = re.search(r"(--[\w-]+): invalid choice: '([^']*)'", message)
    value = CHOICES.get(found[1], {}).get(found[2].lower()) if found else None
    return f": it is {value} here" if value else ""


def about_model(model: str) -> str | None:
    """Return the sentence on a MODEL that is no folder and no hub id, without its full stop; None: nothing is known."""
    url = _HUB_URL.fullmatch(model)
    if model.lower().endswith(".gguf") or (url and "gguf" in url[1].lower()):
        return _GGUF
    if url:
        revision = f" --revision {url[2]}" if url[2] not in (None, "main") else ""
        return f"a hub id is given without its URL: quire serve {url[1]}{revision}"
    if model in MODELS:
        return f"{model} is ollama's name, and models are named as on the hub: quire serve {MODELS[model]}"
    if ":" in model and _OLLAMA_NAME.fullmatch(model):
        name = model.partition(":")[0]
        return f"it looks like a name of ollama, and models are named as on the hub: quire models {name} lists ids"
    return None


def about_route(path: str) -> str | None:
    """Return the sentence on a path of another server, without its full stop; None if it is in no table."""
    segments = [segment for segment in path.split("/") if segment]
    for count in (2, 1):
        sentence = ROUTES.get("/".join(segments[-count:]))
        if sentence is not None and len(segments) <= count + 2:
            return sentence
    return None
