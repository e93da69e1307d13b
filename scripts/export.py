"""`adloco export`, from a checkout."""

import sys

from adloco_jax.main import main

if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))
