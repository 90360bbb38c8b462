"""profile_step on a CPU: each kind of step runs as named, and its figures add up; traces as a GPU would give them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import profiled_steps
from benchmarks.device_time import ATTENTION, LAYERS, PRODUCTS, SAMPLING, STATES, Interval
from benchmarks.floors import H100, SHAPES, StepCosts
from benchmarks.profile_step import format_step, kinds, main, parser, step_report
from benchmarks.profiled_steps import HostTimes, Kind, Profile
from benchmarks.report import Report
from benchmarks.step_work import StepWork, step_floors
from engine.core.step import RowPlan, StepPlan
from models.config.model_config import ModelConfig

CPU = ["--shape", "tiny", "--device", "cpu", "--num-steps", "3", "--max-num-seqs", "8"]


def run(path: Path, *flags: str) -> dict[str, Any]:
    """Return the steps of a report."""
    assert main([*CPU, *flags, "--json", str(path / "profile.json")]) == 0
    return json.loads((path / "profile.json").read_text())["steps"]


def costs(shape: str, kv_dtype: torch.dtype = torch.bfloat16) -> StepCosts:
    return StepCosts(ModelConfig.from_folder(SHAPES / shape), kv_dtype)


def named(*flags: str) -> dict[str, Kind]:
    return kinds(parser().parse_args(flags))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8"])
def test_unequal_rows_decode_with_each_kv_dtype(tmp_path: Path, kv_cache_dtype: str) -> None:
    steps = run(tmp_path, "--contexts", "300,40x3", "20", "--kv-cache-dtype", kv_cache_dtype)
    assert list(steps) == ["decode 300,40x3", "decode 20"]
    work = steps["decode 300,40x3"]["work"]
    assert (work["rows"], work["prompt_tokens"]) == (4, 0)
    assert work["longest"] - work["shortest"] >= 260 - 3
    assert 300 < work["longest"] < 360


def test_prompts_stand_behind_cached_tokens_and_beside_rows(tmp_path: Path) -> None:
    steps = run(tmp_path, "--contexts", "50x2", "--prompt", "48x2,30", "--behind", "160")
    (step,) = steps.values()
    assert step["work"]["rows"] == 2
    assert (step["work"]["prompt_tokens"], step["work"]["behind"]) == (126, 160)


def test_prompts_alone_and_first_tokens_are_whole_steps(tmp_path: Path) -> None:
    steps = run(tmp_path, "--prompt", "64", "--first-token", "40")
    assert list(steps) == ["prompts 64", "first token 40"]
    assert [step["work"]["prompt_tokens"] for step in steps.values()] == [64, 40]


def test_queued_prompts_fill_steps_and_mixed_ones(tmp_path: Path) -> None:
    flags = ["--batch", "2", "--context", "30", "--prompt-len", "64", "--mixed", "96", "--mixed-rows", "4"]
    steps = run(tmp_path, *flags, "--max-num-batched-tokens", "256")
    assert list(steps) == ["decode B2", "prompt 64", "mixed 96 tokens, 4 decoding"]
    assert [step["work"]["prompt_tokens"] for step in steps.values()] == [0, 256, 92]


def test_a_row_as_long_as_the_model_allows_begins_shorter_and_decodes_to_the_end(tmp_path: Path) -> None:
    (step,) = run(tmp_path, "--contexts", "8192,64x3").values()
    assert step["work"]["rows"] == 4
    assert 8000 < step["work"]["longest"] < 8192


def test_a_trace_of_a_gpu_has_its_own_events_alone_of_turns_between_two_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    kinds = torch.autograd.DeviceType
    events = [
        SimpleNamespace(name="cudaGraphLaunch", device_type=kinds.CPU, time_range=SimpleNamespace(start=1, end=2)),
        SimpleNamespace(name="_gemv_kernel", device_type=kinds.CUDA, time_range=SimpleNamespace(start=3, end=5)),
    ]

    @contextmanager
    def profile(activities: list[torch.profiler.ProfilerActivity]) -> Iterator[SimpleNamespace]:
        assert activities == [torch.profiler.ProfilerActivity.CUDA]
        order.append("begin")
        yield SimpleNamespace(events=lambda: events)
        order.append("end")

    monkeypatch.setattr(profiled_steps, "profile", profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("wait"))
    found = profiled_steps.trace(lambda: order.append("turn"), 2, torch.device("cuda"))
    assert found == [Interval("_gemv_kernel", 3, 5)]
    assert order == ["wait", "begin", "turn", "turn", "wait", "end"]


def test_figures_of_a_step_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (step,) = run(tmp_path, "--contexts", "64x4").values()
    assert sum(group["ms"] for group in step["groups"]) == pytest.approx(step["busy_ms"])
    assert sum(kernel["share_us_per_step"] for kernel in step["kernels"]) == pytest.approx(1e3 * step["busy_ms"])
    assert sum(step["host"].values()) == pytest.approx(step["wall_ms"])
    assert {PRODUCTS, ATTENTION} <= {group["group"] for group in step["groups"]}
    assert step["floor_ms"] is None
    assert "outside torch's operators" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--contexts", "64x9"], "9 decoding rows do not fit"),
        (["--prompt", "5000", "--max-num-batched-tokens", "64"], "other prompt tokens"),
        (["--behind", "64"], "--behind is for"),
        (["--prompt", "9", "--behind", "-1"], "at least 0"),
        (
            ["--mixed", "9", "--mixed-rows", "8", "--context", "9", "--batch", "--prompt-len", "0"],
            "No prompt was computed",
        ),
        (["--batch", "--prompt-len", "0"], "no step"),
        (["--prompt", "1"], "at least 2 tokens"),
        (["--prompt", "9000"], "9000 tokens"),
    ],
)
def test_steps_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    assert main([*CPU, *flags]) != 0
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "0", "12x0", "5,", "1k"])
def test_contexts_are_positive_numbers(text: str) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--contexts", text])


def test_flags_of_before_choose_the_kinds_of_before() -> None:
    usual = ["decode B1", "decode B64", "decode B256", "prompt 4096"]
    assert list(named()) == usual
    assert list(named("--mixed", "512")) == [*usual, "mixed 512 tokens, 240 decoding"]
    assert list(named("--batch", "8", "--prompt-len", "0")) == ["decode B8"]
    assert named("--batch", "8", "--context", "99")["decode B8"] == Kind(contexts=(99,) * 8)
    assert list(named("--first-token", "512")) == ["first token 512"]
    assert named("--contexts", "9,5x2", "--prompt", "7") == {
        "decode 9,5x2 beside prompts 7": Kind(contexts=(9, 5, 5), prompts=(7,))
    }
    assert list(named("--prompt", "7", "--behind", "0", "16")) == ["prompts 7", "prompts 7 behind 16"]


def test_a_plan_names_contexts_and_tokens_before_prompts() -> None:
    plan = StepPlan(0, [RowPlan(0, 99, 1), RowPlan(1, 32, 4, token_ids=[1] * 4), RowPlan(2, 0, 3, samples=False)])
    work = StepWork.of(plan)
    assert work == StepWork(rows=(100,), prompts=((4, 32), (3, 0)), num_logits=2)
    assert (work.num_tokens, work.num_prompt_tokens) == (8, 7)


def test_floors_of_decode_steps_are_the_bytes_of_benchmarks_floors() -> None:
    model = costs("llama-3.1-8b", torch.float8_e4m3fn)
    floors = step_floors(model, [StepWork((131_072, *[512] * 63), (), 64)], has_whole_layers=False)
    assert list(floors) == [ATTENTION, PRODUCTS, SAMPLING]
    assert floors[ATTENTION].num_bytes == model.row_bytes(131_072) + 63 * model.row_bytes(512)
    assert floors[ATTENTION].seconds(H100) == pytest.approx(floors[ATTENTION].num_bytes / 3.01e12)
    assert floors[PRODUCTS].seconds(H100) == pytest.approx(model.weight_bytes(64) / 3.01e12)
    assert floors[SAMPLING].num_bytes == 64 * 2 * 128256


def test_floors_of_prompts_are_those_of_a_whole_prompt() -> None:
    model = costs("llama-3.1-8b")
    floors = step_floors(model, [StepWork((), ((4096, 0),), 1)], has_whole_layers=False)
    assert floors[ATTENTION].seconds(H100) + floors[PRODUCTS].seconds(H100) == pytest.approx(
        model.prompt_s([4096], H100)
    )
    parts = [StepWork((), ((2048, 0),), 0), StepWork((), ((2048, 2048),), 1)]
    halves = step_floors(model, parts, has_whole_layers=False)
    assert 2 * halves[ATTENTION].flops == pytest.approx(floors[ATTENTION].flops)
    assert 2 * halves[PRODUCTS].flops == pytest.approx(floors[PRODUCTS].flops)


def test_one_kernel_of_all_layers_has_their_bytes_and_the_head_is_apart() -> None:
    model = costs("qwen3-0.6b")
    floors = step_floors(model, [StepWork((384,), (), 1)], has_whole_layers=True)
    assert list(floors) == [LAYERS, PRODUCTS, SAMPLING]
    assert floors[PRODUCTS].num_bytes == 2 * 151936 * 1024
    whole = model.weight_bytes(1) + model.row_bytes(384)
    assert floors[LAYERS].num_bytes + floors[PRODUCTS].num_bytes == pytest.approx(whole)


def test_states_are_read_and_written() -> None:
    model = costs("qwen3.5-4b")
    floors = step_floors(model, [StepWork((10, 20), ((64, 0),), 3)], has_whole_layers=False)
    assert floors[STATES].num_bytes == 3 * model.state_bytes


def report_of(wall_us: float) -> Report:
    """Two steps of a GPU's trace: the second product starts within attention, and the host is late once."""
    step = [("_decode_kernel", 0, 100), ("_gemv_kernel", 50, 400), ("_sample_kernel", 402, 410)]
    intervals = [Interval(name, first + start, first + end) for first in (0.0, 500.0) for name, start, end in step]
    profile = Profile(
        2, HostTimes(wall_us / 1e6, 1e-4, 2e-4), [StepWork((512,) * 8, (), 8)] * 2, intervals, is_gpu=True
    )
    config = ModelConfig.from_folder(SHAPES / "qwen3-0.6b")
    return step_report(profile, config, costs("qwen3-0.6b"), H100)


