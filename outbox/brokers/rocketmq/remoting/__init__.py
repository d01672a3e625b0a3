"""
RocketMQ's remoting protocol: what its gRPC does not offer, asked of the brokers' own ports and of name servers.

- `frames.py`: requests, answers and stored messages as bytes.
- `requests.py`: what is asked, and what the answers say.
- `connection.py`: one connection, many requests under way.
- `ports.py`: which brokers there are, and a connection to each.
"""
