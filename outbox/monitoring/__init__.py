"""What an operator or a probe asks: status, health, metrics, a message's timeline, the doctor."""
