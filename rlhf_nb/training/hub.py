"A hub that may be away: what it answers is explained, and costs no run."

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,  # of the HTTP client that this release of the hub's library uses
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from transformers.utils import logging

logger = logging.get_logger(__name__)
HUB_ERRORS = (HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled, HTTPError)


def error_text(error: BaseException) -> str:
    "Kind and first line of an error."
    return f"{type(error).__name__}: {str(error).splitlines()[0]}"


@contextmanager
def asking_for_repository() -> Iterator[None]:
    "Raises ConnectionError with the fix where the hub does not answer."
    try:
        yield
    except HUB_ERRORS as error:
        raise ConnectionError(
            f"the hub could not be asked for a repository ({error_text(error)}). Nothing is lost. "
            "Log in with `hf auth login` and check the network, or train without push_to_hub and "
            "call trainer.push_to_hub() later."
        ) from error


@contextmanager
def pushing(args: Any) -> Iterator[None]:
    "A push that fails is logged, not raised."
    try:
        yield
    except (ConnectionError, *HUB_ERRORS) as error:
        logger.warning(
            f"not pushed to the hub ({error_text(error)}). The model is in {args.output_dir}; "
            "training is not affected. trainer.push_to_hub() tries again."
        )
