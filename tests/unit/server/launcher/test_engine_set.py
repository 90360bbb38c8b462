"""The engines of a daemon: their parts, sockets and GPUs, and what becomes known of those beside the first."""

import asyncio

import pytest

from engine.interface.config import EngineConfig, PeerConfig, PrefillHost, ServerConfig
from engine.interface.control import Heartbeat, Leave, Stage
from engine.interface.errors import StartupError
from server.launcher.engine_set import SideEngines, plan_engines, remote_engines, with_sockets


def config(num_prefill, num_decode, *, device="cpu", num_ranks=1):
    peer = PeerConfig(role="decode", index=0, num_prefill=num_prefill, num_decode=num_decode)
    return EngineConfig(model="m", device=device, peer=peer, tensor_parallel_size=num_ranks)


def test_a_single_engine_has_no_part(tmp_path):
    (spec,) = plan_engines(EngineConfig(model="m"), tmp_path, environment={})
    assert (spec.key, spec.name, spec.socket, spec.environment) == (
        ("engine", 0),
        "engine",
        f"{tmp_path}/engine.sock",
        {},
    )
    told = with_sockets(ServerConfig(model="m", served_model_names=["m"]), [spec], "control")
    assert (told.engine_socket, told.prefill_sockets, told.decode_sockets) == (spec.socket, [], [])


def test_each_engine_has_its_part_and_its_sockets(tmp_path):
    specs = plan_engines(config(2, 2), tmp_path, environment={})
    assert [spec.name for spec in specs] == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    assert [spec.index for spec in specs] == [0, 1, 2, 3]
    assert len({spec.socket for spec in specs}) == 4
    peers = [spec.config.peer for spec in specs]
    assert all(peer.prefill_sockets == peers[0].prefill_sockets for peer in peers)
    assert len(set(peers[0].prefill_sockets)) == 2
    assert not {spec.socket for spec in specs} & set(peers[0].prefill_sockets)
    told = with_sockets(ServerConfig(model="m", served_model_names=["m"]), specs, "control")
    assert told.decode_sockets == [specs[0].socket, specs[1].socket]
    assert told.prefill_sockets == [specs[2].socket, specs[3].socket]


def test_a_host_that_lends_its_engines_serves_by_them(tmp_path):
    peer = PeerConfig(role="prefill", index=0, num_prefill=2, num_decode=0)
    specs = plan_engines(EngineConfig(model="m", device="cpu", peer=peer), tmp_path, environment={})
    assert [(spec.name, spec.decodes) for spec in specs] == [("prefill-0", True), ("prefill-1", True)]
    told = with_sockets(ServerConfig(model="m", served_model_names=["m"]), specs, f"{tmp_path}/control.sock")
    assert (told.prefill_sockets, told.decode_sockets) == ([], [spec.socket for spec in specs])
    assert told.engine_names == ["prefill-0", "prefill-1"]


@pytest.mark.parametrize("num_prefill", [0, 1])
def test_engines_of_other_hosts_follow_those_of_this_one(num_prefill, tmp_path):
    hosts = [PrefillHost("a", 1, 2), PrefillHost("::1", 2)]
    peer = PeerConfig(
        role="decode", index=0, num_prefill=num_prefill, num_decode=1, prefill_hosts=hosts, first_decode=256
    )
    engine = EngineConfig(model="m", device="cpu", peer=peer)
    specs = plan_engines(engine, tmp_path, environment={})
    remote = remote_engines(engine, tmp_path)
    assert [one.name for one in remote] == ["a:1/prefill-0", "a:1/prefill-1", "[::1]:2/prefill-0"]
    local = ["prefill-0"] * num_prefill
    assert [spec.name for spec in specs] == ["decode-0", *local]
    links = specs[0].config.peer.prefill_sockets
    assert links[num_prefill:] == [one.peer_socket for one in remote]
    assert specs[0].config.peer.num_engines == 1 + num_prefill
    told = with_sockets(ServerConfig(model="m", served_model_names=["m"]), specs, f"{tmp_path}/control.sock")
    assert told.prefill_sockets == [*(spec.socket for spec in specs[1:]), *(one.socket for one in remote)]
    assert told.engine_names == [*local, *(one.name for one in remote), "decode-0"]
    assert (told.num_remote, told.first_decode) == (3, 256)
    assert len({*told.prefill_sockets, *told.decode_sockets, *links}) == 7 + 2 * num_prefill


