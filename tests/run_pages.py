# nbdev_test, with workers forked from a process that has imported everything.

from forks import import_and_freeze
from nbdev.test import nbdev_test

import_and_freeze()
nbdev_test()
