"""The one conversion that a copy can do: bfloat16 or float16 to fp8 (e4m3)."""

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvxfer.errors import InvalidUsage
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.layout.shares import Share

SOURCES: Final = ("bfloat16", "float16")
DESTINATION: Final = "fp8_e4m3"

_LEAST_SCALE: Final = np.finfo(np.float32).tiny  # 2**-126

Scales: TypeAlias = float | ArrayLike


@dataclass(frozen=True, slots=True, eq=False)
class ToFp8:
    """Convert on the way: a stored element is ``e4m3(value * (1 / scale))``.

    e4m3 is OCP's E4M3 without infinities: rounding to nearest, ties to even, values beyond ±448
    saturate, NaN stays NaN. Of ``value``, the element read back as ``stored * scale`` differs by at
    most ``|value| / 16`` (three bits of mantissa) where ``|value| >= scale / 64``, by at most
    ``scale / 1024`` below that, and saturates at ``448 * scale``; the float32 product with the
    inverse of the scale adds at most one part in 2**23.

    Args:
        k_scale: of K or of MLA's latent: one number, float32 ``[num_layers]``, or
            ``[num_layers, num_kv_heads]``, of the whole model.
        v_scale: of V, in the same form.

    Raises:
        InvalidUsage: a scale outside 2**-126 .. 2**126, or an array of more than two axes.
    """

    k_scale: Scales = 1.0
    v_scale: Scales = 1.0

    def __post_init__(self) -> None:
        for name in ("k_scale", "v_scale"):
            scales = _checked(name, getattr(self, name))
            scales.setflags(write=False)
            object.__setattr__(self, name, scales)

    @property
    def per_head(self) -> bool:
        """Whether heads have scales of their own."""
        return any(np.ndim(scale) == 2 for scale in (self.k_scale, self.v_scale))

    def inverse_scales(self, model: KVLayout, share: Share) -> NDArray[np.float32]:
        """What elements are multiplied by, float32 ``[num_vectors, layers, heads or 1]``.

        Raises:
            InvalidUsage: an array's shape is not that of the model.
        """
        heads = share.heads if self.per_head else range(1)
        rows = []
        for name in ("k_scale", "v_scale")[: model.num_vectors]:
            scales = np.asarray(getattr(self, name))
            whole = (model.num_layers, model.num_kv_heads)
            if scales.shape not in ((), whole[:1], whole):
                raise InvalidUsage(
                    f"{name} has shape {scales.shape}; the model has {whole[0]} layers of "
                    f"{whole[1]} KV heads, so use (), {whole[:1]} or {whole}"
                )
            full = np.broadcast_to(scales[:, None] if scales.ndim == 1 else scales, whole)
            layers = slice(share.layers.start, share.layers.stop)
            rows.append(full[layers, heads.start : heads.stop])
        inverse: NDArray[np.float32] = np.float32(1) / np.stack(rows)
        return inverse


def _checked(name: str, scale: Any) -> NDArray[np.float32]:
    try:
        given = np.asarray(scale)
        if given.dtype.kind not in "fiu":  # nor text, nor booleans
            raise TypeError
        with np.errstate(over="ignore"):  # what overflows is refused below
            scales = given.astype(np.float32)
    except (TypeError, ValueError, OverflowError):
        raise InvalidUsage(f"{name} is {scale!r}; use a number or an array of numbers") from None
    if scales.ndim > 2:
        raise InvalidUsage(
            f"{name} has {scales.ndim} axes; use a number, [layers] or [layers, heads]"
        )
    # Neither a scale nor its inverse may be denormal or infinite: the product would lose bits, or 0
    # become no number.
    fits = (scales >= _LEAST_SCALE) & (scales <= 1 / _LEAST_SCALE)
    if not fits.all():
        raise InvalidUsage(
            f"{name} holds {scales[~fits].reshape(-1)[0]}; use scales of 2**-126 .. 2**126"
        )
    return scales
