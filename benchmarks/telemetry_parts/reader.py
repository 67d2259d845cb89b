"""Attach to an engine and read all frames in a separate process, without drawing.

    python reader.py SOCKET HZ

Prints "ready" after the first bytes. Ends when its standard input ends, and prints the number of bytes.
"""

from __future__ import annotations

import selectors
import sys

from radixkv.telemetry.discovery import connect


def main() -> None:
    connection = connect(sys.argv[1], hz=float(sys.argv[2]))
    seen = len(connection.recv(1 << 16))
    print("ready", flush=True)
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if sys.stdin in ready:
                break
            seen += len(connection.recv(1 << 16))
    connection.close()
    print(seen, flush=True)


if __name__ == "__main__":
    main()
