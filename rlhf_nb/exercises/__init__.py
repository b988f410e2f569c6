"""The exercises of the pages: for each a right answer, cases, and programs with known mistakes.

One module a page, which names it in PAGE; `rlhf_nb.checks` names their checkers. `engine` has the
checker itself, `difference` what it says of an answer that makes no known mistake. The wrong
programs are part of the package on purpose: a checker runs them beside a reader's answer, and if
the results agree on every case it names the mistake. Nothing else calls them. Nothing here uses the
rest of the package but `ui.html`, which shows a verdict, so that a right answer cannot be wrong
together with what it checks.
"""
