"""Is it wired up right, what did this update do, is this curve normal: plain modules that use the
trainer, and that nothing which trains uses."""
