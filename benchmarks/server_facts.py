"""A server's own report of its versions and device. Never imports torch."""

import ssl

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.gpu_memory import gpu_names
from benchmarks.load import LoadConfig

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
_TIMEOUT_S = 5.0
_MAX_BYTES = 4 * 2**20
_MAX_TEXT = 200


def server_facts(config: LoadConfig) -> dict[str, str]:
    """Return the labels of quire_build_info, or /version's version; with GPUs if it is on this host. Never raises."""
    facts = _build_info(_get(config, "/metrics")) or _version(_get(config, "/version"))
    gpus = gpu_names() if config.host in LOCAL_HOSTS else []
    return facts | ({"gpus": ", ".join(gpus)} if gpus else {})


def _get(config: LoadConfig, path: str) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    root = config.path.removesuffix("/chat/completions").removesuffix("/completions").removesuffix("/v1")
    url = f"{'https' if config.is_tls else 'http'}://{host}:{config.port}{root}{path}"
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    tls = ssl.create_default_context()  # as the load's own connections do
    try:
        reply = httpx.get(url, headers=headers, timeout=_TIMEOUT_S, trust_env=False, verify=tls)
    except httpx.HTTPError:
        return ""
    return reply.text if reply.status_code == 200 and len(reply.content) <= _MAX_BYTES else ""


def _build_info(page: str) -> dict[str, str]:
    try:
        for family in text_string_to_metric_families(page):
            if family.name == "quire_build_info" and family.samples:
                labels = family.samples[0].labels.items()
                return {name: text[:_MAX_TEXT] for name, text in labels if text}
    except ValueError:  # the reply is not JSON
        pass
    return {}


def _version(page: str) -> dict[str, str]:
    try:
        version = httpx.Response(200, text=page).json()["version"]
    except (ValueError, LookupError, TypeError):
        return {}
    return {"version": version[:_MAX_TEXT]} if isinstance(version, str) else {}
