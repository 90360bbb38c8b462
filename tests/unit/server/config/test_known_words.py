"""What users of other servers type: each suggestion is a command, flag or route that exists here, none is a guess."""

import argparse
import json
import re
import shlex
import socket
from pathlib import Path

import pytest

from engine.interface.errors import StartupError
from server.cli import _parser, main, serve_parser
from server.config.known_flags import CHOICES, FLAGS, about_flag
from server.config.known_words import COMMANDS, MODELS, ROUTES, about_command, about_model, about_route
from server.config.model_source import resolve_model
from tests.known_models import SERVED, UNSERVED


def commands() -> set[str]:
    parser = _parser()
    return set(next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)))


def flags() -> set[str]:
    return set(serve_parser({})._option_string_actions)


def test_no_word_of_the_tables_is_one_of_ours() -> None:
    assert not commands() & set(COMMANDS)
    assert not flags() & set(FLAGS)
    assert not [model for model in MODELS if "/" in model]


def test_every_flag_that_is_suggested_exists() -> None:
    named = {flag for text in FLAGS.values() for flag in re.findall(r"--[a-z][a-z-]+[a-z]", text)}
    assert named - flags() == set()
    in_sentences = {
        flag for text in (*COMMANDS.values(), *ROUTES.values()) for flag in re.findall(r"--[a-z-]+[a-z]", text)
    }
    assert in_sentences - flags() - {"--version", "--help"} == set()


def test_every_value_that_is_suggested_is_one_and_none_is_ours() -> None:
    actions = serve_parser({})._option_string_actions
    for flag, values in CHOICES.items():
        choices = set(actions[flag].choices or ())
        assert set(values.values()) <= choices, flag
        assert not set(values) & choices, flag


# of a meaning that a near flag has not: another size, another type, another limit
UNLIKE = ["--mamba-cache-dtype", "--cp-size", "--max-waiting-tokens", "--enable-mfu-metrics", "--draft-revision"]


