"""Writes the OCI bundle that runs an image with the settings of docker-compose.yml. Standard library only.

Root read-only, the image's own user, no capabilities, no new privileges, namespaces of its own (the network has nothing
but loopback), the paths that Docker masks, and the seccomp profile that container engines use by default.
"""

import json
import platform
from pathlib import Path
from typing import Any

SECCOMP_PROFILE = Path("/usr/share/containers/seccomp.json")
_ARCH = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
_MASKED = ["acpi", "kcore", "keys", "latency_stats", "timer_list", "timer_stats", "sched_debug", "scsi"]
_READ_ONLY = ["bus", "fs", "irq", "sys", "sysrq-trigger"]
_NO_TRICKS = ["nosuid", "nodev"]


def write_bundle(
    folder: Path,
    *,
    rootfs: Path,
    image: dict[str, Any],
    arguments: list[str],
    volume: Path,
    variables: dict[str, str],
) -> None:
    """Write config.json into `folder`. image: an image's `config`; volume: its cache; variables: beside its own."""
    uid, gid = map(int, image["User"].split(":"))
    process = {
        "terminal": False,
        "user": {"uid": uid, "gid": gid},
        "args": [*image["Entrypoint"], *arguments],
        "env": image["Env"] + [f"{name}={value}" for name, value in variables.items()],
        "cwd": image.get("WorkingDir") or "/",
        "capabilities": {name: [] for name in ("bounding", "effective", "inheritable", "permitted", "ambient")},
        "noNewPrivileges": True,
    }
    linux: dict[str, Any] = {
        "namespaces": [{"type": name} for name in ("pid", "ipc", "uts", "mount", "network")],
        "maskedPaths": [f"/proc/{name}" for name in _MASKED] + ["/sys/firmware"],
        "readonlyPaths": [f"/proc/{name}" for name in _READ_ONLY],
    }
    if SECCOMP_PROFILE.exists():
        linux["seccomp"] = _seccomp(json.loads(SECCOMP_PROFILE.read_text()))
    config = {
        "ociVersion": "1.0.2",
        "hostname": "quire",
        "process": process,
        "root": {"path": str(rootfs), "readonly": True},
        "mounts": _mounts(volume),
        "linux": linux,
    }
    (folder / "config.json").write_text(json.dumps(config))


def _mounts(volume: Path) -> list[dict[str, Any]]:
    def mount(kind: str, destination: str, *options: str, source: str | None = None) -> dict[str, Any]:
        return {"type": kind, "source": source or kind, "destination": destination, "options": list(options)}

    return [
        mount("proc", "/proc"),
        mount("tmpfs", "/dev", "nosuid", "strictatime", "mode=755", "size=65536k"),
        mount("tmpfs", "/dev/shm", *_NO_TRICKS, "noexec", "mode=1777", "size=65536k"),  # nosec B108 # the container's
        mount("sysfs", "/sys", *_NO_TRICKS, "noexec", "ro"),
        mount("tmpfs", "/tmp", *_NO_TRICKS, "noexec", "mode=1777", "size=1g"),  # nosec B108 # the container's
        mount("bind", "/var/cache/quire", *_NO_TRICKS, "rw", "bind", source=str(volume)),
    ]


def _seccomp(profile: dict[str, Any]) -> dict[str, Any]:
    """Return the rules of an engine's profile that hold for a container without capabilities, for the runtime."""
    rules = []
    for rule in profile["syscalls"]:
        includes, excludes = rule.get("includes") or {}, rule.get("excludes") or {}
        is_here = not includes.get("arches") or _ARCH in includes["arches"]
        if includes.get("caps") or not is_here or _ARCH in (excludes.get("arches") or []):
            continue
        rules.append({key: rule[key] for key in ("names", "action", "args", "errnoRet") if rule.get(key) is not None})
    architectures = [
        entry for entry in profile["archMap"] if entry["architecture"].endswith(platform.machine().upper())
    ]
    return {
        "defaultAction": profile["defaultAction"],
        "defaultErrnoRet": profile.get("defaultErrnoRet", 1),
        "architectures": [
            name for entry in architectures for name in [entry["architecture"], *entry["subArchitectures"]]
        ],
        "syscalls": rules,
    }
