"""
RocketMQ's remoting protocol, which brokers and name servers speak at their own ports. It offers requests that gRPC lacks.

- `frames.py`: encoding of requests, decoding of answers and stored messages.
- `requests.py`: the requests that this package uses, and how to read their answers.
- `connection.py`: one connection with concurrent requests.
- `ports.py`: the addresses of brokers, and a connection to each.
"""