@pytest.mark.parametrize("flag", ["--model-x", "--rope-factor", "--no-ui", "--generation", "--token-pool", *UNLIKE])
def test_a_flag_that_is_only_a_little_like_one_gets_no_suggestion(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        serve_parser({}).parse_args(["./m", flag])
    assert "is the nearest" not in capsys.readouterr().err


def test_model_is_an_argument_of_every_command_that_takes_one(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "chat", "doctor"):
        with pytest.raises(SystemExit):
            main([command, "--model", "x"])
        error = capsys.readouterr().err
        assert "MODEL is an argument" in error
        assert f"quire {command} MODEL" in error


def test_every_command_that_is_suggested_is_one() -> None:
    texts = [*COMMANDS.values(), *FLAGS.values(), *ROUTES.values()]
    words = {word for text in texts for word in re.findall(r"quire ([a-z]+)\b", text)} - {"import"}
    assert words <= commands()
    assert len(words) >= 7


def test_every_route_that_is_suggested_exists(harness) -> None:
    app = harness()
    for sentence in ROUTES.values():
        for method, path in re.findall(r"(GET|POST) (/[\w/.]+)", sentence):
            assert app.request(method, f"http://quire{path}").status_code != 404, path


def test_names_of_ollama_are_hub_ids_that_are_served() -> None:
    listed = {entry.model for entry in SERVED}
    new = {"gemma4", "qwen3.5:4b", "qwen3-vl:2b", "ministral-3:14b", "llama4", "hermes3", "qwen3-embedding:0.6b"}
    assert {MODELS[name] for name in new} <= listed
    assert [model for model in MODELS.values() if not re.fullmatch(r"[\w.-]+/[\w.-]+", model)] == []
    assert set(MODELS.values()).isdisjoint(entry.model for entry in UNSERVED)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("run llama3.2:1b", "quire chat meta-llama/Llama-3.2-1B-Instruct"),
        ("run", "quire chat MODEL"),
        ("pull qwen3:0.6b", "quire serve Qwen/Qwen3-0.6B"),
        ("pull gemma4", "quire serve google/gemma-4-E4B-it"),
        ("run deepseek-r1", "quire chat deepseek-ai/DeepSeek-R1-0528-Qwen3-8B"),
        ("pull qwen3.5", "quire serve MODEL; models are named as on the hub, OWNER/NAME: quire models qwen3.5 lists"),
        ("run owner/x-GGUF:Q4_K_M", "quire chat MODEL; GGUF is llama.cpp's format"),
        ("pull xyzzy", "Type quire serve MODEL (see"),
        ("ps", "quire top"),
        ("sevre ./m", "serve is the nearest"),
        ("docter", "doctor is the nearest"),
        ("Qwen/Qwen3-0.6B", "quire serve Qwen/Qwen3-0.6B"),
        ("llama3.1", "quire serve meta-llama/Llama-3.1-8B-Instruct"),
        ("info qwen3:4b", "quire doctor Qwen/Qwen3-4B"),
        ("login", "hf auth login"),
        ("launch-server", "quire serve MODEL"),
        ("-m ./m", "-m is no flag here: a model is served with quire serve ./m"),
        ("--model=Qwen/Qwen3-0.6B --port 1", "quire serve Qwen/Qwen3-0.6B"),
        ("-m m.gguf", "GGUF is llama.cpp's format"),
        ("-m", "quire serve MODEL"),
        ("-c 4096", "-c is --max-model-len here, and the command comes first: quire serve"),
        ("--frobnicate 5", "--frobnicate is no flag of quire, and a command comes first"),
    ],
)
def test_a_first_word_that_is_no_command(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(shlex.split(line))
    assert caught.value.code == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert said in error
    assert error.startswith("quire: error: ")


@pytest.mark.parametrize(("kind", "here"), [("latency", "offline"), ("throughput", "offline"), ("online", "serve")])
def test_kinds_of_measurements_have_other_names(kind: str, here: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", kind])
    assert f": it is {here} here" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["xyzzy", "q", "frobnicate", "merge"])
def test_a_word_that_is_like_none_gets_no_suggestion(word: str) -> None:
    assert about_command(word, [], commands()) == f"{word} is no command"
    assert about_model(word) is None
    assert about_flag(f"--{word}", flags()) is None
    assert about_route(f"/{word}") is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("./m --ctx-size 4096", "--ctx-size is --max-model-len here"),
        ("-hf owner/name", "-hf is no flag here: a hub id is an argument"),
        ("./m --tp=2", "--tp is --tensor-parallel-size here"),
        ("./m -ngl 99", "the whole model is on the GPU"),
        ("./m --max-model-ln 3", "--max-model-len is the nearest"),
        ("./m --speculative-model x", "drafts come from the text itself"),
        ("./m --dtype half", "(choose from 'auto', 'bfloat16', 'float16', 'float32'): it is float16 here"),
        ("./m --device gpu", "it is cuda here"),
        ("./m --device CUDA", "it is cuda here"),
        ("./m --attention-backend FLASH_ATTN", "it is flash-attn here"),
        ("./m --dp-size 2", "one server has one engine"),
        ("./m --ep-size 2", "--expert-parallel spreads experts"),
        ("./m --chat-template-kwargs {}", "a field of requests, not a setting: chat_template_kwargs"),
        ("./m --num-ctx 4096", "--num-ctx is --max-model-len here"),
        ("./m --quantization q4_k_m", "'compressed-tensors') (see"),
    ],
)
def test_a_flag_of_another_server(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve_parser({}).parse_args(shlex.split(line))
    (error,) = capsys.readouterr().err.splitlines()
    assert said in error


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("llama3.2:1b", "quire serve meta-llama/Llama-3.2-1B-Instruct"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "quire serve Qwen/Qwen3-0.6B."),
        ("huggingface.co/Qwen/Qwen3-0.6B/tree/v2/", "quire serve Qwen/Qwen3-0.6B --revision v2."),
        ("hf.co/someone/Model-GGUF:Q4_K_M", "GGUF is llama.cpp's format"),
        ("./model.Q4_K_M.gguf", "GGUF is llama.cpp's format"),
        ("newmodel:70b", "named as on the hub, OWNER/NAME."),
        ("llama3.2:latest", "quire serve meta-llama/Llama-3.2-3B-Instruct"),
        ("llama3.2:3b-instruct-q4_K_M", "quire models llama3.2 lists ids"),
        ("qwen3.5", "quire models qwen3.5 lists ids"),
        ("Qwen3-0.6B", "its owner before it: Qwen/Qwen3-0.6B"),
        ("hf://Qwen/Qwen3-0.6B", "quire serve Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B:latest", "a hub id has no tag: quire serve Qwen/Qwen3-0.6B"),
        ("unsloth/Qwen3-0.6B-GGUF:Q4_K_M", "GGUF is llama.cpp's format"),
        ("https://ollama.com/library/llama3.2", "quire serve meta-llama/Llama-3.2-3B-Instruct"),
        ("gpt-4o", "is no folder here, and no hub id either"),
        ("glm", "is no folder here, and no hub id either"),
    ],
)
def test_a_model_named_as_elsewhere(model: str, said: str) -> None:
    with pytest.raises(StartupError) as caught:
        resolve_model(model)
    assert said in caught.value.message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("model_index.json", "it is a diffusion model"),
        ("adapter_config.json", "quire serve BASE_MODEL --lora NAME="),
        ("model.gguf", "llama.cpp's format"),
        ("params.json", "its publisher's own format"),
        ("README.md", "is this a model folder in Hugging Face layout?"),
    ],
)
def test_a_folder_of_another_kind(tmp_path: Path, file: str, said: str) -> None:
    (tmp_path / file).write_text(json.dumps({}))
    with pytest.raises(StartupError) as caught:
        resolve_model(str(tmp_path))
    assert said in caught.value.message


