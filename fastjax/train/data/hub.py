"""Whether data sets can come from the hub, found out once instead of by minutes of retries."""

from collections.abc import Iterator
from contextlib import contextmanager

# Seconds that the hub has to answer.
_PATIENCE_S = 5.0


@contextmanager
def offline_if_unreachable() -> Iterator[str | None]:
    """Within it, `datasets` asks the hub only if the hub answers, and else looks into the hub's cache alone.

    Yields: why the hub is not asked, or None if it is.
    """
    import datasets
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        yield "HF_HUB_OFFLINE forbids asking the hub"
        return
    if _hub_answers():
        yield None
        return
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield f"the hub ({constants.ENDPOINT}) cannot be reached"
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _hub_answers() -> bool:
    from huggingface_hub import constants, get_session

    try:
        # The library's own session, so that proxies and certificates are those of the download.
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE_S)
    except Exception:  # noqa: BLE001 - the HTTP library below, whose name has changed, raises its own
        return False
    return True
