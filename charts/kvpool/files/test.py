"""What `helm test` runs: do the operator, its webhook and the API answer?"""

import socket
import ssl
import sys
import time
import urllib.request

PATIENCE_S = 40


def answers(address):
    """None when `address` answers, else why not. https: only that somebody speaks TLS there."""
    try:
        if address.startswith("https://"):
            host, port = address[8:].rsplit(":", 1)
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            with socket.create_connection((host, int(port)), timeout=5) as plain:
                context.wrap_socket(plain, server_hostname=host).close()
        else:
            urllib.request.urlopen(address, timeout=5).close()
    except OSError as error:
        return str(error)
    return None


def main(addresses):
    deadline = time.monotonic() + PATIENCE_S
    left = dict.fromkeys(addresses, "")
    while left and time.monotonic() < deadline:
        for address in list(left):
            problem = answers(address)
            if problem is None:
                print(f"{address} answers", flush=True)
                del left[address]
            else:
                left[address] = problem
        time.sleep(1 if left else 0)
    for address, problem in left.items():
        print(f"{address}: {problem}. Look at the logs of the pods behind it.", flush=True)
    return 1 if left else 0


sys.exit(main(sys.argv[1:]))