def test_groups_and_idle_time_of_a_trace_add_up_to_the_step() -> None:
    step = report_of(wall_us=450)
    assert {group["group"]: round(group["ms"], 6) for group in step["groups"]} == {
        ATTENTION: 0.1,
        PRODUCTS: 0.3,
        SAMPLING: 0.008,
    }
    assert step["gpu_ms"] == pytest.approx(0.458)  # with the wait of the second kernel
    assert (step["between_kernels_ms"], step["waits_for_host_ms"]) == pytest.approx((0.002, 0.04))
    assert step["trace"] == {"num_short_gaps": 1, "num_long_gaps": 0.5, "long_gaps_ms": 0.045}
    assert report_of(wall_us=400)["waits_for_host_ms"] == 0


def test_a_table_has_the_floor_beside_each_time() -> None:
    step = report_of(wall_us=450)
    lines = format_step("decode 512x8", step, num_kernels=1).splitlines()
    products = next(line.split() for line in lines if "GEMMs" in line)
    floor_ms = costs("qwen3-0.6b").weight_bytes(8) / 3.01e9
    assert products[1:6] == ["0.300", "66.7%", "1.0", "0.350", f"{costs('qwen3-0.6b').weight_bytes(8) / 1e9:.3f}"]
    assert products[-2:] == [f"{floor_ms:.3f}", f"{floor_ms / 0.3:.0%}"]
    assert "_gemv_kernel" in lines[-1]
    assert any("device waits for the host" in line for line in lines)
