"""`adloco gradients`, from a checkout."""

import sys

from adloco_jax.main import main

if __name__ == "__main__":
    sys.exit(main(["gradients", *sys.argv[1:]]))
