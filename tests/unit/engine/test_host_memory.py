"""Host memory behind the pool of a real model: the next turns of evicted conversations, whatever its layers keep."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.core.step import StepPlan
from engine.device import memory
from engine.device.host_pages import HostPages
from engine.interface.config import EngineConfig, SharingRates
from engine.interface.errors import StartupError
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from engine.startup import host_memory
from tests.support.fake_graphs import FakeGraphDevice, capture_on
from tests.support.hybrid_model import LAYERS, load_hybrid
from tests.support.tiny_llama import VOCAB_SIZE, save_tiny_llama

GREEDY = [SamplingParams(max_tokens=8, temperature=0.0)] * 6
MIB = 2**20


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab_size, (70,), generator=generator).tolist() for _ in GREEDY]


def load_llama(folder: Path, **changes: object) -> OfflineEngine:
    settings = {"block_size": 4, "max_num_batched_tokens": 48, "max_num_seqs": 2, "max_model_len": 160} | changes
    return OfflineEngine.load(EngineConfig(model=str(folder), device="cpu", **settings))


def talk(offline: OfflineEngine, vocab_size: int) -> list[list[int]]:
    """Serve the first turns of conversations, and then their second turns; return all tokens."""
    asked = prompts(vocab_size)
    firsts = offline.generate(asked, GREEDY)
    assert not any(result.error for result in firsts)
    turns = [[*prompt, *result.token_ids, 1, 2, 3] for prompt, result in zip(asked, firsts, strict=True)]
    seconds = offline.generate(turns, GREEDY)
    assert not any(result.error for result in seconds)
    scheduler = offline.engine.scheduler
    scheduler.check()
    return [result.token_ids for result in [*firsts, *seconds]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(("depth", "kv_dtype"), [(1, "auto"), (2, "auto"), (2, "int8")])
def test_turns_of_evicted_conversations_are_found_in_host_memory(
    llama: Path, depth: int, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostPages, "measure_page_s", lambda self, staging: 0.0)  # unknown: no step is bounded by time
    expected = talk(load_llama(llama, enable_prefix_caching=False, kv_cache_dtype=kv_dtype), VOCAB_SIZE)
    pages = load_llama(llama, kv_cache_dtype=kv_dtype).loaded.plan.pages
    small = {"kv_cache_memory_bytes": 60 * pages.page_bytes, "overlap_depth": depth, "kv_cache_dtype": kv_dtype}
    without = load_llama(llama, **small)
    assert talk(without, VOCAB_SIZE) == expected
    offline = load_llama(llama, kv_host_memory_bytes=300 * pages.page_bytes, **small)
    assert "of host memory behind it" in offline.loaded.facts["KV cache"]
    assert talk(offline, VOCAB_SIZE) == expected
    kv = offline.engine.scheduler.kv
    assert kv.tiers.host is not None
    assert kv.tiers.host.num_found_tokens >= 4 * 64
    assert kv.num_hit_tokens > without.engine.scheduler.kv.num_hit_tokens


@pytest.mark.parametrize("is_partial", [True, False])
def test_rows_are_grouped_by_blocks_from_host_memory(llama: Path, is_partial: bool) -> None:
    """In graphs: those of groups are captured at once, or later than the steps that need them."""
    asked = [[*document[:64], *tail] for document in prompts(VOCAB_SIZE) for tail in ([1, 2], [3, 4, 5])]
    params = GREEDY[:1] * len(asked)
    plain = load_llama(llama, enable_prefix_caching=False)
    expected = [result.token_ids for result in plain.generate(asked, params)]
    page_bytes = plain.loaded.plan.bytes_per_page
    offline = load_llama(llama, kv_cache_memory_bytes=60 * page_bytes, kv_host_memory_bytes=300 * page_bytes)
    loaded = offline.loaded
    loaded.runner._has_groups = True
    limits = msgspec.structs.replace(loaded.scheduler_config, sharing=SharingRates(chunk_tokens=8))
    offline.loaded = dataclasses.replace(loaded, scheduler_config=limits)
    capture_on(offline, FakeGraphDevice(loaded.model_config.hidden_size), is_partial=is_partial)
    for _ in range(2):
        num_copied = num_grouped = 0
        forward = loaded.runner.forward

        def watch(plan: StepPlan, forward: Any = forward) -> Any:
            nonlocal num_copied, num_grouped
            num_copied += len(plan.copies_from_host)
            num_grouped += plan.is_grouped
            return forward(plan)

        loaded.runner.forward = watch  # type: ignore[method-assign]
        assert [result.token_ids for result in offline.generate(asked, params)] == expected
        offline.engine.scheduler.check()
        loaded.runner.forward = forward  # type: ignore[method-assign]
    assert num_copied > 0
    assert num_grouped > 0


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["delta rule", "every kind"])
def test_saved_states_come_back_from_host_memory(layers: str) -> None:
    expected = talk(load_hybrid(*LAYERS[layers], enable_prefix_caching=False, max_num_seqs=2), 97)
    plan = load_hybrid(*LAYERS[layers], max_num_seqs=2, max_model_len=120).loaded.plan
    small = {"max_num_seqs": 2, "max_model_len": 120}
    small["kv_cache_memory_bytes"] = 2 * (plan.pages.num_pages(120) + plan.pages.state_pages) * plan.bytes_per_page
    offline = load_hybrid(*LAYERS[layers], kv_host_memory_bytes=64 * MIB, **small)
    assert talk(offline, 97) == expected
    kv = offline.engine.scheduler.kv
    assert kv.tiers.host is not None
    assert kv.tiers.host.num_found_tokens > 0
    assert kv.checkpoints.num_restored > 0


@pytest.mark.slow
def test_each_of_two_ranks_keeps_its_own_pages(llama: Path) -> None:
    expected = talk(load_llama(llama, enable_prefix_caching=False), VOCAB_SIZE)
    page_bytes = load_llama(llama).loaded.plan.bytes_per_page // 2
    offline = load_llama(
        llama,
        tensor_parallel_size=2,
        kv_cache_memory_bytes=60 * page_bytes,
        kv_host_memory_bytes=2 * 300 * page_bytes,
    )
    try:
        assert talk(offline, VOCAB_SIZE) == expected
        tier = offline.engine.scheduler.kv.tiers.host
        assert tier is not None
        assert tier.index.num_slots == 300
        assert tier.num_found_tokens > 0
    finally:
        offline.loaded.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_host_memory_bytes": 100}, ["--kv-host-memory 100 bytes", "less than one block", "use at least"]),
        ({"kv_host_memory_bytes": 2**50}, ["--kv-host-memory 1", "that are free", "use a smaller size"]),
        ({"kv_host_memory_bytes": MIB, "enable_prefix_caching": False}, ["--kv-host-memory", "--no-prefix-caching"]),
    ],
)
def test_sizes_that_cannot_be_are_refused(llama: Path, changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(StartupError) as caught:
        load_llama(llama, **changes)
    assert [word for word in words if word not in caught.value.message] == []


def chosen(
    plan: Any, monkeypatch: pytest.MonkeyPatch, *, free: int, device: str = "cuda", num_gpus: int = 1, **changes: object
) -> object:
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: free)
    monkeypatch.setattr(host_memory, "num_host_gpus", lambda: num_gpus)
    config = EngineConfig(model="m", **({"chooses_host_memory": True} | changes))
    return host_memory.choose_host_memory(config, plan, device_type=device).kv_host_memory_bytes


def test_by_default_cuda_gets_a_bounded_share_of_free_memory(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    plan, gib = load_llama(llama).loaded.plan, 2**30
    assert chosen(plan, monkeypatch, free=20 * gib) == host_memory.AUTO_SHARE * 20 * gib
    assert chosen(plan, monkeypatch, free=2**40) == host_memory.AUTO_MOST_BYTES
    told = "size='16 GiB' reason='0.25 of the free memory, at most 16 GiB; --kv-host-memory off: none'"
    assert f"host memory behind the KV cache {told}" in caplog.text
    for changes, reason in [
        ({"free": 100}, "0.25 of the free memory is less than one block"),
        ({"free": 20 * gib, "device": "cpu"}, "on cpu the KV cache is in the same memory"),
        ({"free": 20 * gib, "enable_prefix_caching": False}, "--no-prefix-caching leaves nothing to keep"),
    ]:
        assert chosen(plan, monkeypatch, **changes) is None  # type: ignore[arg-type]
        assert f"size='off' reason='{reason}" in caplog.text


def test_engines_of_several_gpus_share_what_is_free(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    plan, gib = load_llama(llama).loaded.plan, 2**30
    assert chosen(plan, monkeypatch, free=32 * gib, num_gpus=8) == gib
    assert "size='1 GiB' reason='0.0312 of the free memory (a quarter, for 1 of 8 GPUs), at most" in caplog.text
    assert chosen(plan, monkeypatch, free=32 * gib, num_gpus=8, tensor_parallel_size=4) == 4 * gib
    assert chosen(plan, monkeypatch, free=32 * gib, num_gpus=2, tensor_parallel_size=4) == 8 * gib


def test_memory_of_files_that_were_read_is_free_in_a_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_OWN_CGROUPS", tmp_path / "none")
    for name, text in (("max", "500000"), ("current", "400000"), ("stat", "active_file 1\ninactive_file 150000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory.free_host_bytes() == 250000
    (tmp_path / "memory.stat").unlink()
    assert memory.free_host_bytes() == 100000
    (tmp_path / "memory.max").write_text("max")
    assert memory.free_host_bytes() > 500000


def write_cgroup(folder: Path, *, limit: str, used: int, cached: int, version: int = 2) -> None:
    limit_name, used_name, cached_name = {
        2: ("max", "current", "inactive_file"), 1: ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
    }[version]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"memory.{limit_name}").write_text(f"{limit}\n")
    (folder / f"memory.{used_name}").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"active_file 1\ninactive_file 9\n{cached_name} {cached}\n")


def test_the_limit_of_a_service_or_a_job_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in a folder of the process's own, or between that and the root."""
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_OWN_CGROUPS", tmp_path / "own")
    write_cgroup(tmp_path / "system.slice", limit="max", used=10**9, cached=0)
    write_cgroup(tmp_path / "system.slice" / "quire.service", limit="500000", used=400000, cached=150000)
    write_cgroup(tmp_path / "system.slice" / "quire.service" / "engine", limit="max", used=300000, cached=0)
    (tmp_path / "own").write_text("0::/system.slice/quire.service/engine\n")
    assert memory.free_host_bytes() == 250000
    (tmp_path / "own").write_text("0::/system.slice/other.service\n")
    assert memory.free_host_bytes() > 500000
    (tmp_path / "own").write_text("0::/../system.slice/quire.service\n")  # outside of this container: nothing is known
    assert memory.free_host_bytes() > 500000


