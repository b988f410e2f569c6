"""The apparatus of the widgets: markup, controls and the front end's files.

What a view shows is decided in the notebooks on views (`viz`, `explore`, `viewer`, `dashboard`,
`preferences`). Here is only what several of them share.
"""
