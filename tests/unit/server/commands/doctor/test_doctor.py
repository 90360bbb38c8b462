"""`quire doctor`: what it finds, what it judges, how it says it. The engine's part mostly runs in this process."""

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from engine.interface.fit_report import Gpu
from engine.startup.fit import examine
from server.cli import main
from server.commands.doctor import checks as doctor_host
from server.commands.doctor import run as doctor
from server.commands.doctor.report import to_text
from server.config.model_source import DEMO_FOLDER
from tests.support.embedding_folder import write_embedding_files
from tests.unit.engine.startup.test_fit import LLAMA_3_1_8B, PARAMETERS

ROOT = Path(__file__).parents[5]


@pytest.fixture
def here(monkeypatch):
    """Ask the engine's part in this process: importing torch again for every test takes long. No hub lists files."""
    monkeypatch.setattr(doctor, "_ask_engine", lambda ask, problems: examine(ask))
    monkeypatch.setattr(doctor_host, "list_files", lambda *asked: None)


@pytest.fixture
def llama(tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    return folder


def run(capsys, *arguments):
    """Return the exit code and the report as JSON."""
    code = main(["doctor", "--port", "0", "--json", *map(str, arguments)])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_the_real_command_reports_on_the_demo_model():
    command = [sys.executable, "-m", "server", "doctor", str(DEMO_FOLDER), "--port", "0", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "\x1b" not in done.stdout
    assert lines[-1] == "Yes: checkpoint can be served on this machine."
    for label, text in (("Architecture", "Qwen3ForCausalLM, supported"), ("Parameters", "8,360,768 (8 M)")):
        assert f"{label:<15} {text}" in lines
    assert any(line.startswith("Weights") and "15.9 MiB of BF16 on disk" in line for line in lines)
    assert {"torch", "Triton", "Python", "Port", "GPU"} <= {line.split(" ")[0] for line in lines}


def test_the_demos_numbers_are_its_files_own(here, capsys):
    code, report = run(capsys, DEMO_FOLDER, "--device", "cpu")
    assert code == 0
    stored = report["model"]["stored"]
    assert stored["num_bytes"] < (DEMO_FOLDER / "model.safetensors").stat().st_size < stored["num_bytes"] + 100_000
    assert stored["num_parameters"] == report["model"]["num_parameters"]
    assert report["model"]["weights"] == 4 * stored["num_parameters"]
    assert (report["serves"], report["problems"], report["notes"]) == ("text", [], [])


def test_a_configuration_alone_is_enough(here, capsys, llama):
    code, report = run(capsys, llama, "--gpu-memory", "80")
    assert code == 0
    assert report["can_be_served"] is True
    assert report["model"]["num_parameters"] == PARAMETERS
    assert report["sentence"] == "llama can be served on a GPU of 80 GiB."
    assert "a configuration alone" in report["notes"][0]


def test_what_does_not_fit_is_exit_code_2_and_a_sentence(here, capsys, llama):
    code, report = run(capsys, llama, "--gpu-memory", "16GiB")
    assert code == 2
    assert report["problems"] == [report["sentence"]]
    assert "16 GiB" in report["sentence"]
    code, report = run(capsys, llama, "--gpu-memory", "80", "--tensor-parallel-size", "2")
    assert code == 0
    assert report["problems"] == []


def test_experts_of_several_gpus_are_asked_for_as_in_serve(here, capsys, llama):
    assert main(["doctor", "--port", "0", str(llama), "--expert-parallel"]) == 2
    assert "--expert-parallel needs --tensor-parallel-size 2 or more, and it is 1" in capsys.readouterr().err
    gpus = ("--gpu-memory", "80", "--tensor-parallel-size", "2")
    code, report = run(capsys, llama, *gpus, "--expert-parallel")
    assert code == 2
    assert "--expert-parallel: LlamaForCausalLM has no experts" in report["sentence"]


def test_an_incomplete_folder_is_refused_as_serving_would(here, capsys, llama):
    (llama / "tokenizer.json").write_text("{}")
    code, report = run(capsys, llama, "--gpu-memory", "80")
    assert code == 2
    assert report["sentence"].startswith("No weights in")
    assert main(["doctor", "--port", "0", str(llama / "config.json")]) == 2  # a file
    assert main(["doctor", "--port", "0", "no-such-folder"]) == 2
    assert main(["doctor", "--port", "0", str(llama), "--revision", "main"]) == 2
    (llama / "config.json").unlink()
    code, report = run(capsys, llama)
    assert code == 2
    assert "No config.json" in report["sentence"]
    (llama / "model_index.json").write_text("{}")
    code, report = run(capsys, llama)
    assert code == 2
    assert "it is a diffusion model" in report["sentence"]


def test_pickled_weights_are_not_taken_for_none(here, capsys, llama):
    (llama / "pytorch_model.bin").write_bytes(b"")
    code, report = run(capsys, llama, "--gpu-memory", "80")
    assert code == 2
    assert "never read" in report["sentence"]


def test_an_embedding_model_is_called_so(here, capsys, llama):
    write_embedding_files(llama, pooling="lasttoken")
    code, report = run(capsys, llama, "--gpu-memory", "80")
    assert (code, report["serves"]) == (0, "embeddings (of the last token)")
    assert report["model"]["num_parameters"] == PARAMETERS - 128_256 * 4096  # without a head
    write_embedding_files(llama, pooling="max_tokens")
    code, report = run(capsys, llama, "--gpu-memory", "80")
    assert code == 2
    assert "max_tokens" in report["sentence"]
    (llama / "modules.json").unlink()
    code, report = run(capsys, llama, "--gpu-memory", "80", "--pooling", "mean")
    assert report["serves"] == "text, embeddings (the mean of all tokens)"


@pytest.mark.parametrize("is_cached", [True, False])
def test_of_a_hub_id_nothing_but_the_configuration_is_fetched(here, capsys, llama, monkeypatch, is_cached):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked = []

    def snapshot_download(repo_id, **options):
        asked.append(options)
        if options.get("local_files_only") and not is_cached:
            raise LocalEntryNotFoundError("not cached")
        return str(llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    code, report = run(capsys, "owner/model", "--gpu-memory", "80")
    assert code == 0
    assert report["sentence"] == "owner/model can be served on a GPU of 80 GiB."
    assert report["notes"] == ["Serving it downloads its weights first."]
    assert asked[0]["local_files_only"] is True
    fetched = ["config.json", "modules.json", "config_sentence_transformers.json", "[0-9]*/config.json"]
    assert [options["allow_patterns"] for options in asked[1:]] == ([] if is_cached else [fetched])


def test_an_embedding_model_of_the_hub_is_judged_as_its_folder_would_be(here, capsys, llama, tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils import filter_repo_objects

    write_embedding_files(llama, pooling="lasttoken")
    (llama / "model.safetensors").write_bytes(b"")

    def snapshot_download(repo_id, *, cache_dir=None, allow_patterns=None, **options):
        if options.get("local_files_only"):
            raise LocalEntryNotFoundError("not cached")
        names = [str(path.relative_to(llama)) for path in llama.rglob("*") if path.is_file()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            (cache_dir / name).parent.mkdir(exist_ok=True)
            shutil.copy(llama / name, cache_dir / name)
        assert not (cache_dir / "model.safetensors").exists()
        return str(cache_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    code, report = run(capsys, "owner/model", "--gpu-memory", "80")
    assert (code, report["serves"]) == (0, "embeddings (of the last token)")
    assert report["model"]["has_lm_head"] is False


def test_offline_an_unknown_hub_id_is_one_sentence(here, capsys, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*args, **options):
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    code, report = run(capsys, "owner/model")
    assert code == 2
    assert "cannot be reached" in report["sentence"]
    assert report["machine"]["torch"]


def test_weights_larger_than_the_disk_are_refused_before_the_download(here, capsys, llama, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo_id, **options: str(llama))
    monkeypatch.setattr(doctor_host, "_free_bytes", lambda folder: 10**9)
    code, report = run(capsys, "owner/model", "--gpu-memory", "80")
    assert code == 2
    assert "15 GiB to download" in report["sentence"]


def test_a_quantised_checkpoint_is_downloaded_as_small_as_it_is(here, capsys, llama, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo_id, **options: str(llama))
    monkeypatch.setattr(doctor_host, "_free_bytes", lambda folder: 10 * 2**30)
    code, report = run(capsys, "owner/model", "--gpu-memory", "80", "--quantization", "fp8")
    assert (code, report["problems"][0].split(" to ")[0]) == (2, "Its weights take about 15 GiB")
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (llama / "config.json").write_text(json.dumps({**LLAMA_3_1_8B, "quantization_config": quantization}))
    code, report = run(capsys, "owner/model", "--gpu-memory", "80")
    assert (code, report["problems"]) == (0, [])


def test_weights_are_said_to_be_as_they_are_served(here, capsys, llama):
    command = ["doctor", "--port", "0", str(llama), "--gpu-memory", "80"]
    assert main(command) == 0
    assert re.search(r"^Weights +15 GiB in bfloat16; not here$", capsys.readouterr().out, re.MULTILINE)
    assert main([*command, "--quantization", "fp8"]) == 0
    quantized = r"^Weights .* GiB in fp8 \(.*\), quantized on load, the rest bfloat16; not here$"
    assert re.search(quantized, capsys.readouterr().out, re.MULTILINE)


def test_a_port_in_use_is_a_note(here, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, report = run(capsys, "--port", port)
    assert code == 0
    assert f"Port {port}" in report["notes"][0]
    assert report["host"]["port_problem"] == report["notes"][0]


def test_a_gpu_without_a_compiler_cannot_serve(capsys, monkeypatch):
    def with_gpu(ask, problems):
        diagnosis = examine(ask)
        gpu = Gpu("A GPU", 80 * 2**30, 79 * 2**30, "9.0")
        diagnosis.machine = msgspec.structs.replace(diagnosis.machine, gpus=[gpu], why_no_cuda=None)
        return diagnosis

    monkeypatch.setattr(doctor, "_ask_engine", with_gpu)
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    code, report = run(capsys)
    assert code == 2
    assert "C compiler" in report["sentence"]


def test_an_engine_that_fails_is_said(capsys, monkeypatch):
    monkeypatch.setattr("server.config.fit_check.sys.executable", "/bin/false")
    code, report = run(capsys)
    assert code == 2
    assert report["sentence"] == "The engine's part of the check failed: exit code 1."


def test_colour_is_for_terminals_alone(here, monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    code, _ = run(capsys)
    assert code == 0
    report = doctor.look(doctor.Question(None, None, "auto", doctor.Ask(), doctor.LaunchConfig(port=0)))
    assert "\x1b[32mYes:" in to_text(report, is_terminal=True)
    assert "\x1b" not in to_text(report, is_terminal=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in to_text(report, is_terminal=True)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpu-memory", "much"], "not a size"), (["--gpu-memory", "0"], "not a size"),
        (["--tensor-parallel-size", "0"], "from 1 to 64"), (["--max-model-len", "x"], "whole number"),
    ],
)  # fmt: skip
def test_wrong_flags_are_one_sentence(capsys, flags, words):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *flags])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"quire doctor: error: {flags[0]}")
    assert words in error


def test_of_a_model_that_also_sees_the_text_alone_is_served(capsys, here, tmp_path):
    text = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "model_type": "gemma3_text"}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vision_config": {"hidden_size": 16}}))
    assert main(["doctor", "--port", "0", str(tmp_path)]) == 0
    assert "text alone; its vision and audio are not read" in capsys.readouterr().out


def test_transformers_own_class_can_be_asked_for(capsys, here, llama):
    (llama / "config.json").write_text(json.dumps(LLAMA_3_1_8B | {"model_type": "llama"}))
    _, report = run(capsys, llama, "--model-impl", "transformers")
    assert report["model"]["problem"] is None
    losses = "slower, without CUDA graphs, quantisation, LoRA adapters and tensor parallelism"
    assert report["model"]["computed_by"] == f"transformers' own class: {losses}"
    _, report = run(capsys, llama)
    assert report["model"]["computed_by"] is None
