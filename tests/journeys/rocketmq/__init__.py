"""An app for processes of their own: handlers that write down what they did, on a RocketMQ that the tests start."""