def test_a_folder_of_the_cache_is_named_by_its_id(tmp_path: Path) -> None:
    (tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots").mkdir(parents=True)
    with pytest.raises(StartupError, match=r"quire serve Qwen/Qwen3-0\.6B"):
        resolve_model(str(tmp_path / "models--Qwen--Qwen3-0.6B"))


def test_a_word_of_ollama_is_answered_before_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "llama3.2:1b", "--port", port]) == 2
        assert "quire serve meta-llama/Llama-3.2-1B-Instruct" in capsys.readouterr().err
        assert main(["serve", "--port", port]) == 3
        assert f"Port {port} on 127.0.0.1 is in use" in capsys.readouterr().err


def test_a_flag_of_serve_before_the_command_is_told_where_it_goes(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("--port", "--port=8000", "--max-model-len"):
        with pytest.raises(SystemExit):
            main([word, "8000"])
        flag = word.partition("=")[0]
        assert f"{flag} is a flag of serve, and the command comes first: quire serve {flag}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("QUIRE_CTX_SIZE", ": QUIRE_MAX_MODEL_LEN has this meaning here"),
        ("QUIRE_MODEL_PATH", ": QUIRE_MODEL has this meaning here"),
        ("QUIRE_MAX_QUEUE", ": QUIRE_MAX_QUEUED_REQUESTS has this meaning here"),
        ("QUIRE_TRUST_REMOTE_CODE", ": a model folder's own code is never run: leave it out"),
        ("QUIRE_LOGGING_LEVEL", ": QUIRE_LOG_LEVEL is the nearest"),
        ("QUIRE_USE_V1", ""),
        ("QUIRE_VERSION", ""),
        ("QUIRE_HOME", ""),
        ("QUIRE_NO_USAGE_STATS", ""),
    ],
)
def test_a_variable_that_is_no_setting(variable: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve_parser({variable: "1"}).parse_args(["./m"])
    assert f"{variable} is no setting of this server{said} (see" in capsys.readouterr().err


def test_each_name_of_ollama_that_models_lists_is_found_there(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("llama3.2", "phi3", "gemma3", "deepseek-r1", "Qwen/Qwen3-0.6B", "meta-llama"):
        assert main(["models", word]) == 0
    assert main(["models", "xyzzy"]) == 2
    assert "No listed model has 'xyzzy' in its id" in capsys.readouterr().err
