"""Two vLLM engines on a CPU that LMCache's PD joins, on kvxfer's channel."""

from pathlib import Path
from typing import Any

from free_ports import free_ports
from vllm_engines import Engine

HOST = "127.0.0.1"
WAIT_S = 8.0  # for KV of which nobody says that it is lost
_TOKEN_BYTES = 4096  # of the model "tiny" in float32
_POOL_BYTES = 64 << 20
_RECEIVED_BYTES = 12 << 20


class LMCachePair:
    """A prefill and a decode engine whose settings are LMCache's own.

    Attributes:
        channels: the decode engine's init and alloc port.
        notices: where LMCache's notices to the proxy go.
        num_pool_tokens: that fit the decode engine's pool.
    """

    num_pool_tokens = _RECEIVED_BYTES // _TOKEN_BYTES

    def __init__(self, model: Path, folder: Path) -> None:
        *self.channels, self.notices = init, alloc, _ = free_ports(3)
        sends = {"pd_role": "sender", "pd_proxy_host": HOST, "pd_proxy_port": self.notices}
        receives = {
            "pd_role": "receiver",
            "pd_peer_host": HOST,
            "pd_peer_init_port": [init],
            "pd_peer_alloc_port": [alloc],
            "pd_buffer_size": _RECEIVED_BYTES,
        }
        self.prefill = self._engine(model, folder / "prefill.log", 0, "kv_producer", sends)
        self.decode = self._engine(model, folder / "decode.log", 1, "kv_consumer", receives)

    def wait_until_up(self) -> None:
        self.prefill.wait_until_up()
        self.decode.wait_until_up()

    def stop(self) -> None:
        self.prefill.stop()
        self.decode.stop()

    def _engine(
        self, model: Path, log: Path, core: int, kv_role: str, own: dict[str, Any]
    ) -> Engine:
        settings = {
            "enable_pd": True,
            "save_unfull_chunk": True,  # follows from `enable_pd` in a file, but not here
            "local_cpu": False,
            "pd_buffer_size": _POOL_BYTES,
            "pd_buffer_device": "cpu",
            "transfer_channel": "nixl",  # which is kvxfer where its connector is loaded
            "extra_config": {"kvxfer.peers": "kvxfer", "kvxfer.receive_timeout_s": WAIT_S},
        } | own
        transfer = {
            "kv_connector": "KvxferLMCacheConnector",
            "kv_connector_module_path": "lmcache_on_cpu",
            "kv_role": kv_role,
            "kv_connector_extra_config": {
                "discard_partial_chunks": False,
                "lmcache_rpc_port": f"{kv_role}{self.notices}",
                # The decode engine's prompt has the token that the prefill engine made.
                "skip_last_n_tokens": int(kv_role == "kv_consumer"),
                **{f"lmcache.{name}": value for name, value in settings.items()},
            },
        }
        return Engine(model, log, core=core, transfer=transfer, args=())
