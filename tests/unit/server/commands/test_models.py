"""quire models: the list, a word of it, and JSON."""

import json

import pytest

from server.cli import main


def test_a_word_shows_the_rows_with_it_and_their_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "llama-3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["meta-llama/Llama-3.1-8B-Instruct", "8.0", "B", "15.0", "8.5", "6.0"] for line in lines)
    assert "instead: quire serve meta-llama/Llama-3.1-8B-Instruct" in lines[-1]
    assert not any("Qwen" in line for line in lines)


@pytest.mark.parametrize("word", ["gemma-4", "qwen3.5", "qwen3.6", "gpt-oss-120b", "nemotron", "ministral-3", "llama3"])
def test_the_families_that_are_announced_are_found_by_name(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", word]) == 0
    assert "quire serve MODEL" in capsys.readouterr().out


def test_json_has_bytes_and_an_unknown_word_is_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "Qwen/QWEN3-8b", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["served"]
    assert (row["model"], row["kv_per_token"]) == ("Qwen/Qwen3-8B", 147_456)
    assert row["bf16"] > 8_000_000_000 * 2
    assert main(["models", "nothing-like-it"]) == 2
    assert "may be served all the same: quire doctor MODEL" in capsys.readouterr().err
