"""What a fabric says of its health: fields of ``nvidia-smi -q``, or bits of NVML, in one wording.

The bits are ``NVML_GPU_FABRIC_HEALTH_MASK_*`` of ``nvml.h``; older versions of its Python package
do not name them. 0 is "not told" in all of them.
"""

from collections.abc import Mapping

_SUMMARIES = {1: "healthy", 2: "unhealthy", 3: "limited capacity"}
_YES_NO = {1: "true", 2: "false"}
# Field -> first bit, number of bits, and NVML's values as nvidia-smi prints them.
_BITS = {
    "Bandwidth": (0, 2, {1: "degraded", 2: "full"}),
    "Route Recovery in progress": (2, 2, _YES_NO),
    "Route Unhealthy": (4, 2, _YES_NO),
    "Access Timeout Recovery": (6, 2, _YES_NO),
    "Incorrect Configuration": (
        8,
        4,
        {
            1: "none",
            2: "incorrect SysGUID",
            3: "incorrect chassis serial number",
            4: "no partition",
            5: "insufficient NVLinks",
            6: "incompatible GPU firmware",
            7: "invalid location",
            8: "invalid GPU state",
        },
    ),
}
# Field -> what it says where all is well, and what anything else means.
_WORDS = {
    "Summary": ("healthy", "{}"),
    "Bandwidth": ("full", "{} in bandwidth"),
    "Route Recovery in progress": ("false", "recovering routes"),
    "Route Unhealthy": ("false", "unhealthy in its routes"),
    "Access Timeout Recovery": ("false", "recovering from access timeouts"),
    "Incorrect Configuration": ("none", "configured incorrectly ({})"),
}
FIELDS = tuple(_WORDS)


def describe_health(told: Mapping[str, str]) -> str:
    """All that is wrong, whatever the summary says; ``healthy`` where it says so and nothing is.

    Args:
        told: :data:`FIELDS` that are told -> their value.
    """
    wrong = [
        words.format(told[field].lower())
        for field, (well, words) in _WORDS.items()
        if field in told and told[field].lower() != well
    ]
    return ", ".join(wrong) or told.get("Summary", "").lower()


def fields_of_nvml(mask: int, summary: int) -> dict[str, str]:
    """The fields that NVML's health mask and summary tell, as ``nvidia-smi`` prints them."""
    values = {
        field: (mask >> first & (1 << width) - 1, words)
        for field, (first, width, words) in _BITS.items()
    }
    values["Summary"] = summary, _SUMMARIES
    return {
        field: words.get(value, f"code {value}")
        for field, (value, words) in values.items()
        if value
    }
