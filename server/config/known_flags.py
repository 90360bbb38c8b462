"""Known flags: those of vLLM, SGLang, llama.cpp and TGI, with the flag of the same meaning here, or a sentence.

A flag that is in no table gets no suggestion but a near miss, since a wrong one is worse than none. The names of
variables, of keys of a file and of keywords of LLM are looked up as flags are. Imports the standard library and
server.config.setting.
"""

import re
from collections.abc import Iterable, Mapping

from server.config.setting import nearest

_SIMILARITY = 0.85  # of a typed flag and another server's: most of them are written without a slip
_ALWAYS = "it is always so here: leave it out"
_REQUEST = "it is a field of requests, not a setting"
_ENVIRONMENT = "it is the environment's"
_ON_GPU = "weights stay on the GPU: --quantization makes them smaller"
_GRAPHS = "the sizes of graphs follow --max-num-seqs and --max-num-batched-tokens"
_COMPILED = "kernels are compiled at the start: leave it out"
_DRAFTS = "drafts come from the text itself: --speculative ngram"
_ONE_MODEL = "a server has one model: start a server for each, on its own port"
_ONE_ENGINE = "one server has one engine: start several, behind a proxy (docs/how-to/scaling.md)"
_ONE_HOST = "no model spans hosts: --tensor-parallel-size is for the GPUs of one"
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
    "--tokenizer-revision": "the tokenizer is the model's own: leave it out",
    "--code-revision": "a model folder's own code is never run: leave it out",
    "--json-model-override-args": "the model's config.json is read as it is: change it there",
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
    "--lora-scaled": "--lora NAME=FOLDER loads an adapter, at its own scale",
    "--quantize": "--quantization",
    "--download-dir": f"{_ENVIRONMENT}: HF_HOME",
    "--huggingface-hub-cache": f"{_ENVIRONMENT}: HF_HOME",
    "--offline": f"{_ENVIRONMENT}: HF_HUB_OFFLINE=1",
    "--models-dir": _ONE_MODEL,
    "--models-max": _ONE_MODEL,
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
    "--chat-template-kwargs": f"{_REQUEST}: chat_template_kwargs",
    "--reasoning-budget": f"{_REQUEST}: thinking_token_budget",
    # memory and batching
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--context-length": "--max-model-len",
    "--max-seq-len": "--max-model-len",
    "--max-total-tokens": "--max-model-len",
    "--max-context-len": "--max-model-len",
    "--num-ctx": "--max-model-len",
    "--max-input-length": "--max-model-len limits prompt and answer together",
    "--max-input-tokens": "--max-model-len limits prompt and answer together",
    "--page-size": "--block-size",
    "-np": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "--max-running-requests": "--max-num-seqs",
    "--max-concurrent-requests": "--max-num-seqs",
    "--num-parallel": "--max-num-seqs",
    "--max-queue": "--max-queued-requests",
    "-b": "--max-num-batched-tokens",
    "-ub": "--max-num-batched-tokens",
    "--batch-size": "--max-num-batched-tokens",
    "--ubatch-size": "--max-num-batched-tokens",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--max-batch-prefill-tokens": "--max-num-batched-tokens",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--cuda-memory-fraction": "--gpu-memory-utilization",
    "--max-batch-total-tokens": "the cache has what --gpu-memory-utilization leaves, or --kv-cache-memory",
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
    "--enable-hierarchical-cache": "--kv-host-memory",
    "--hicache-size": "--kv-host-memory",
    "--hicache-ratio": "--kv-host-memory has a size, such as 16GiB",
    "--cache-ram": "--kv-host-memory",
    "--no-kv-offload": _ON_GPU,
    "--override-tensor": _ON_GPU,
    "-ot": _ON_GPU,
    "--cpu-moe": _ON_GPU,
    "--n-cpu-moe": _ON_GPU,
    "--cpu-offload-gb": _ON_GPU,
    "--disable-radix-cache": "--no-prefix-caching",
    "--no-enable-prefix-caching": "--no-prefix-caching",
    "--enable-prefix-caching": _ALWAYS,
    "--enable-chunked-prefill": _ALWAYS,
    "-cb": _ALWAYS,
    "--cont-batching": _ALWAYS,
    "--enable-mixed-chunk": _ALWAYS,
    "--cache-prompt": _ALWAYS,
    "--async-scheduling": "--overlap",
    "--disable-overlap-schedule": "--no-overlap",
    "--scheduling-policy": f"{_REQUEST}: priority; --priority says whose",
    "--schedule-policy": f"{_REQUEST}: priority; --priority says whose",
    "-fa": "--attention-backend",
    "--flash-attn": "--attention-backend",
    "--flash-attention": "--attention-backend",
    "--disable-cuda-graph": "--enforce-eager",
    "--cuda-graph-sizes": _GRAPHS,
    "--cuda-graph-max-bs": _GRAPHS,
    "--cuda-graph-bs": _GRAPHS,
    "--max-cudagraph-capture-size": _GRAPHS,
    "--cudagraph-capture-sizes": _GRAPHS,
    "-O": _COMPILED,
    "--compilation-config": _COMPILED,
    "--enable-torch-compile": _COMPILED,
    "--warmup": _COMPILED,
    "--no-warmup": _COMPILED,
    "--skip-server-warmup": _COMPILED,
    "-ngl": "the whole model is on the GPU if there is one: leave it out; --device cpu uses none",
    "--n-gpu-layers": "the whole model is on the GPU if there is one: leave it out; --device cpu uses none",
    "--gpu-layers": "the whole model is on the GPU if there is one: leave it out; --device cpu uses none",
    "-t": f"{_ENVIRONMENT}: OMP_NUM_THREADS",
    "--threads": f"{_ENVIRONMENT}: OMP_NUM_THREADS",
    "-tb": f"{_ENVIRONMENT}: OMP_NUM_THREADS",
    "--threads-batch": f"{_ENVIRONMENT}: OMP_NUM_THREADS",
    "--mlock": "weights are read into memory: leave it out",
    "--no-mmap": "weights are read into memory: leave it out",
    "--speculative-config": "--speculative ngram, with --num-speculative-tokens",
    "--speculative-model": _DRAFTS,
    "--speculative-draft-model-path": _DRAFTS,
    "--speculative-algorithm": _DRAFTS,
    "--speculative-num-draft-tokens": "--num-speculative-tokens",
    "--draft-max": "--num-speculative-tokens",
    "--model-draft": _DRAFTS,
    "-md": _DRAFTS,
    # several GPUs
    "-tp": "--tensor-parallel-size",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "--num-shard": "--tensor-parallel-size",
    "--enable-expert-parallel": "--expert-parallel",
    "--ep": "--expert-parallel spreads experts over the ranks of --tensor-parallel-size",
    "--ep-size": "--expert-parallel spreads experts over the ranks of --tensor-parallel-size",
    "-sm": "each layer is split: --tensor-parallel-size",
    "--split-mode": "each layer is split: --tensor-parallel-size",
    "-ts": "each GPU has an equal part: --tensor-parallel-size",
    "--tensor-split": "each GPU has an equal part: --tensor-parallel-size",
    "--nnodes": _ONE_HOST,
    "--node-rank": _ONE_HOST,
    "--headless": _ONE_HOST,
    "--dist-init-addr": _ONE_HOST,
    "--base-gpu-id": f"{_ENVIRONMENT}: CUDA_VISIBLE_DEVICES",
    "-mg": f"{_ENVIRONMENT}: CUDA_VISIBLE_DEVICES",
    "--main-gpu": f"{_ENVIRONMENT}: CUDA_VISIBLE_DEVICES",
    "--distributed-executor-backend": "ranks are processes of this host: leave it out; Ray is docs/how-to/ray.md",
    "-pp": "layers are not split over GPUs: --tensor-parallel-size splits each",
    "--pipeline-parallel-size": "layers are not split over GPUs: --tensor-parallel-size splits each",
    "-dp": _ONE_ENGINE,
    "--data-parallel-size": _ONE_ENGINE,
    "--dp": _ONE_ENGINE,
    "--dp-size": _ONE_ENGINE,
    "--data-parallel-rank": _ONE_ENGINE,
    # http
    "--api-server-count": "--http-workers",
    "--threads-http": "--http-workers",
    "--workers": "--http-workers",
    "--hostname": "--host",
    "--ssl-keyfile": "--tls-key",
    "--ssl-key-file": "--tls-key",
    "--ssl-certfile": "--tls-cert",
    "--ssl-cert-file": "--tls-cert",
    "--allowed-origins": "--cors-origin",
    "--origins": "--cors-origin",
    "--api-token": "--api-key",
    "--cors-allow-origin": "--cors-origin",
    "--uvicorn-log-level": "--log-level",
    "--log-level-http": "--log-level",
    "--json-output": "--log-format json",
    "--timeout": "--request-timeout",
    "--metrics": "GET /metrics is always there: leave it out",
    "--enable-metrics": "GET /metrics is always there: leave it out",
    "--slots": "requests and their blocks are shown at /kv: leave it out",
    "--disable-log-requests": "prompts and answers are never in the log: leave it out",
    "--enable-log-requests": "prompts and answers are never in the log; --log-level debug shows more",
    "--log-requests": "prompts and answers are never in the log; --log-level debug shows more",
    "--usage-stats": "nothing is reported anywhere: leave it out",
    "--disable-log-stats": "--log-level warning shows less",
    "--log-disable": "--log-level error shows least",
    "--max-log-len": "prompts and answers are never in the log: leave it out",
    "-v": "--log-level debug shows more",
    "--verbose": "--log-level debug shows more",
    "--no-webui": "the pages at / and /kv cost nothing while nobody opens them: leave it out",
    "--enable-prompt-tokens-details": _ALWAYS,
    "--enable-cache-report": _ALWAYS,
    "--enable-request-id-headers": _ALWAYS,
    "--enable-force-include-usage": f"{_REQUEST}: stream_options",
    "--keep-alive": "the model stays loaded until the server ends: leave it out",
    "--keepalive": "the model stays loaded until the server ends: leave it out",
    "--enable-sleep-mode": "memory is given back when the server ends",
    # of requests
    "--temp": f"{_REQUEST}: temperature",
    "--temperature": f"{_REQUEST}: temperature",
    "--top-k": f"{_REQUEST}: top_k",
    "--top-p": f"{_REQUEST}: top_p",
    "--min-p": f"{_REQUEST}: min_p",
    "--repeat-penalty": f"{_REQUEST}: repetition_penalty",
    "--repetition-penalty": f"{_REQUEST}: repetition_penalty",
    "--presence-penalty": f"{_REQUEST}: presence_penalty",
    "--frequency-penalty": f"{_REQUEST}: frequency_penalty",
    "--ignore-eos": f"{_REQUEST}: ignore_eos",
    "--seed": f"{_REQUEST}: seed",
    "-n": f"{_REQUEST}: max_tokens",
    "--n-predict": f"{_REQUEST}: max_tokens",
    "--grammar": f"{_REQUEST}: structured_outputs",
    "--return-tokens-as-token-ids": f"{_REQUEST}: return_token_ids",
}

