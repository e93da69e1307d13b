"""`adloco prepare`, from a checkout."""

import sys

from adloco_jax.main import main

if __name__ == "__main__":
    sys.exit(main(["prepare", *sys.argv[1:]]))