def test_each_engine_has_a_gpu_of_its_own(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl"):
        (tmp_path / name).touch()
    specs = plan_engines(config(1, 1, device="auto"), tmp_path, environment={}, devices=tmp_path)
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["0", "1"]
    environment = {"CUDA_VISIBLE_DEVICES": "3, GPU-5f"}
    specs = plan_engines(config(1, 1, device="cuda"), tmp_path, environment=environment, devices=tmp_path)
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["3", "GPU-5f"]


def test_each_engine_has_a_gpu_for_each_of_its_ranks(tmp_path):
    environment = {"CUDA_VISIBLE_DEVICES": "3,5,0,1,7"}
    specs = plan_engines(config(1, 1, device="cuda", num_ranks=2), tmp_path, environment=environment)
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["3,5", "0,1"]
    with pytest.raises(
        StartupError, match="1p2d with --tensor-parallel-size 2 needs 6 GPUs, 2 for each engine, and 5 can be seen"
    ):
        plan_engines(config(1, 2, device="cuda", num_ranks=2), tmp_path, environment=environment)


def test_too_few_gpus_are_a_sentence(tmp_path):
    with pytest.raises(StartupError, match="1p2d needs 3 GPUs, one for each engine, and 2 can be seen") as raised:
        plan_engines(config(1, 2, device="auto"), tmp_path, environment={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert raised.value.exit_code == 2
    with pytest.raises(StartupError, match="and 0 can be seen"):
        plan_engines(config(1, 1, device="cuda"), tmp_path, environment={}, devices=tmp_path)


def test_without_gpus_and_on_the_cpu_no_variable_is_set(tmp_path):
    for device in ("auto", "cpu"):
        specs = plan_engines(config(1, 1, device=device), tmp_path, environment={}, devices=tmp_path)
        assert [spec.environment for spec in specs] == [{}, {}]


def test_the_first_decoding_engine_is_not_counted_beside_the_others(tmp_path):
    async def live() -> None:
        now, hung = [0.0], []
        specs = plan_engines(config(1, 2), tmp_path, environment={})[1:]
        sides = SideEngines(specs, hang_after_s=0.0, on_hang=lambda *args: hung.append(args), clock=lambda: now[0])
        decode, prefill = ("engine", 1), ("engine", 2)
        assert ("engine", 0) not in sides
        assert decode in sides
        sides.enter(decode, Stage("weights"))
        assert sides.num_decoding == 0
        for key in (decode, prefill):
            sides.enter(key, Stage("ready"))
        sides.beat(prefill, Heartbeat(0, 0, 1))
        assert sides.num_decoding == 1
        now[0] = 8.0
        assert sides.end(decode) == 8.0
        assert sides.num_decoding == 0
        assert sides.end(decode) == 0.0
        assert not hung

    asyncio.run(live())


def test_a_side_engine_that_hangs_is_reported(tmp_path):
    async def hang() -> list[object]:
        hung = []
        specs = plan_engines(config(1, 1), tmp_path, environment={})[1:]
        sides = SideEngines(specs, hang_after_s=0.05, on_hang=lambda key, age_s: hung.append(key))
        watch = sides._watches["engine", 1]
        watch._stall_after_s = 0.01
        sides.enter(("engine", 1), Stage("ready"))
        sides.beat(("engine", 1), Heartbeat(1, 0, 5))
        for _ in range(100):
            await asyncio.sleep(0.02)
            if hung:
                break
        return hung

    assert asyncio.run(hang()) == [("engine", 1)]


def test_an_engine_gets_time_to_leave_if_another_one_can_take_its_requests(tmp_path):
    async def live() -> None:
        sides = SideEngines(plan_engines(config(1, 2), tmp_path, environment={})[1:], hang_after_s=0.0, on_hang=print)
        first, decode, prefill = ("engine", 0), ("engine", 1), ("engine", 2)
        assert sides.let_leave(prefill, timeout_s=9.0, first_serves=True) is None, "it does not serve yet"
        assert sides.let_leave(first, timeout_s=9.0, first_serves=False) is None
        assert sides.let_leave(first, timeout_s=9.0, first_serves=True) is None, "no other one decodes yet"
        assert not sides.has_left(first)
        for key in (decode, prefill):
            sides.enter(key, Stage("ready"))
        assert sides.let_leave(prefill, timeout_s=9.0, first_serves=False) == Leave(9.0)
        assert sides.let_leave(first, timeout_s=9.0, first_serves=True) == Leave(9.0)
        assert sides.let_leave(decode, timeout_s=9.0, first_serves=True) is None, "the other one leaves"
        assert sides.has_left(first)
        assert not sides.has_left(first)
        assert sides.let_leave(decode, timeout_s=9.0, first_serves=False) is None, "the other one loads"
        assert not sides.has_left(decode)
        assert sides.let_leave(decode, timeout_s=9.0, first_serves=True) == Leave(9.0), "the other one is back"
        assert sides.has_left(decode)
        assert not sides.has_left(("worker", 0))

    asyncio.run(live())


def test_the_only_engine_that_decodes_ends_at_once(tmp_path):
    async def live() -> None:
        sides = SideEngines(plan_engines(config(1, 1), tmp_path, environment={})[1:], hang_after_s=0.0, on_hang=print)
        assert sides.let_leave(("engine", 0), timeout_s=9.0, first_serves=True) == Leave(0.0)

    asyncio.run(live())