# flag → value of another server → the value of the same meaning here
CHOICES = {
    "--dtype": {"half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32", "bf16": "bfloat16"},
    "--device": {"gpu": "cuda", "metal": "mps", "cuda:0": "cuda"},
    "--attention-backend": {
        "flash_attn": "flash-attn", "fa2": "flash-attn", "fa3": "flash-attn", "triton_attn": "triton",
        "torch_sdpa": "torch", "sdpa": "torch", "torch_native": "torch",
    },
    "--kv-cache-dtype": {"fp8_e5m2": "fp8", "q8_0": "int8"},
    "--quantization": {
        "awq_marlin": "awq", "gptq_marlin": "gptq", "bitsandbytes": "bitsandbytes-nf4", "nf4": "bitsandbytes-nf4",
        "int8": "w8a8", "auto_round": "auto-round", "inc": "auto-round",
    },
}  # fmt: skip
# kinds of quire bench
_KINDS = {"latency": "offline", "throughput": "offline", "server": "serve", "serving": "serve", "online": "serve"}


def about_flag(flag: str, known: Iterable[str]) -> str | None:
    """Return the sentence on a flag of another server, without its full stop; None if it is in no table.

    known: the flags here, which are never called another's.
    """
    if flag in known or flag not in FLAGS:
        return None
    meaning = FLAGS[flag]
    return f"{flag} is {meaning} here" if _is_flag(meaning) else f"{flag} is no flag here: {meaning}"


