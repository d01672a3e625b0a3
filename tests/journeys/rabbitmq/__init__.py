"""Journeys on RabbitMQ. As an app it is the code of their processes: its consumers, and what publishes for them."""
