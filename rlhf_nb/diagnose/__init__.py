"Is it wired up right, what did this update do, is this curve normal: no trainer uses these."
