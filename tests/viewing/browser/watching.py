"""What a page must not do, noted while it does it: errors, dialogs, and requests for anything but the file itself."""

from __future__ import annotations

from playwright.sync_api import ConsoleMessage, Dialog, Error, Page, Request, WebSocket


def complaints_of(page: Page) -> list[str]:
    """Watch a page from now on.

    Args:
        page: A new page.

    Returns:
        A list that grows with each thing that a report does not do.
    """
    complaints: list[str] = []

    def on_console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            complaints.append(f"console {message.type}: {message.text}")

    def on_error(error: Error) -> None:
        complaints.append(f"page error: {error.message}")

    def on_dialog(dialog: Dialog) -> None:
        complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def on_request(request: Request) -> None:
        is_opening = request.is_navigation_request() and request.frame == page.main_frame
        if not (is_opening and request.url.startswith("file://")):
            complaints.append(f"request: {request.url}")

    def on_socket(socket: WebSocket) -> None:
        complaints.append(f"request: {socket.url}")

    def on_popup(popup: Page) -> None:
        complaints.append(f"popup: {popup.url}")

    page.on("console", on_console)
    page.on("pageerror", on_error)
    page.on("dialog", on_dialog)
    page.on("request", on_request)
    page.on("websocket", on_socket)
    page.on("popup", on_popup)
    return complaints
