"""What ties the dashboard to a notebook's kernel."""

from __future__ import annotations

import ipywidgets as widgets


def forget_last_writer(widget: widgets.Widget) -> widgets.Widget:
    """Let a widget's messages arrive on the subshell that the front end addressed.

    ipykernel 7.4 answers a widget on the shell that last wrote to it. For a widget that is written
    from the cell that trains, this is the one shell that is busy. It keeps that memory in a private
    attribute of the comm, `_reply_subshell_for`, and has no public switch.
    """
    if widget.comm is not None:
        widget.comm._reply_subshell_for = None
    return widget