def test_what_is_odd_or_may_not_be_read_of_a_cgroup_is_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_OWN_CGROUPS", tmp_path / "own")
    (tmp_path / "own").write_bytes(b"\n0\n0:\nname=systemd:/\n0::/jobs/a..b/\xff:1 (deleted)\n")
    (tmp_path / "jobs" / "memory.max").mkdir(parents=True)  # as what may not be read, an OSError
    assert memory.free_host_bytes() > 500000
    write_cgroup(tmp_path / "jobs" / "a..b", limit="500000", used=400000, cached=150000)
    assert memory.free_host_bytes() == 250000
    (tmp_path / "jobs" / "a..b" / "memory.current").write_text("")
    assert memory.free_host_bytes() > 500000
    (tmp_path / "own").unlink()
    write_cgroup(tmp_path, limit="500000", used=400000, cached=0)
    assert memory.free_host_bytes() == 100000


def test_limits_of_the_first_version_of_cgroups_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_OWN_CGROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("5:cpu,cpuacct:/\n4:memory:/docker/abc\n0::/\n")
    unlimited = str(2**63 - 4096)
    write_cgroup(tmp_path / "memory", limit=unlimited, used=10**9, cached=0, version=1)
    assert memory.free_host_bytes() > 500000
    write_cgroup(tmp_path / "memory" / "docker" / "abc", limit="500000", used=400000, cached=150000, version=1)
    assert memory.free_host_bytes() == 250000
    write_cgroup(tmp_path / "memory", limit="300000", used=100000, cached=0, version=1)  # as in a container
    assert memory.free_host_bytes() == 200000


