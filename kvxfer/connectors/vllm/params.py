"""What a request says of its hand-over, in ``kv_transfer_params`` of the OpenAI body.

``{"kvxfer": {"role": "send", "transfer_id": ID, "receivers": [{"init": URL, "alloc": URL}, ...]}}``
on the prefill leg, with the receivers of all decode ranks, and ``{"kvxfer": {"role": "receive",
"transfer_id": ID}}`` on the decode leg. It comes from a client, so that every length is checked.
"""

from collections.abc import Mapping
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kvxfer.errors import InvalidUsage

KEY = "kvxfer"
MAX_ID_CHARS = 200
_MAX_RANKS = 1024

TransferId: TypeAlias = Annotated[str, Meta(pattern=rf"\A[!-}}]{{1,{MAX_ID_CHARS}}}\Z")]
Url: TypeAlias = Annotated[str, Meta(min_length=1, max_length=300)]


class ReceiverAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The two channels of one decode rank, as ``Receiver.addresses`` has them."""

    init: Url
    alloc: Url


class SendParams(msgspec.Struct, frozen=True, tag_field="role", tag="send"):
    """The prefill leg: write the prompt's KV to these receivers, one a decode rank."""

    transfer_id: TransferId
    receivers: Annotated[tuple[ReceiverAddress, ...], Meta(min_length=1, max_length=_MAX_RANKS)]


class ReceiveParams(msgspec.Struct, frozen=True, tag_field="role", tag="receive"):
    """The decode leg: the prompt's KV comes under this name."""

    transfer_id: TransferId


Params: TypeAlias = SendParams | ReceiveParams


def read_params(kv_transfer_params: object) -> Params | None:
    """The part of a request's ``kv_transfer_params`` that is meant for kvxfer; None without one.

    Raises:
        InvalidUsage: it is malformed; the message names the field.
    """
    if not isinstance(kv_transfer_params, Mapping) or KEY not in kv_transfer_params:
        return None
    try:
        return msgspec.convert(kv_transfer_params[KEY], SendParams | ReceiveParams)
    except msgspec.ValidationError as error:
        raise InvalidUsage(
            f"kv_transfer_params[{KEY!r}] is not understood: {error}; give role send with "
            "transfer_id and receivers, or role receive with transfer_id"
        ) from error


def attempt_id(transfer_id: str, number: int, page_format: str) -> str:
    """The request id of an attempt at a transfer, which two attempts never share.

    A prefill that is preempted loses its blocks and begins anew: its next attempt replaces the one
    before.

    Args:
        transfer_id: which transfer.
        number: of the attempt, from 1.
        page_format: in what order the sender's pages lie; see `Pages.format`.
    """
    return f"{transfer_id}~{number}~{page_format}"


def split_attempt(request_id: str) -> tuple[str, int, str]:
    """The parts of :func:`attempt_id`; number 0 for an id that is none."""
    parts = request_id.rsplit("~", 2)
    if len(parts) < 3:
        return request_id, 0, ""
    transfer_id, number, page_format = parts
    is_number = number.isascii() and number.isdigit() and len(number) < 10
    return transfer_id, int(number) if is_number else 0, page_format
