"""The connector's settings: ``kv_connector_extra_config`` of vLLM's ``--kv-transfer-config``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kvxfer.control import Ports, SharedKey
from kvxfer.errors import InvalidUsage

Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=86400)]


class ConnectorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine hands KV over. An engine with ports receives; without, it only sends.

    Attributes:
        transport: a name of `kvxfer.available_transports`, or ``auto``.
        bind_host: where a decode rank's two channels listen.
        advertise_host: what prefill engines dial where ``bind_host`` is a wildcard.
        init_ports: one for each rank, those of the first pipeline stage first.
        alloc_ports: as many.
        key_file: the key that both engines hold; needed beyond loopback.
        insecure: bind beyond loopback without a key.
        num_threads: threads of copies on hosts; None = the measured best.
        num_sms: SMs of a copy on GPUs; 0 = the measured best.
        on_failure: what becomes of a request whose KV did not arrive: ``recompute`` it on the
            decoder, or ``fail`` it. Empty = vLLM's own ``kv_load_failure_policy``.
        receive_timeout_s: from the decoder's placing a request until a prefill engine asks for its
            blocks, and as much again until all of it is there.
        send_timeout_s: from a request's first chunk until the decoder has blocks for it, and as
            much again until all of it is over there.
        layerwise: send each layer while the next is computed, which takes piecewise CUDA graphs.
            None = where the engine only sends.
    """

    transport: str = "auto"
    bind_host: str = "127.0.0.1"
    advertise_host: str | None = None
    init_ports: tuple[int, ...] = ()
    alloc_ports: tuple[int, ...] = ()
    key_file: str | None = None
    insecure: bool = False
    num_threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    num_sms: Annotated[int, Meta(ge=0, le=4096)] = 0
    on_failure: Literal["", "recompute", "fail"] = ""
    receive_timeout_s: Seconds = 120.0
    send_timeout_s: Seconds = 120.0
    layerwise: bool | None = None

    @property
    def receives(self) -> bool:
        """Whether prefill engines can reach this one."""
        return bool(self.init_ports)

    @property
    def sends_layerwise(self) -> bool:
        """Whether a layer is sent as soon as it is computed."""
        return not self.receives if self.layerwise is None else self.layerwise

    def key(self) -> SharedKey | None:
        """The key in ``key_file``.

        Raises:
            InvalidUsage: the file holds none, or others can read it.
        """
        return None if self.key_file is None else SharedKey.read(Path(self.key_file))

    def ports(self, num_ranks: int) -> Ports:
        """The ports of the ranks.

        Raises:
            InvalidUsage: not one of each for every rank, or one twice.
        """
        found = Ports(self.init_ports, self.alloc_ports)
        if len(found.init) != num_ranks:
            raise InvalidUsage(
                f"init_ports and alloc_ports list {len(found.init)} ranks, this engine has "
                f"{num_ranks}; list one of each for every rank"
            )
        return found


def read_config(extra: Mapping[str, object], *, is_consumer: bool) -> ConnectorConfig:
    """The settings in ``kv_connector_extra_config``.

    Raises:
        InvalidUsage: an unknown key, a value out of range, or a consumer without ports.
    """
    try:
        config = msgspec.convert(dict(extra), ConnectorConfig)
    except msgspec.ValidationError as error:
        known = ", ".join(ConnectorConfig.__struct_fields__)
        raise InvalidUsage(
            f"kv_connector_extra_config is not understood: {error}; known keys are {known}"
        ) from error
    if is_consumer and not config.receives:
        raise InvalidUsage(
            "this engine is to receive KV, but kv_connector_extra_config has no init_ports and "
            "alloc_ports; list one of each for every rank, or use kv_role kv_producer"
        )
    return config
