"""
RocketMQ's remoting protocol, which brokers (port 10911) and name servers (port 9876) speak. It offers requests that gRPC lacks.

- `frames.py`: encoding of requests, decoding of answers and stored messages.
- `requests.py`: the requests that this package uses, and how to read their answers.
- `connection.py`: a connection with concurrent requests.
- `client.py`: the addresses of brokers, and a connection to each.
"""
