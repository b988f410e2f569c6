"""What ties the dashboard to a notebook's kernel."""

from __future__ import annotations

import ipywidgets as widgets


def forget_last_writer(widget: widgets.Widget) -> widgets.Widget:
    """Let a widget's messages arrive on the subshell that the front end addressed. ipykernel 7.4
    answers on the shell that last wrote to the widget: that of the cell that trains, which is busy.
    It keeps that memory in `_reply_subshell_for` of the comm, and has no public switch."""
    if widget.comm is not None:
        widget.comm._reply_subshell_for = None
    return widget
