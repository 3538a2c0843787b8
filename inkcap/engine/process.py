"""`python -m inkcap.engine.process`: one engine core, started by a client with its setup on stdin."""

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # to collect garbage among modules that are read takes a fifth of the time; `serve_core` goes on
    from inkcap.engine.assemble import assemble
    from inkcap.engine.serving import serve_core

    sys.exit(serve_core(assemble))