def about_setting(name: str, known: Mapping[str, str]) -> str:
    """Return the end of the sentence on a variable, a key or a keyword that is no setting; empty if nothing is known.

    known: what is shown for each setting, by the flag's name without dashes.
    """
    typed = name.lower().replace("_", "-")
    meaning = FLAGS.get(f"--{typed}", "")
    if "MODEL is an argument" in meaning and "model" in known:
        return f": {known['model']} has this meaning here"
    if _is_flag(meaning):
        shown = known.get(meaning.removeprefix("--"))
        return f": {shown} has this meaning here" if shown else ""
    if meaning and "quire serve" not in meaning:
        return f": {meaning}"
    return nearest(typed, {key: shown for key, shown in known.items() if is_negative(key) == is_negative(typed)})


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
            shown[name] = (
                f"{flag}, which is {meaning} here," if _is_flag(meaning) else f"{flag}, no flag here ({meaning}),"
            )
    return shown


def about_choice(message: str) -> str:
    """Return the end of argparse's message on a value that is no choice: what another server's value is here."""
    found = re.search(r"(--[\w-]+|KIND): invalid choice: '([^']*)'", message)
    if not found:
        return ""
    typed = found[2].lower()
    value = (_KINDS if found[1] == "KIND" else CHOICES.get(found[1], {})).get(typed) or (
        typed if f"'{typed}'" in message[found.end() :] else None
    )
    return f": it is {value} here" if value else ""


def _is_flag(meaning: str) -> bool:
    return meaning.startswith("--") and " " not in meaning
