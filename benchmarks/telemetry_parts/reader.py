"""Somebody who is attached to an engine and reads all that comes, in a process of its own, and draws nothing.

    python reader.py SOCKET HZ

Says "ready" when the first bytes have come; ends with its standard input, and says how many bytes there were.
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
