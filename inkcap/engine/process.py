"""`python -m inkcap.engine.process`: one engine core, started by a client with its setup on stdin."""

import sys

from inkcap.engine.assemble import assemble
from inkcap.engine.serving import serve_core

if __name__ == "__main__":
    sys.exit(serve_core(assemble))
