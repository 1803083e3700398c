"""Long listings, page by page: the answer has a link to the next page."""

from __future__ import annotations

import base64
from urllib.parse import urlencode

from tests.servers.hub.hub import Hub
from tests.servers.wire import Exchange


def page_of(
    hub: Hub, exchange: Exchange, names: list[str], parameters: tuple[str, ...]
) -> tuple[list[str], dict[str, str]]:
    """Choose the names that this answer lists.

    Args:
        names: All of them, sorted.
        parameters: Of the query; the next page's has them, too.

    Returns:
        The names, and headers that lead to the next page.
    """
    after = base64.urlsafe_b64decode(exchange.query("cursor")).decode()
    names = [name for name in names if name > after]
    size = min(hub.page_size, int(exchange.query("limit") or hub.page_size))
    page = names[:size]
    if len(names) <= size:
        return page, {}
    cursor = base64.urlsafe_b64encode(page[-1].encode()).decode()
    query = {name: exchange.query(name) for name in parameters if exchange.query(name)}
    url = f"{hub.api_origin}{exchange.path}?{urlencode({**query, 'cursor': cursor})}"
    return page, {"Link": f'<{url}>; rel="next"'}