def test_a_given_size_and_off_are_kept(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = load_llama(llama).loaded.plan
    assert chosen(plan, monkeypatch, free=2**40, kv_host_memory_bytes=5 * MIB) == 5 * MIB
    assert chosen(plan, monkeypatch, free=2**40, chooses_host_memory=False) is None


def test_copies_are_launched_behind_the_inputs_of_their_step(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page_bytes = load_llama(llama).loaded.plan.pages.page_bytes
    offline = load_llama(llama, kv_cache_memory_bytes=60 * page_bytes, kv_host_memory_bytes=300 * page_bytes)
    runner = offline.loaded.runner
    sent: list[StepPlan] = []
    found: list[bool] = []
    begin_step, begin = runner._builder._begin_step, runner.host_pages.begin

    def note_inputs(plan: StepPlan) -> None:
        begin_step(plan)
        sent.append(plan)

    def note_copies(plan: StepPlan, staging: object) -> None:
        if plan.num_rows:
            found.append(bool(sent) and sent[-1] is plan)
        begin(plan, staging)

    monkeypatch.setattr(runner._builder, "_begin_step", note_inputs)
    monkeypatch.setattr(runner.host_pages, "begin", note_copies)
    talk(offline, VOCAB_SIZE)
    assert found
    assert all(found)
