"""What the functions of an update refuse: shapes that would broadcast into nonsense, a mask with a
hole, and settings outside their range."""

from __future__ import annotations

from torch import Tensor


def check_signals(
    rewards: Tensor,  # [B, T]
    values: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] true on real tokens
    bootstrap: Tensor | None,  # [B]
) -> None:
    "Raises ValueError for shapes that differ, or for a real token after padding."
    if not rewards.shape == values.shape == mask.shape:
        raise ValueError(
            f"rewards {list(rewards.shape)}, values {list(values.shape)} and mask "
            f"{list(mask.shape)} differ: give [B, T] each. "
            "A value head's [B, T, 1] needs squeeze(-1)."
        )
    if bootstrap is not None and bootstrap.shape != mask.shape[:1]:
        raise ValueError(
            f"bootstrap {list(bootstrap.shape)}: give one value a row, [{len(mask)}], "
            "and 0 for a row that ended by itself."
        )
    gap = (mask[:, 1:].bool() & ~mask[:, :-1].bool()).any(1)
    if gap.any():
        raise ValueError(
            f"row {gap.nonzero()[0].item()} of the mask has a real token after padding: "
            "responses are padded on the right. Leave the prompt out, and take what was not "
            "sampled out of the row."
        )


def check_share(name: str, x: float) -> None:
    "Raises ValueError unless x is from 0 to 1."
    if not 0 <= x <= 1:
        raise ValueError(f"{name}={x}: give a number from 0 to 1.")


def check_discount(
    gamma: float | Tensor,  # one for all tokens, or [B, T]
    mask: Tensor,  # [B, T] true on real tokens
) -> None:
    "Raises ValueError unless every discount of a real token is from 0 to 1."
    if not isinstance(gamma, Tensor):
        return check_share("gamma", gamma)
    if gamma.shape != mask.shape:
        raise ValueError(
            f"gamma {list(gamma.shape)}: give one number, or one for each token, "
            f"{list(mask.shape)}."
        )
    of_tokens = gamma[mask.bool()]
    for x in of_tokens[~((of_tokens >= 0) & (of_tokens <= 1))][:1].tolist():
        check_share("gamma", x)


def check_lambda(
    lam: float | Tensor,  # one for all rows, or [B]
    rows: int,  # B
) -> None:
    "Raises ValueError unless every lambda is from 0 to 1, and there is one or one for each row."
    if not isinstance(lam, Tensor):
        return check_share("lam", lam)
    if lam.shape != (rows,):
        raise ValueError(f"lam {list(lam.shape)}: give one number, or one for each row, [{rows}].")
    for i, x in enumerate(lam.tolist()):
        check_share(f"lam[{i}]", x)


def check_clip(
    cliprange: float, cliprange_high: float | None = None, dual_clip: float | None = None
) -> None:
    "Raises ValueError for a range of the policy loss that makes no sense."
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(
            f"dual_clip is {dual_clip}: give a number above 1, such as 3, or None to turn it off."
        )
    if not (0 <= cliprange <= 1 and (cliprange_high is None or cliprange_high >= 0)):
        raise ValueError(
            f"cliprange is {cliprange} and cliprange_high {cliprange_high}: "
            "give a share between 0 and 1, such as 0.2, and a high one of at least 0."
        )


def check_clip_value(cliprange_value: float) -> None:
    "Raises ValueError for a range of the value loss below 0."
    if not cliprange_value >= 0:
        raise ValueError(
            f"cliprange_value is {cliprange_value}: give a number of at least 0, such as 0.2; "
            "float('inf') turns clipping off."
        )
